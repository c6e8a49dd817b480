#include "common/predict_parts.hpp"

#include <algorithm>
#include <string>

namespace mgp {

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

int64_t compute_bytes(Precision precision) { return bytes_of(compute_dtype(precision)); }

namespace {
bool in_a_layer(const ParameterShape& parameter) { return parameter.name.find("layers.") != std::string::npos; }
}  // namespace

CastWeights cast_weights(const ModelConfig& config, Precision precision) {
  CastWeights casts;
  if (!uses_autocast(precision)) return casts;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const bool looked_up = parameter.name == "embedding.weight" || parameter.name == "position.weight";
    const bool norm = parameter.name.find("norm") != std::string::npos;
    if (looked_up || norm) continue;
    (in_a_layer(parameter) ? casts.layers : casts.outside) += 2 * parameter.numel();
  }
  return casts;
}

int64_t layer_parameters(const ModelConfig& config) {
  int64_t elements = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    if (in_a_layer(parameter)) elements += parameter.numel();
  }
  return elements / config.layers;
}

int64_t stream_bytes(Precision precision, bool low_weights) {
  return low_weights ? compute_bytes(precision) : bytes_of(storage_dtype(precision));
}

int64_t residual_stream(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows) {
  return rows * m.seq_len * m.dim * stream_bytes(precision, low_weights);
}

int64_t math_bytes(Precision precision) { return std::max<int64_t>(compute_bytes(precision), 4); }

int64_t probabilities(const ModelConfig& m, int64_t rows) { return rows * m.heads * m.seq_len * m.seq_len; }

int64_t backward_temporaries(const ModelConfig& m, Precision precision, bool math_attention, bool low_weights,
                             int64_t rows) {
  const int64_t s = stream_bytes(precision, low_weights);
  const int64_t h = compute_bytes(precision);
  const int64_t tokens = rows * m.seq_len;
  // In the MLP: the gradient of the residual stream (C), of GELU's output (F), and of the last matrix [C,F], which is
  // made together with the latter.
  const int64_t in_mlp = tokens * m.dim * s + tokens * m.mlp_dim * h + m.dim * m.mlp_dim * s;
  if (!math_attention || m.kind != ModelKind::classifier) return in_mlp;
  // In the softmax of the math kernel: gradients of the probabilities and of the scores, of the matrices passed on the
  // way, and of V and the residual stream, which take the places of V and of norm2's input. Gone are attention's output
  // and norm2's (C each) and both sides of GELU (2F). A nested backward still holds the gradient that it began with.
  const int64_t in_attention = 2 * probabilities(m, rows) * math_bytes(precision) +
                               (2 * m.dim * m.mlp_dim + m.dim * m.dim) * s - 2 * tokens * (m.dim + m.mlp_dim) * h +
                               (m.checkpoint_activations ? tokens * m.dim * s : 0);
  return std::max(in_mlp, in_attention);
}

int64_t norm_statistics(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows) {
  return 2 * rows * m.seq_len * std::max<int64_t>(stream_bytes(precision, low_weights), 4);
}

int64_t layer_bytes(const ModelConfig& m, Precision precision, bool math_attention, int64_t rows, bool low_weights) {
  const int64_t s = stream_bytes(precision, low_weights);  // residual stream and norms
  const int64_t h = compute_bytes(precision);              // matmuls, attention, GELU
  const int64_t tokens = rows * m.seq_len;                 // B*T
  const int64_t stats = norm_statistics(m, precision, low_weights, rows);

  int64_t layer = 0;
  if (m.kind == ModelKind::classifier) {
    layer += tokens * m.dim * s + stats;  // residual stream into norm1              [B,T,C]
    layer += tokens * m.dim * h;          // norm1 out = input of the QKV matmul     [B,T,C]
    layer += tokens * m.dim * h;          // attention out = input of out_proj       [B,T,C]
    if (math_attention) {
      // Scaled copies of Q and K and a copy of V with its heads in order, instead of the tensor that they are views of.
      layer += 3 * tokens * m.dim * math_bytes(precision);                               // 3 [B,H,T,C/H]
      layer += probabilities(m, rows) * math_bytes(precision);                           // [B,H,T,T]
      if (m.dropout > 0) layer += probabilities(m, rows) * (math_bytes(precision) + 1);  // after dropout, and its mask
    } else {
      layer += 3 * tokens * m.dim * h;          // Q, K, V in one tensor            [B,T,3C]
      layer += rows * m.heads * m.seq_len * 4;  // log-sum-exp of each row of scores [B,H,T]
    }
  }
  layer += tokens * m.dim * s + stats;  // residual stream into norm2 (MLP model: its only norm) [B,T,C]
  layer += tokens * m.dim * h;          // norm2 out = input of the first MLP matmul             [B,T,C]
  layer += 2 * tokens * m.mlp_dim * h;  // before and after GELU                               2 [B,T,F]
  // Dropout keeps one byte a value: after attention (classifier) and after the MLP, and inside the MLP.
  if (m.dropout > 0) layer += tokens * ((m.kind == ModelKind::classifier ? 2 : 1) * m.dim + m.mlp_dim);
  return layer;
}

int64_t activation_bytes(const ModelConfig& m, Precision precision, bool math_attention, int64_t rows,
                         bool low_weights) {
  const CastWeights casts = low_weights ? CastWeights{} : cast_weights(m, precision);
  const int64_t stream = residual_stream(m, precision, low_weights, rows);
  // The last residual stream, kept by the final norm, and the tokens themselves.
  const int64_t outside =
      stream + norm_statistics(m, precision, low_weights, rows) + rows * m.seq_len * 8 + casts.outside;
  if (m.checkpoint_activations) return m.layers * stream + outside;  // of each layer its input alone
  return m.layers * layer_bytes(m, precision, math_attention, rows, low_weights) + casts.layers + outside;
}

int64_t recomputation_bytes(const ModelConfig& m, Precision precision, bool math_attention, int64_t rows,
                            bool low_weights) {
  if (!m.checkpoint_activations) return 0;
  const CastWeights casts = low_weights ? CastWeights{} : cast_weights(m, precision);
  return layer_bytes(m, precision, math_attention, rows, low_weights) -
         residual_stream(m, precision, low_weights, rows) + casts.layers / m.layers;
}

}  // namespace mgp

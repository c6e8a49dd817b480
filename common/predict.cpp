#include "common/predict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "common/text.hpp"

namespace mgp {
namespace {

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// Bytes of one element in matmuls and attention: bf16 or fp16 under autocast, else as stored.
int64_t compute_bytes(Precision precision) { return bytes_of(compute_dtype(precision)); }

/// Bytes of the low-precision copies that autocast makes of the weights which enter a matmul. The graph saves them, so
/// each lives from its layer's forward until backward has passed that layer. With checkpointing a layer's copies are
/// made in each of its two runs and live as long as that run's tensors: one layer's at a time.
struct CastWeights {
  int64_t layers = 0;   ///< of all layers together
  int64_t outside = 0;  ///< the head's
};

bool in_a_layer(const ParameterShape& parameter) { return parameter.name.find("layers.") != std::string::npos; }

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

/// Parameters of one layer.
int64_t layer_parameters(const ModelConfig& config) {
  int64_t elements = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    if (in_a_layer(parameter)) elements += parameter.numel();
  }
  return elements / config.layers;
}

/// Bytes of one element of the residual stream: under autocast it keeps the storage dtype, low weights make it low too.
int64_t stream_bytes(Precision precision, bool low_weights) {
  return low_weights ? compute_bytes(precision) : bytes_of(storage_dtype(precision));
}

/// The residual stream at one place, [B,T,C]: what a layer reads and what it writes.
int64_t residual_stream(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows) {
  return rows * m.seq_len * m.dim * stream_bytes(precision, low_weights);
}

/// The math kernel of attention computes bf16 and fp16 in fp32.
int64_t math_bytes(Precision precision) { return std::max<int64_t>(compute_bytes(precision), 4); }

/// Attention's probabilities [B,H,T,T], which the math kernel writes out.
int64_t probabilities(const ModelConfig& m, int64_t rows) { return rows * m.heads * m.seq_len * m.seq_len; }

/// What the backward of one layer holds at its worst moment on top of what the layer saved.
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

/// Bytes that hang on the moment of backward.
struct Need {
  int64_t activations = 0;  ///< and temporaries
  int64_t gradients = 0;    ///< outside of buckets
  int64_t total() const { return activations + gradients; }
};

/// Mean and 1/std of one LayerNorm, [B,T] each.
int64_t norm_statistics(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows) {
  return 2 * rows * m.seq_len * std::max<int64_t>(stream_bytes(precision, low_weights), 4);
}

/// All that one layer keeps for its backward, its input included.
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

}  // namespace

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

MemoryPrediction predict_memory(const Options& o, const MemoryPattern& pattern) {
  const int64_t s = bytes_of(storage_dtype(o.precision));
  const int64_t parameters = parameter_count(o.model) * s;
  // Rows of the largest backward pass.
  const int64_t rows = (o.batch_size + o.accumulate - 1) / o.accumulate;
  const bool math_attention = o.deterministic || o.precision == Precision::fp64 || !o.cuda;

  MemoryPrediction memory;
  memory.parameters = parameters + (o.low_weights() ? parameter_count(o.model) * compute_bytes(o.precision) : 0);
  memory.optimizer = 2 * parameters + 4 * static_cast<int64_t>(parameter_shapes(o.model).size());
  // LibTorch gives each cuBLAS handle 32 MiB on Hopper (8 MiB on older GPUs). There are two: autograd runs backward on a
  // thread of its own, and handles belong to threads.
  memory.workspace = o.cuda ? 2 * (32ll << 20) : 0;
  if (pattern.gradients_in_buckets) memory.communication_buffers = parameters;
  if (pattern.shard_elements > 0) {
    const int64_t held = pattern.shard_elements * s;
    const int64_t compute = o.low_weights() ? compute_bytes(o.precision) : s;
    memory.parameters = held;
    memory.optimizer = 2 * held;
    // The gradient of the shard stays; whole units and what is on its way come and go.
    memory.communication_buffers = held + pattern.whole_elements * compute;
  }

  // Two moments can be the peak. Start of backward: all activations, and no gradients yet (unless an earlier pass of the
  // same step left them). End of backward: all gradients, no activations.
  const ModelConfig& m = o.model;
  const int64_t kept = activation_bytes(m, o.precision, math_attention, rows, o.low_weights());
  const int64_t again = recomputation_bytes(m, o.precision, math_attention, rows, o.low_weights());
  const int64_t temporaries = backward_temporaries(m, o.precision, math_attention, o.low_weights(), rows);
  const bool shards = pattern.shard_elements > 0;  // their gradients leave unit by unit, those of earlier passes stay
  const int64_t gradients_at_start = pattern.gradients_in_buckets || o.accumulate == 1 ? 0 : parameters;
  // With checkpointing the start holds the inputs of all layers and the whole of the last layer, run again. (Its
  // output, made again, takes the place of the last residual stream, which the final norm has let go by then.)
  const Need at_start{kept + again + temporaries, gradients_at_start};

  // With buckets, fresh gradients wait outside until their bucket is full; the last is the embedding's.
  const int64_t element = stream_bytes(o.precision, o.low_weights());  // also of a fresh gradient
  const int64_t embedding = m.vocab_size * m.dim * element;
  const int64_t stream = residual_stream(m, o.precision, o.low_weights(), rows);
  const int64_t whole_at_end = shards ? pattern.whole_gradient_elements * s : parameters;
  const Need at_end{2 * stream, pattern.gradients_in_buckets ? embedding : whole_at_end};
  Need peak = at_start.total() >= at_end.total() ? at_start : at_end;

  // A third with checkpointing: from layer to layer backward lets one input go and leaves one layer's gradients, so the
  // first layer's second run may need more than the last layer's. No gradients yet: its own, embedding and positions.
  if (m.checkpoint_activations && !pattern.gradients_in_buckets && !shards && o.accumulate == 1) {
    const int64_t gradients = (parameter_count(m) - layer_parameters(m) - m.seq_len * m.dim) * element - embedding;
    const Need at_first_layer{at_start.activations - (m.layers - 1) * stream, gradients};
    if (at_first_layer.total() > peak.total()) peak = at_first_layer;
  }
  memory.activations = peak.activations;
  memory.gradients = peak.gradients;
  return memory;
}

int64_t largest_batch(Options options, const MemoryPattern& pattern, int64_t free_bytes) {
  const auto fits = [&](int64_t rows) {
    options.batch_size = rows;
    return predict_memory(options, pattern).peak() <= free_bytes;
  };
  int64_t low = 0;
  int64_t high = options.batch_size;  // known not to fit
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

double wire_bytes(const std::string& call, double payload, int ranks) {
  const double n = ranks;
  if (call == "all_reduce") return payload * 2.0 * (n - 1) / n;
  if (call == "all_gather" || call == "reduce_scatter") return payload * (n - 1) / n;
  return ranks > 1 ? payload : 0.0;
}

std::string memory_table(const MemoryPrediction& p) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [kind, bytes] :
       std::vector<std::pair<std::string, int64_t>>{{"parameters", p.parameters},
                                                    {"optimizer (AdamW moments)", p.optimizer},
                                                    {"communication buffers", p.communication_buffers},
                                                    {"gradients outside of them", p.gradients},
                                                    {"activations and temporaries", p.activations},
                                                    {"cuBLAS workspace", p.workspace},
                                                    {"peak", p.peak()}}) {
    rows.push_back({kind, human_bytes(static_cast<double>(bytes)), with_commas(bytes)});
  }
  return table("memory per rank, predicted", rows, /*head=*/false);
}

std::string choices_text(const Options& options, const MemoryPattern& pattern) {
  const int64_t peak = predict_memory(options, pattern).peak();
  const auto beside = [&](const Options& other, const std::string& choice) {
    const int64_t difference = predict_memory(other, pattern).peak() - peak;
    return fmt::format("{} {} {} of the predicted peak", choice, difference >= 0 ? "saves" : "costs",
                       human_bytes(static_cast<double>(std::abs(difference))));
  };
  std::string text;
  if (uses_autocast(options.precision)) {
    Options other = options;
    other.weights = options.low_weights() ? "autocast" : "low";
    text += beside(other, fmt::format("--weights {}, beside {},", options.weights, other.weights));
    // Per parameter. Autocast's casts come and go with the activations.
    if (pattern.shard_elements > 0) {
      text += options.low_weights() ? ": whole weights of 2 bytes for 4, and no casts that stay until backward\n"
                                    : ": whole weights of 4 bytes for 2, and casts that stay until backward\n";
    } else {
      text += options.low_weights()
                  ? ": 18 bytes a parameter at the end of backward (2 weight, 4 master, 8 moments, 4 "
                    "gradient) for 16, and a residual stream of 2 bytes for 4\n"
                  : ": 16 bytes a parameter (4 weight, 8 moments, 4 gradient) for 18, casts of 2 and a "
                    "residual stream of 4 bytes for 2\n";
    }
  }
  if (options.model.checkpoint_activations) {
    Options other = options;
    other.model.checkpoint_activations = false;
    text += beside(other, "--checkpoint-activations");
    text += ", and costs each layer's forward once more: a third more arithmetic\n";
  }
  return text;
}

std::string call_table(const std::vector<CallPrediction>& calls, int ranks) {
  std::vector<std::vector<std::string>> rows = {
      {"call", "calls (step 1)", "calls", "payload bytes", "ring model, bytes sent", "formula"}};
  for (const CallPrediction& call : calls) {
    rows.push_back(
        {call.call, std::to_string(call.first_step_calls), std::to_string(call.calls), with_commas(call.payload_bytes),
         with_commas(static_cast<int64_t>(wire_bytes(call.call, static_cast<double>(call.payload_bytes), ranks))),
         call.formula});
  }
  if (calls.empty()) return " nothing crosses the wire\n";
  return table(fmt::format("wire per step and rank, {} rank{}, predicted", ranks, ranks == 1 ? "" : "s"), rows, true);
}

}  // namespace mgp

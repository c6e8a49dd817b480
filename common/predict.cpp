#include "common/predict.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/text.hpp"

namespace mgp {
namespace {

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// Bytes of one element in matmuls and attention: bf16 or fp16 under autocast, else as stored.
int64_t compute_bytes(Precision precision) { return bytes_of(compute_dtype(precision)); }

/// Under autocast the low-precision copies of all weights that enter a matmul live from forward to the end of backward.
int64_t cast_weights(const ModelConfig& config, Precision precision) {
  if (!uses_autocast(precision)) return 0;
  int64_t elements = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const bool looked_up = parameter.name == "embedding.weight" || parameter.name == "position.weight";
    const bool norm = parameter.name.find("norm") != std::string::npos;
    if (!looked_up && !norm) elements += parameter.numel();
  }
  return 2 * elements;
}

/// Bytes of one element of the residual stream: under autocast it keeps the storage dtype, low weights make it low too.
int64_t stream_bytes(Precision precision, bool low_weights) {
  return low_weights ? compute_bytes(precision) : bytes_of(storage_dtype(precision));
}

/// What backward holds on top of the saved activations when it is in the MLP of the last layer: the gradient of the
/// residual stream (C) and of GELU's output (F).
int64_t backward_temporaries(const ModelConfig& config, Precision precision, bool low_weights, int64_t rows) {
  const int64_t tokens = rows * config.seq_len;
  return tokens * config.dim * stream_bytes(precision, low_weights) +
         tokens * config.mlp_dim * compute_bytes(precision);
}

}  // namespace

int64_t activation_bytes(const ModelConfig& m, Precision precision, bool math_attention, int64_t rows,
                         bool low_weights) {
  const int64_t s = stream_bytes(precision, low_weights);      // residual stream and norms
  const int64_t h = compute_bytes(precision);                  // matmuls, attention, GELU
  const int64_t tokens = rows * m.seq_len;                     // B*T
  const int64_t stats = 2 * tokens * std::max<int64_t>(s, 4);  // mean and 1/std of one LayerNorm

  int64_t layer = 0;
  if (m.kind == ModelKind::classifier) {
    layer += tokens * m.dim * s + stats;  // residual stream into norm1              [B,T,C]
    layer += tokens * m.dim * h;          // norm1 out = input of the QKV matmul     [B,T,C]
    layer += 3 * tokens * m.dim * h;      // Q, K, V in one tensor                   [B,T,3C]
    layer += tokens * m.dim * h;          // attention out = input of out_proj       [B,T,C]
    if (math_attention) {
      // The math kernel keeps the probabilities and scaled copies of Q and K.
      layer += rows * m.heads * m.seq_len * m.seq_len * h + 2 * tokens * m.dim * h;
    } else {
      layer += rows * m.heads * m.seq_len * 4;  // log-sum-exp of each row of scores [B,H,T]
    }
  }
  layer += tokens * m.dim * s + stats;  // residual stream into norm2 (MLP model: its only norm) [B,T,C]
  layer += tokens * m.dim * h;          // norm2 out = input of the first MLP matmul             [B,T,C]
  layer += 2 * tokens * m.mlp_dim * h;  // before and after GELU                               2 [B,T,F]
  // Dropout keeps one byte a value: after attention (classifier) and after the MLP, and inside the MLP.
  if (m.dropout > 0) layer += tokens * ((m.kind == ModelKind::classifier ? 2 : 1) * m.dim + m.mlp_dim);

  // The last residual stream, kept by the final norm, and the tokens themselves.
  return m.layers * layer + tokens * m.dim * s + stats + tokens * 8 + (low_weights ? 0 : cast_weights(m, precision));
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

  // Two moments can be the peak. Start of backward: all activations, and no gradients yet (unless an earlier pass of the
  // same step left them). End of backward: all gradients, no activations.
  const int64_t kept = activation_bytes(o.model, o.precision, math_attention, rows, o.low_weights());
  const int64_t at_start = kept + backward_temporaries(o.model, o.precision, o.low_weights(), rows);
  const int64_t gradients_at_start = pattern.gradients_in_buckets || o.accumulate == 1 ? 0 : parameters;
  // With buckets, fresh gradients wait outside until their bucket is full; the last is the embedding's.
  const int64_t stream = stream_bytes(o.precision, o.low_weights());
  const int64_t embedding = o.model.vocab_size * o.model.dim * stream;
  const int64_t gradients_at_end = pattern.gradients_in_buckets ? embedding : parameters;
  const int64_t at_end =
      2 * rows * o.model.seq_len * o.model.dim * stream + (o.low_weights() ? 0 : cast_weights(o.model, o.precision));

  const bool start_is_peak = at_start + gradients_at_start >= at_end + gradients_at_end;
  memory.activations = start_is_peak ? at_start : at_end;
  memory.gradients = start_is_peak ? gradients_at_start : gradients_at_end;
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

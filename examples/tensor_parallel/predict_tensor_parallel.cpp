#include "examples/tensor_parallel/predict_tensor_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/predict_parts.hpp"
#include "examples/tensor_parallel/parallel_model.hpp"

namespace mgp {
namespace {

/// Elements that rank 0 holds.
struct Held {
  int64_t all = 0;
  int64_t layers = 0;                 // of them, in the layers
  int64_t cast_layers = 0, cast = 0;  // that autocast copies for matmuls: in the layers, outside
};

Held held_by_rank_0(const Options& o) {
  Held held;
  for (const Piece& piece : parallel_pieces(o.model, 0, o.world)) {
    const std::string& name = piece.of.name;
    const bool in_layer = name.find("layers.") != std::string::npos;
    held.all += piece.numel();
    if (in_layer) held.layers += piece.numel();
    const bool looked_up = name == "embedding.weight" || name == "position.weight";
    // Biases of row-parallel layers are added to the sum, outside of the matmul.
    const bool added = in_layer && piece.of.shape.size() == 1 && piece.is_whole() && o.world > 1;
    if (looked_up || added || name.find("norm") != std::string::npos) continue;
    (in_layer ? held.cast_layers : held.cast) += piece.numel();
  }
  return held;
}

}  // namespace

MemoryPrediction predict_tensor_parallel_memory(const Options& o) {
  const ModelConfig& m = o.model;
  const bool math_attention = uses_math_attention(o);
  const bool low = o.low_weights();
  const Held held = held_by_rank_0(o);
  const int64_t s = bytes_of(storage_dtype(o.precision));
  const int64_t h = compute_bytes(o.precision);
  const int64_t rows = (o.batch_size + o.accumulate - 1) / o.accumulate;  // of the largest backward pass
  const int64_t tokens = rows * m.seq_len;                                // B*T

  MemoryPrediction memory = held_memory(o, held.all, static_cast<int64_t>(parameter_shapes(m).size()));

  // A layer as if it had rank 0's hidden values and heads; what of C belongs to the others' heads is not there either.
  ModelConfig mine = m;
  mine.mlp_dim = slice_rows(m.mlp_dim, 0, o.world).size();
  int64_t others = 0;  // of C
  if (m.kind == ModelKind::classifier) {
    mine.heads = slice_rows(m.heads, 0, o.world).size();
    others = m.dim - mine.heads * (m.dim / m.heads);
  }
  const int64_t attention = tokens * others * (h + 3 * (math_attention ? math_bytes(o.precision) : h));  // out, q, k, v
  const int64_t layer = layer_bytes(mine, o.precision, math_attention, rows, low) - attention;
  const int64_t stream = residual_stream(m, o.precision, low, rows);
  const bool casts = uses_autocast(o.precision) && !low;
  const int64_t cast_layers = casts ? held.cast_layers * h : 0;
  const int64_t outside =
      stream + norm_statistics(m, o.precision, low, rows) + tokens * 8 + (casts ? held.cast * h : 0);
  const int64_t kept =
      m.checkpoint_activations ? m.layers * stream + outside : m.layers * layer + cast_layers + outside;
  const int64_t again = m.checkpoint_activations ? layer - stream + cast_layers / m.layers : 0;
  const int64_t temporaries = backward_temporaries(mine, o.precision, math_attention, low, rows);

  // The peak is one of three moments, as in predict_memory: backward begins, backward ends, or (with checkpointing) it
  // comes to the first layer.
  const int64_t gradients = held.all * s;
  std::vector<BackwardMoment> moments = {{kept + again + temporaries, o.accumulate == 1 ? 0 : gradients},
                                         {2 * stream, gradients}};
  if (m.checkpoint_activations && o.accumulate == 1) {
    const int64_t there = held.all - held.layers / m.layers - (m.seq_len + m.vocab_size) * m.dim;
    moments.push_back({kept + again + temporaries - (m.layers - 1) * stream, there * stream_bytes(o.precision, low)});
  }
  set_peak(memory, moments);
  return memory;
}

std::vector<CallPrediction> predict_tensor_parallel_calls(const Options& o) {
  const ModelConfig& m = o.model;
  const int64_t pairs = m.kind == ModelKind::classifier ? 2 : 1;  // of f and g in a layer
  const int64_t each = m.checkpoint_activations ? 3 : 2;          // f, g, and g again in the second run
  const int64_t per_pass = m.layers * pairs * each;
  CallPrediction call;
  call.call = "all_reduce";
  call.calls = call.first_step_calls = per_pass * o.accumulate;
  call.payload_bytes = per_pass * o.global_batch_size / o.data_ranks() * m.seq_len * m.dim * compute_bytes(o.precision);
  call.formula = fmt::format("{} layers x {} x (f in backward, g in forward{}) x B T C x {} bytes", m.layers, pairs,
                             m.checkpoint_activations ? ", g again" : "", compute_bytes(o.precision));
  return {call};
}

}  // namespace mgp

#include "common/predict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "common/predict_parts.hpp"
#include "common/text.hpp"

namespace mgp {

MemoryPrediction held_memory(const Options& o, int64_t elements, int64_t tensors) {
  const int64_t stored = elements * bytes_of(storage_dtype(o.precision));
  MemoryPrediction memory;
  memory.parameters = stored + (o.low_weights() ? elements * compute_bytes(o.precision) : 0);
  memory.optimizer = 2 * stored + 4 * tensors;
  // LibTorch gives each cuBLAS handle 32 MiB on Hopper (8 MiB on older GPUs). There are two: autograd runs backward on a
  // thread of its own, and handles belong to threads.
  memory.workspace = o.cuda ? 2 * (32ll << 20) : 0;
  return memory;
}

bool uses_math_attention(const Options& o) { return o.deterministic || o.precision == Precision::fp64 || !o.cuda; }

void set_peak(MemoryPrediction& memory, const std::vector<BackwardMoment>& moments) {
  const auto peak =
      std::max_element(moments.begin(), moments.end(),
                       [](const BackwardMoment& a, const BackwardMoment& b) { return a.total() < b.total(); });
  memory.activations = peak->activations;
  memory.gradients = peak->gradients;
}

MemoryPrediction predict_memory(const Options& o, const MemoryPattern& pattern) {
  if (pattern.formula) return pattern.formula(o);
  const int64_t s = bytes_of(storage_dtype(o.precision));
  const int64_t parameters = parameter_count(o.model) * s;
  // Rows of the largest backward pass.
  const int64_t rows = (o.batch_size + o.accumulate - 1) / o.accumulate;
  const bool math_attention = uses_math_attention(o);

  MemoryPrediction memory =
      held_memory(o, parameter_count(o.model), static_cast<int64_t>(parameter_shapes(o.model).size()));
  if (pattern.gradients_in_buckets) memory.communication_buffers = parameters;
  if (pattern.shard_elements > 0) {
    const int64_t held = pattern.shard_elements * s;
    const int64_t compute = o.low_weights() ? compute_bytes(o.precision) : s;
    memory.parameters = held;
    const int64_t trained = held - pattern.frozen_elements * s;
    memory.optimizer = 2 * trained;
    // The gradient of the shard stays; whole units and what is on its way come and go.
    memory.communication_buffers = trained + pattern.whole_elements * compute;
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
  const BackwardMoment at_start{kept + again + temporaries, gradients_at_start};

  // With buckets, fresh gradients wait outside until their bucket is full; the last is the embedding's.
  const int64_t element = stream_bytes(o.precision, o.low_weights());  // also of a fresh gradient
  const int64_t embedding = m.vocab_size * m.dim * element;
  const int64_t stream = residual_stream(m, o.precision, o.low_weights(), rows);
  const int64_t whole_at_end = shards ? pattern.whole_gradient_elements * s : parameters;
  std::vector<BackwardMoment> moments = {at_start,
                                         {2 * stream, pattern.gradients_in_buckets ? embedding : whole_at_end}};

  // A third with checkpointing: from layer to layer backward lets one input go and leaves one layer's gradients, so the
  // first layer's second run may need more than the last layer's. No gradients yet: its own, embedding and positions.
  if (m.checkpoint_activations && !pattern.gradients_in_buckets && !shards && o.accumulate == 1) {
    const int64_t gradients = (parameter_count(m) - layer_parameters(m) - m.seq_len * m.dim) * element - embedding;
    moments.push_back({at_start.activations - (m.layers - 1) * stream, gradients});
  }
  set_peak(memory, moments);
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
  if (call == "copy") return payload;  // between the devices of one process
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

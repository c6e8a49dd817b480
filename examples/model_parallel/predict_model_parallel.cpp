#include "examples/model_parallel/predict_model_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/device_list.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

/// Rows of the largest backward pass.
int64_t largest_rows(const Options& o) { return (o.batch_size + o.accumulate - 1) / o.accumulate; }

std::string holds(const StagePart& part) {
  std::string text = part.has_embedding ? "embedding, " : "";
  text += part.layers.count() == 1 ? fmt::format("layer {}", part.layers.first)
                                   : fmt::format("layers {} to {}", part.layers.first, part.layers.last - 1);
  return text + (part.has_head ? ", norm, head, loss" : "");
}

}  // namespace

MemoryPrediction predict_device_memory(const StageOptions& o, at::Device device) {
  int64_t elements = 0, tensors = 0, layers = 0;
  bool has_embedding = false, has_head = false;
  for (size_t stage = 0; stage < o.parts.size(); ++stage) {
    if (o.devices[stage] != device) continue;
    const std::vector<ParameterShape> shapes = stage_parameter_shapes(o.model, o.parts[stage]);
    elements += parameter_count(shapes);
    tensors += static_cast<int64_t>(shapes.size());
    layers += o.parts[stage].layers.count();
    has_embedding = has_embedding || o.parts[stage].has_embedding;
    has_head = has_head || o.parts[stage].has_head;
  }
  const ModelConfig& m = o.model;
  const int64_t s = bytes_of(storage_dtype(o.precision));
  const int64_t rows = largest_rows(o);
  const bool math = uses_math_attention(o);
  const bool low = o.low_weights();
  MemoryPrediction memory = held_memory(o, elements, tensors);

  // Kept from forward to backward: of each layer everything, or its input alone; what the head keeps; the tokens.
  const CastWeights casts = low ? CastWeights{} : cast_weights(m, o.precision);
  const int64_t stream = residual_stream(m, o.precision, low, rows);
  int64_t kept = m.checkpoint_activations
                     ? layers * stream
                     : layers * (layer_bytes(m, o.precision, math, rows, low) + casts.layers / m.layers);
  if (has_head) kept += stream + norm_statistics(m, o.precision, low, rows) + casts.outside;
  if (has_embedding) kept += rows * m.seq_len * 8;
  const int64_t at_start = kept + recomputation_bytes(m, o.precision, math, rows, low) +
                           backward_temporaries(m, o.precision, math, low, rows);
  // The peak is the start of this device's backward, or its end, when all its gradients are there. Where several passes
  // make a step, the gradients of the first wait through the start of the next.
  std::vector<BackwardMoment> moments = {{at_start, o.accumulate == 1 ? 0 : elements * s}, {2 * stream, elements * s}};
  // With checkpointing also the second run of this device's first layer, when only its own gradients and those of the
  // tables are still to come.
  if (m.checkpoint_activations && o.accumulate == 1) {
    const int64_t tables = has_embedding ? (m.vocab_size + m.seq_len) * m.dim : 0;
    moments.push_back(
        {at_start - (layers - 1) * stream, (elements - layer_parameters(m) - tables) * stream_bytes(o.precision, low)});
  }
  set_peak(memory, moments);
  return memory;
}

MemoryPattern first_device_memory(const StageOptions& options) {
  MemoryPattern pattern;
  pattern.formula = [options](const Options& shared) {
    StageOptions mine = options;
    static_cast<Options&>(mine) = shared;  // another batch, other weights: what Run asks "what if" about
    return predict_device_memory(mine, mine.first_device());
  };
  return pattern;
}

std::vector<CallPrediction> predict_copies(const StageOptions& o) {
  int64_t crossings = 0;
  for (size_t stage = 1; stage < o.devices.size(); ++stage)
    crossings += o.devices[stage] != o.devices[stage - 1] ? 1 : 0;
  if (crossings == 0) return {};
  // The rows of a step cross once, in as many pieces as there are passes; the activation forwards, its gradient back.
  const int64_t bytes = residual_stream(o.model, o.precision, o.low_weights(), o.global_batch_size);
  const int64_t copies = 2 * crossings * o.accumulate;
  return {{"copy", copies, copies, 2 * crossings * bytes,
           fmt::format("2 x B x T x C x {} bytes over {} boundar{} between devices",
                       stream_bytes(o.precision, o.low_weights()), crossings, crossings == 1 ? "y" : "ies")}};
}

std::string stage_tables(const StageOptions& o) {
  std::vector<std::vector<std::string>> stages = {{"stage", "device", "holds", "parameters", "share"}};
  const double all = static_cast<double>(parameter_count(o.model));
  for (size_t stage = 0; stage < o.parts.size(); ++stage) {
    const int64_t elements = parameter_count(stage_parameter_shapes(o.model, o.parts[stage]));
    stages.push_back({std::to_string(stage), o.devices[stage].str(), holds(o.parts[stage]), with_commas(elements),
                      fmt::format("{:.1f}%", 100.0 * static_cast<double>(elements) / all)});
  }
  std::string text = table("stages, one process drives them all", stages, /*head=*/true);
  const std::vector<at::Device> distinct = distinct_devices(o.devices);
  if (distinct.size() < o.devices.size()) {
    text += fmt::format("{} stages on {} device{}: stages that share a device hand over without a copy\n",
                        o.devices.size(), distinct.size(), distinct.size() == 1 ? "" : "s");
  }
  return text + predicted_memory_table(o.devices, [&](at::Device device) { return predict_device_memory(o, device); });
}

std::string other_devices(const StageOptions& options, const Launch& launch) {
  std::vector<std::vector<std::string>> rows = {{"device", "nvidia-smi", "uuid", "name", "memory"}};
  for (const auto& [device, facts] : facts_after_the_first(options.devices, launch)) {
    rows.push_back({facts.device, facts.physical >= 0 ? fmt::format("GPU {}", facts.physical) : "-", facts.uuid,
                    facts.name, human_bytes(static_cast<double>(facts.total_bytes))});
  }
  return rows.size() == 1 ? "" : table("further devices of this process", rows, /*head=*/true);
}

void refuse_if_too_large(const StageOptions& o, const Launch& launch) {
  refuse_if_too_large(
      o.devices, launch, [&](at::Device device) { return predict_device_memory(o, device); },
      fmt::format("{} rows", o.batch_size), "a smaller --batch-size, or fewer layers there with --split");
}

}  // namespace mgp

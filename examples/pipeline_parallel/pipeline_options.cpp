#include "examples/pipeline_parallel/pipeline_options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "common/error.hpp"
#include "common/text.hpp"

namespace mgp {

void add_pipeline_options(CLI::App& app, PipelineOptions& options) {
  app.add_option("--schedule", options.schedule, "gpipe: all forwards, then all backwards; 1f1b: in turn (gpipe)")
      ->group("Options");
  app.add_option("--micro-batches", options.micro_batches, "parts of the batch that follow each other (6)")
      ->group("Options");
  app.add_option("--split", options.split, "layers of each stage, for example 4,4,4 (as equal as possible)")
      ->group("Options");
  app.add_flag("--print-schedule", options.print_schedule,
               "show which stage does what when; with --predict --world N for any number of stages")
      ->group("Options");
}

void check_pipeline_options(const PipelineOptions& options) {
  make_schedule(options.schedule, 1, 1);  // the name alone
  if (options.micro_batches < 1) {
    throw UsageError(fmt::format("--micro-batches is {}: must be at least 1", options.micro_batches));
  }
}

PipelinePlan plan_pipeline(const PipelineOptions& options) {
  const std::vector<LayerRange> ranges = split_layers(options.split, options.model.layers, options.world, "the ranks");
  const int64_t rows = options.global_batch_size / options.accumulate;  // of the smallest pass
  if (options.micro_batches > rows) {
    throw UsageError(fmt::format(
        "--micro-batches {} of {} rows{} leaves a microbatch empty: at most {}, or more rows (--batch-size)",
        options.micro_batches, rows,
        options.accumulate > 1 ? fmt::format(" (a pass of --accumulate {})", options.accumulate) : "", rows));
  }
  PipelinePlan plan{stage_parts(ranges), make_schedule(options.schedule, options.world, options.micro_batches)};
  check_schedule(plan.schedule);
  return plan;
}

std::vector<CallPrediction> predict_messages(const PipelineOptions& o) {
  if (o.world == 1) return {};
  const int64_t element = stream_bytes(o.precision, o.low_weights());
  const int64_t calls = o.micro_batches * o.accumulate;
  const int64_t bytes = o.global_batch_size * o.model.seq_len * o.model.dim * element;
  const std::string formula = fmt::format("{} microbatch{}, together B T C x {} bytes{}", calls, calls == 1 ? "" : "es",
                                          element, o.world > 2 ? "; stages between two others twice that" : "");
  return {{"send", calls, calls, bytes, "activations: " + formula},
          {"recv", calls, calls, bytes, "gradients: " + formula}};
}

MemoryPrediction predict_stage(const Options& o, const PipelinePlan& plan, size_t stage) {
  const StagePart& part = plan.parts.at(stage);
  const ModelConfig& m = o.model;
  const bool math_attention = uses_math_attention(o);
  const bool low = o.low_weights();
  const std::vector<ParameterShape> shapes = stage_parameter_shapes(m, part);
  const int64_t elements = parameter_count(shapes);
  const int64_t stored = elements * bytes_of(storage_dtype(o.precision));
  MemoryPrediction memory = held_memory(o, elements, static_cast<int64_t>(shapes.size()));

  // Activations of one microbatch: what activation_bytes() counts for a whole model, cut by layers.
  const int64_t pass = (o.global_batch_size + o.accumulate - 1) / o.accumulate;
  const int64_t rows = (pass + plan.schedule.micro_batches - 1) / plan.schedule.micro_batches;
  const int64_t stream = residual_stream(m, o.precision, low, rows);
  const CastWeights casts = low ? CastWeights{} : cast_weights(m, o.precision);
  const int64_t layers = part.layers.count();
  int64_t one = m.checkpoint_activations ? layers * stream
                                         : layers * layer_bytes(m, o.precision, math_attention, rows, low) +
                                               casts.layers * layers / m.layers;
  // The last stage: the final norm's input and statistics. The others hold their output, from which backward begins.
  one += stream + (part.has_head ? norm_statistics(m, o.precision, low, rows) + casts.outside : 0);
  if (part.has_embedding) one += rows * m.seq_len * 8;  // tokens

  const int64_t kept = activations_kept(plan.schedule, static_cast<int64_t>(stage));
  const int64_t temporaries = backward_temporaries(m, o.precision, math_attention, low, rows) +
                              recomputation_bytes(m, o.precision, math_attention, rows, low) +
                              (part.has_head ? 0 : stream);  // the gradient that was received
  // Two moments can be the peak: the first backward, without gradients (unless an earlier pass left some), and a later one
  // beside the gradients. 1F1B has taken one microbatch more by then if there are more than it keeps; GPipe has not.
  const bool refilled = plan.schedule.micro_batches > kept;
  const int64_t later = refilled ? kept : kept - 1;
  const int64_t first_gradients = o.accumulate > 1 ? stored : 0;
  std::vector<BackwardMoment> moments = {{kept * one + temporaries, first_gradients}};
  if (later > 0) moments.push_back({later * one + temporaries, stored});
  if (m.checkpoint_activations && first_gradients == 0) {
    // As in predict.cpp: layer by layer backward lets one input go and leaves one layer's gradients, so the second run of
    // the first layer may need most. Its own gradients are not there yet, nor the embedding's.
    const int64_t outside = part.has_embedding ? (m.vocab_size + m.seq_len) * m.dim : 0;
    const int64_t gradients = (elements - layer_parameters(m) - outside) * stream_bytes(o.precision, low);
    moments.push_back({kept * one + temporaries - (layers - 1) * stream, gradients});
  }
  moments.push_back({2 * stream, stored});  // the end of the last backward
  set_peak(memory, moments);
  return memory;
}

MemoryPattern pipeline_memory(const PipelinePlan& plan) {
  MemoryPattern pattern;
  pattern.formula = [plan](const Options& options) {
    Options whole = options;
    if (options.data_ranks() == 1) whole.global_batch_size = options.batch_size;  // what largest_batch() varies
    MemoryPrediction largest;
    for (size_t stage = 0; stage < plan.parts.size(); ++stage) {
      const MemoryPrediction prediction = predict_stage(whole, plan, stage);
      if (prediction.peak() > largest.peak()) largest = prediction;
    }
    return largest;
  };
  return pattern;
}

std::string plan_table(const PipelineOptions& options, const PipelinePlan& plan) {
  std::vector<std::vector<std::string>> rows = {{"stage", "holds", "parameters", "microbatches kept", "peak"}};
  for (size_t stage = 0; stage < plan.parts.size(); ++stage) {
    const StagePart& part = plan.parts[stage];
    rows.push_back({std::to_string(stage),
                    fmt::format("{}layers {} to {}{}", part.has_embedding ? "embedding, " : "", part.layers.first,
                                part.layers.last - 1, part.has_head ? ", head" : ""),
                    with_commas(parameter_count(stage_parameter_shapes(options.model, part))),
                    std::to_string(activations_kept(plan.schedule, static_cast<int64_t>(stage))),
                    human_bytes(static_cast<double>(predict_stage(options, plan, stage).peak()))});
  }
  std::string text = table(
      fmt::format("{} stages, schedule {}, {} microbatches: idle {:.1f} % of the time, {} messages a pass",
                  options.world, options.schedule, options.micro_batches,
                  100.0 * predicted_idle_share(options.world, options.micro_batches), messages_sent(plan.schedule)),
      rows, true);
  if (options.print_schedule) text += schedule_table(plan.schedule);
  return text;
}

std::vector<Piece> pieces_of(const ModelConfig& config, const StagePart& part) {
  std::vector<Piece> pieces;
  for (const ParameterShape& shape : stage_parameter_shapes(config, part)) pieces.push_back({shape, 0, shape.numel()});
  return pieces;
}

}  // namespace mgp

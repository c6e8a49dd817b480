#include "examples/fsdp/shard_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>

#include "common/error.hpp"

namespace mgp {

ShardStrategy ShardOptions::strategy() const {
  if (shard_strategy == "grad") return ShardStrategy::grad;
  if (shard_strategy == "optimizer") return ShardStrategy::optimizer;
  return shard_strategy == "none" ? ShardStrategy::none : ShardStrategy::full;
}

void add_strategy_option(CLI::App& app, ShardOptions& options) {
  app.add_option("--shard-strategy", options.shard_strategy,
                 "what is sharded: full (ZeRO-3), grad (ZeRO-2), optimizer (ZeRO-1) or none (full)")
      ->group("Options");
}

void add_inflight_option(CLI::App& app, ShardOptions& options) {
  app.add_option("--max-inflight", options.max_inflight, "units that are whole at a time with full (2); 1: no prefetch")
      ->group("Options");
}

void add_freeze_option(CLI::App& app, ShardOptions& options) {
  app.add_option("--freeze", options.adamw.frozen,
                 "parameters that are not trained, by name or its first parts: embedding,encoder.layers.0")
      ->delimiter(',')
      ->group("Options");
}

void add_save_options(CLI::App& app, ShardOptions& options) {
  app.add_option_function<std::string>(
         "--save-sharded",
         [&options](const std::string& folder) {
           options.save_sharded = folder.empty() ? options.trainer.sharded_folder() : folder;
         },
         "write a sharded checkpoint, a file from each rank, at the end [DIR]")
      ->expected(0, 1)
      ->group("Options");
  app.add_flag("--no-save", options.no_save, "write nothing at the end of a run without --save")->group("Options");
}

void check_shard_options(ShardOptions& options) {
  const std::vector<std::string> known = {"full", "grad", "optimizer", "none"};
  if (std::find(known.begin(), known.end(), options.shard_strategy) == known.end()) {
    throw UsageError(
        fmt::format("--shard-strategy is '{}': choose full, grad, optimizer, none", options.shard_strategy));
  }
  if (options.max_inflight < 1) {
    throw UsageError(fmt::format("--max-inflight is {}: must be at least 1", options.max_inflight));
  }
  if (options.no_save && (options.save || options.save_sharded)) {
    throw UsageError(fmt::format("--no-save and {} contradict each other: give one of them",
                                 options.save ? "--save " + *options.save : "--save-sharded " + *options.save_sharded));
  }
  if (!options.save && !options.save_sharded && !options.no_save && !options.verify && options.steps > 0) {
    options.save = options.trainer.full_state_file();
    if (options.trainer.pattern == "fsdp2") options.save_sharded = options.trainer.sharded_folder();
  }
  if (options.weights.empty() && uses_autocast(options.precision)) options.weights = "low";
}

void check_frozen(const ShardOptions& options, bool flat) {
  const std::vector<ParameterShape> all = parameter_shapes(options.model);
  for (const std::string& name : options.adamw.frozen) {
    const AdamWOptions alone{.frozen = {name}};
    if (std::none_of(all.begin(), all.end(),
                     [&](const ParameterShape& shape) { return alone.is_frozen(shape.name); })) {
      throw UsageError(fmt::format("--freeze '{}': no parameter is called so or begins with it; they are {} to {}",
                                   name, all.front().name, all.back().name));
    }
  }
  size_t frozen = 0;
  for (const std::vector<ParameterShape>& unit : unit_shapes(options.model)) {
    const auto here = static_cast<size_t>(std::count_if(
        unit.begin(), unit.end(), [&](const ParameterShape& shape) { return options.adamw.is_frozen(shape.name); }));
    frozen += here;
    if (flat && here != 0 && here != unit.size()) {
      throw UsageError(
          fmt::format("--freeze {}: a flat unit is frozen whole or not at all, but of the {} parameters of the unit of "
                      "{} {} would be; freeze the whole unit, or take train_fsdp2",
                      fmt::join(options.adamw.frozen, ","), unit.size(), unit.front().name, here));
    }
  }
  if (frozen == all.size()) {
    throw UsageError(fmt::format("--freeze {}: nothing is left to train", fmt::join(options.adamw.frozen, ",")));
  }
}

void freeze(const ShardOptions& options, const NamedTensors& parameters) {
  for (auto [name, parameter] : parameters) {
    if (options.adamw.is_frozen(name)) parameter.set_requires_grad(false);
  }
}

std::vector<UnitSize> unit_sizes(const ShardOptions& options, int64_t shards,
                                 int64_t (*padded)(const std::vector<ParameterShape>&, int64_t ranks)) {
  std::vector<UnitSize> sizes;
  for (const std::vector<ParameterShape>& unit : unit_shapes(options.model)) {
    std::vector<ParameterShape> trained;
    for (const ParameterShape& shape : unit) {
      if (!options.adamw.is_frozen(shape.name)) trained.push_back(shape);
    }
    sizes.push_back({padded(unit, shards), trained.empty() ? 0 : padded(trained, shards)});
  }
  return sizes;
}

std::vector<CallPrediction> predict_shard_calls(const ShardOptions& options, const std::vector<UnitSize>& units) {
  return predict_unit_calls(units, options.strategy(), options.accumulate,
                            static_cast<int64_t>(c10::elementSize(options.weight_dtype())),
                            static_cast<int64_t>(c10::elementSize(storage_dtype(options.precision))));
}

CallPrediction predict_replica_calls(const std::vector<UnitSize>& units, int64_t shards, size_t element_bytes) {
  int64_t trained = 0, calls = 0;
  for (const UnitSize& unit : units) {
    trained += unit.trained;
    if (unit.trained > 0) ++calls;
  }
  return {"all_reduce", calls, calls, trained / shards * static_cast<int64_t>(element_bytes),
          fmt::format("P / {} shards, padded, once a step x {} bytes", shards, element_bytes)};
}

MemoryPattern shard_memory(const ShardOptions& options, const std::vector<UnitSize>& units, int64_t shards) {
  const ShardStrategy strategy = options.strategy();
  int64_t all = 0, trained = 0;
  std::vector<int64_t> largest;  // without the embedding, which backward leaves out
  for (const UnitSize& unit : units) {
    all += unit.elements;
    trained += unit.trained;
    if (&unit != &units.front()) largest.push_back(unit.elements);
  }
  std::sort(largest.rbegin(), largest.rend());
  MemoryPattern pattern;
  pattern.shard_elements = all / shards;
  pattern.frozen_elements = (all - trained) / shards;
  if (strategy == ShardStrategy::full) {
    const auto alive = std::min<size_t>(largest.size(), static_cast<size_t>(options.max_inflight));
    pattern.whole_elements =
        std::accumulate(largest.begin(), largest.begin() + static_cast<std::ptrdiff_t>(alive), int64_t{0});
  } else {
    pattern.whole_elements = all;
  }
  // The last unit to leave is the first that is trained, mostly the embedding: its gradient, and the buffer from which it
  // is sent.
  const auto last = std::find_if(units.begin(), units.end(), [](const UnitSize& unit) { return unit.trained > 0; });
  pattern.whole_gradient_elements = strategy == ShardStrategy::optimizer ? trained + last->trained : 2 * last->trained;
  return pattern;
}

ShardedParameters shards_of(const UnitRunner& runner) {
  ShardedParameters all;
  for (const auto& unit : runner.units()) {
    for (size_t i = 0; i < unit->pieces().size(); ++i) {
      all.pieces.push_back(unit->pieces()[i]);
      all.tensors.push_back(unit->shards()[i]);
      all.dims.push_back(static_cast<int64_t>(unit->pieces()[i].of.shape.size()));
    }
  }
  return all;
}

}  // namespace mgp

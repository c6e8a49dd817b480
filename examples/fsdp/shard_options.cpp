#include "examples/fsdp/shard_options.hpp"

#include <fmt/format.h>

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

std::vector<CallPrediction> predict_shard_calls(const ShardOptions& options, const std::vector<int64_t>& elements) {
  return predict_unit_calls(elements, options.strategy(), options.accumulate,
                            static_cast<int64_t>(c10::elementSize(options.weight_dtype())),
                            static_cast<int64_t>(c10::elementSize(storage_dtype(options.precision))));
}

CallPrediction predict_replica_calls(const std::vector<int64_t>& elements, int64_t shards, size_t element_bytes) {
  const int64_t all = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  const auto units = static_cast<int64_t>(elements.size());
  return {"all_reduce", units, units, all / shards * static_cast<int64_t>(element_bytes),
          fmt::format("P / {} shards, padded, once a step x {} bytes", shards, element_bytes)};
}

MemoryPattern shard_memory(const ShardOptions& options, const std::vector<int64_t>& elements, int64_t shards) {
  const ShardStrategy strategy = options.strategy();
  const int64_t all = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  std::vector<int64_t> largest(elements.begin() + 1,
                               elements.end());  // without the embedding, which backward leaves out
  std::sort(largest.rbegin(), largest.rend());
  MemoryPattern pattern;
  pattern.shard_elements = all / shards;
  if (strategy == ShardStrategy::full) {
    const auto alive = std::min<size_t>(largest.size(), static_cast<size_t>(options.max_inflight));
    pattern.whole_elements =
        std::accumulate(largest.begin(), largest.begin() + static_cast<std::ptrdiff_t>(alive), int64_t{0});
  } else {
    pattern.whole_elements = all;
  }
  // The last unit to leave is the embedding: its gradient, and the buffer from which it is sent.
  pattern.whole_gradient_elements =
      strategy == ShardStrategy::optimizer ? all + elements.front() : 2 * elements.front();
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

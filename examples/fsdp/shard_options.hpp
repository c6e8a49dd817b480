// What train_fsdp and train_fsdp2 share beside the units: flags, predictions, the list of a rank's pieces.
#pragma once

#include <string>
#include <vector>

#include "common/options.hpp"
#include "common/predict.hpp"
#include "examples/fsdp/unit_runner.hpp"

namespace mgp {

/// TrainerInfo::no_cuda_graph of both.
inline constexpr const char* kNoGraphOfUnits =
    "units are gathered into memory that comes and goes, a graph wants it in place";

struct ShardOptions : Options {
  std::string shard_strategy = "full";
  int64_t max_inflight = 2;
  bool no_save = false;
  ShardStrategy strategy() const;
};

void add_strategy_option(CLI::App& app, ShardOptions& options);  ///< --shard-strategy
void add_inflight_option(CLI::App& app, ShardOptions& options);  ///< --max-inflight
void add_freeze_option(CLI::App& app, ShardOptions& options);    ///< --freeze
void add_save_options(CLI::App& app, ShardOptions& options);     ///< --save-sharded, --no-save

/// After parsing and before settle(): refuses wrong values, and takes --weights low for bf16 and fp16 unless the flag was
/// given. Autocast's casts of all weights would stay from forward to backward, which is what sharding is there to avoid.
/// A run without --save and --save-sharded writes the trainer's artifacts at its end, as the reference does (train_fsdp2 both
/// forms), unless it only proves (--verify) or --no-save was given. Throws UsageError.
void check_shard_options(ShardOptions& options);

/// After settle(): refuses names of --freeze that no parameter begins with, and a model of which nothing is trained. A flat
/// unit is frozen whole or not at all (`flat`): its parameters have one gradient. Throws UsageError.
void check_frozen(const ShardOptions& options, bool flat);
/// What is not trained asks for no gradient. Before the units are made.
void freeze(const ShardOptions& options, const NamedTensors& parameters);

/// Sizes of all units, in the order of unit_shapes(). `padded`: elements of a unit of such parameters when it is whole.
std::vector<UnitSize> unit_sizes(const ShardOptions& options, int64_t shards,
                                 int64_t (*padded)(const std::vector<ParameterShape>&, int64_t ranks));

/// Calls and bytes of a step.
std::vector<CallPrediction> predict_shard_calls(const ShardOptions& options, const std::vector<UnitSize>& units);

/// HSDP: the shards' gradients all-reduced over the replicas, a call a unit.
CallPrediction predict_replica_calls(const std::vector<UnitSize>& units, int64_t shards, size_t element_bytes);

/// Bytes per rank beside plain data parallel training: what is cut over `shards` ranks, and the whole units of a step.
MemoryPattern shard_memory(const ShardOptions& options, const std::vector<UnitSize>& units, int64_t shards);

/// This rank's pieces of all units, for optimizer and layout.
struct ShardedParameters {
  std::vector<Piece> pieces;
  NamedTensors tensors;
  std::vector<int64_t> dims;  ///< of the whole parameters
};
ShardedParameters shards_of(const UnitRunner& runner);

}  // namespace mgp

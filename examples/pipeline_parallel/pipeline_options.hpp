// Flags of train_pipeline_parallel, and what follows from them before anything is allocated.
#pragma once

#include <string>
#include <vector>

#include "common/options.hpp"
#include "common/predict.hpp"
#include "common/shards.hpp"
#include "common/stage_model.hpp"
#include "examples/pipeline_parallel/schedule.hpp"

namespace CLI {
class App;
}

namespace mgp {

struct PipelineOptions : Options {
  std::string schedule = "gpipe";
  int64_t micro_batches = 6;
  std::string split;  ///< layers of each stage, "4,4,4"; empty: as equal as possible
  bool print_schedule = false;
};

void add_pipeline_options(CLI::App& app, PipelineOptions& options);

/// After parsing: values that are wrong whatever the machine. Throws UsageError.
void check_pipeline_options(const PipelineOptions& options);

/// How the model and the batch are cut.
struct PipelinePlan {
  std::vector<StagePart> parts;  ///< of each stage
  Schedule schedule;
};

/// After settle(). Throws UsageError if there are more stages than layers, --split does not fit, or a microbatch of a pass
/// would be empty.
PipelinePlan plan_pipeline(const PipelineOptions& options);

/// Calls and bytes of a step on rank 0, whose ledger the report prints: it sends activations and receives gradients.
std::vector<CallPrediction> predict_messages(const PipelineOptions& options);

/// Bytes on the device of stage `stage`.
MemoryPrediction predict_stage(const Options& options, const PipelinePlan& plan, size_t stage);

/// The formula of the stage that needs most: what the banner shows, and what must fit.
MemoryPattern pipeline_memory(const PipelinePlan& plan);

/// A row a stage: its layers, parameters, the microbatches that it keeps, its predicted peak.
std::string plan_table(const PipelineOptions& options, const PipelinePlan& plan);

/// A stage's parameters as pieces of the whole model, for ShardLayout.
std::vector<Piece> pieces_of(const ModelConfig& config, const StagePart& part);

}  // namespace mgp

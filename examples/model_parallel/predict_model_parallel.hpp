// Memory of each device and bytes between them, for a model that is cut between its layers and driven by one process.
#pragma once

#include <string>
#include <vector>

#include "common/predict.hpp"
#include "examples/model_parallel/stage_options.hpp"

namespace mgp {

/// Bytes on `device` from all stages that it holds. On one device for all it is what a whole model needs.
MemoryPrediction predict_device_memory(const StageOptions& options, at::Device device);

/// For Run: its table and its check are of the first device.
MemoryPattern first_device_memory(const StageOptions& options);

/// Copies of activations and gradients in a step, only between devices that differ; empty if there are none.
std::vector<CallPrediction> predict_copies(const StageOptions& options);

/// What each stage holds and where, then the predicted memory of every device.
std::string stage_tables(const StageOptions& options);

/// Facts of the devices after the first, which the banner does not know; empty if there is one alone.
std::string other_devices(const StageOptions& options, const Launch& launch);

/// Throws UsageError if the prediction of a device after the first exceeds its free memory (Run judges the first), with
/// the split and the batch as what can be changed.
void refuse_if_too_large(const StageOptions& options, const Launch& launch);

}  // namespace mgp

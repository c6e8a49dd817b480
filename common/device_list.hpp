// What trainers have in common in which one process drives several devices (DataParallel, model parallel): --devices, and
// the tables and checks of the devices after the first, which Run does not know.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/device.hpp"
#include "common/options.hpp"
#include "common/predict.hpp"

namespace mgp {

/// "0,1,2", "cuda:0,cuda:1" or "cpu,cpu". Throws UsageError on other text, and where CPU and GPUs are mixed.
std::vector<at::Device> parse_devices(const std::string& text);

/// The devices, each once, in the order in which they were named.
std::vector<at::Device> distinct_devices(const std::vector<at::Device>& devices);

/// Before settle() and claim_device(), which know --device alone: sets it to the first of --devices. Throws UsageError if the
/// two contradict each other.
void set_device_from_list(Options& options, const std::string& devices_flag, at::Device first);

/// Throws UsageError if one of the GPUs in --devices is not among the `visible` that this process sees.
void check_visible(const std::string& devices_flag, const std::vector<at::Device>& devices, int visible);

/// Predicted bytes on one of the devices.
using PredictDevice = std::function<MemoryPrediction(at::Device)>;

/// Memory by kind, a row for each distinct device.
std::string predicted_memory_table(const std::vector<at::Device>& devices, const PredictDevice& predict);

/// Predicted and measured peak, a row for each distinct GPU.
std::string measured_memory_table(const std::vector<at::Device>& devices, const PredictDevice& predict);

/// What the driver says of each distinct device but the first.
std::vector<std::pair<at::Device, DeviceFacts>> facts_after_the_first(const std::vector<at::Device>& devices,
                                                                      const Launch& launch);

/// Throws UsageError if a device after the first has less free memory than predicted (Run judges the first). The line begins
/// with `what` needs it ("32 rows") and ends with `advice`.
void refuse_if_too_large(const std::vector<at::Device>& devices, const Launch& launch, const PredictDevice& predict,
                         const std::string& what, const std::string& advice);

}  // namespace mgp

#include "examples/model_parallel/stage_options.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

#include "common/device_list.hpp"

namespace mgp {
namespace {

constexpr int64_t kDefaultStages = 3;

at::Device gpu(int64_t index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

/// --device where no --devices were given.
std::vector<at::Device> default_devices(const StageOptions& o, int64_t stages, int visible) {
  if (!o.cuda) return std::vector<at::Device>(static_cast<size_t>(stages), at::Device(at::kCPU));
  int index = 0;
  const auto [end, error] = std::from_chars(o.device.data(), o.device.data() + o.device.size(), index);
  if (error == std::errc() && end == o.device.data() + o.device.size()) {  // --device 1: all on that GPU
    return std::vector<at::Device>(static_cast<size_t>(stages), gpu(index));
  }
  // A prediction is made without looking for devices. claim_device() says what is wrong where none is visible.
  return spread_over_gpus(stages, o.predict ? static_cast<int>(stages) : std::max(visible, 1));
}

}  // namespace

void add_stage_flags(CLI::App& app, StageOptions& options) {
  app.add_option("--devices", options.devices_flag,
                 "device of each stage, for example 0,1,2 or cpu,cpu; one may be named twice (3 stages)")
      ->group("Options");
  app.add_option("--split", options.split_flag, "layers of each stage, for example 4,4,4 (as equal as possible)")
      ->group("Options");
}

std::vector<at::Device> spread_over_gpus(int64_t stages, int gpus) {
  const int64_t used = std::min<int64_t>(stages, gpus);
  std::vector<at::Device> devices;
  for (int64_t stage = 0; stage < stages; ++stage) devices.push_back(gpu(stage * used / stages));
  return devices;
}

void settle_stages(StageOptions& o, const Launch& launch) {
  if (!o.devices_flag.empty()) {
    o.devices = parse_devices(o.devices_flag);
    set_device_from_list(o, o.devices_flag, o.first_device());
  }
  settle(o, launch);

  const int visible = o.cuda && !o.predict ? static_cast<int>(torch::cuda::device_count()) : 0;
  int64_t stages = static_cast<int64_t>(o.devices.size());
  std::string from = "--devices " + o.devices_flag;
  if (stages == 0) {
    const int64_t counts = 1 + std::count(o.split_flag.begin(), o.split_flag.end(), ',');
    stages = o.split_flag.empty() ? std::min(kDefaultStages, o.model.layers) : counts;
    from = "--split " + o.split_flag;
  }
  o.parts = stage_parts(split_layers(o.split_flag, o.model.layers, stages, from));
  if (o.devices.empty()) {
    o.devices = default_devices(o, stages, visible);
  } else if (!o.predict) {
    check_visible(o.devices_flag, o.devices, visible);
  }
}

}  // namespace mgp

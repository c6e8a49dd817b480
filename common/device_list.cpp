#include "common/device_list.hpp"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>

#include "common/device_memory.hpp"
#include "common/error.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

std::string mib(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

}  // namespace

std::vector<at::Device> parse_devices(const std::string& text) {
  std::vector<at::Device> devices;
  std::istringstream names(text + ",");  // so that getline gives what follows the last comma too
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "cpu") {
      devices.emplace_back(at::kCPU);
      continue;
    }
    const std::string number = name.starts_with("cuda:") ? name.substr(5) : name;
    int index = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (error != std::errc() || end != number.data() + number.size() || index < 0 || index > 127) {
      throw UsageError(fmt::format("--devices is '{}': name the devices, for example 0,1,2 or cpu,cpu", text));
    }
    devices.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  }
  for (const at::Device device : devices) {
    if (device.type() == devices.front().type()) continue;
    throw UsageError(fmt::format("--devices {} mixes CPU and GPUs: name one kind", text));
  }
  return devices;
}

std::vector<at::Device> distinct_devices(const std::vector<at::Device>& devices) {
  std::vector<at::Device> distinct;
  for (const at::Device device : devices) {
    if (std::find(distinct.begin(), distinct.end(), device) == distinct.end()) distinct.push_back(device);
  }
  return distinct;
}

void set_device_from_list(Options& o, const std::string& devices_flag, at::Device first) {
  const bool agrees = o.device == "auto" || (first.is_cpu() ? o.device == "cpu" : o.device == "cuda");
  if (!agrees) {
    throw UsageError(
        fmt::format("--device {} and --devices {} contradict each other: leave --device out", o.device, devices_flag));
  }
  o.device = first.is_cpu() ? "cpu" : std::to_string(first.index());
}

void check_visible(const std::string& devices_flag, const std::vector<at::Device>& devices, int visible) {
  for (const at::Device device : devices) {
    if (!device.is_cuda() || device.index() < visible) continue;
    const char* variable = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string sees = visible == 0   ? "no GPU"
                             : visible == 1 ? "1 GPU (0)"
                                            : fmt::format("{} GPUs (0 to {})", visible, visible - 1);
    throw UsageError(
        fmt::format("--devices {}: there is no GPU {}, this process sees {}{}; a device may be named twice, --devices "
                    "cpu,cpu needs none",
                    devices_flag, device.index(), sees,
                    variable != nullptr ? fmt::format(" (CUDA_VISIBLE_DEVICES={})", variable) : ""));
  }
}

std::string predicted_memory_table(const std::vector<at::Device>& devices, const PredictDevice& predict) {
  std::vector<std::vector<std::string>> rows = {
      {"device", "parameters", "optimizer", "gradients", "activations", "workspace", "peak"}};
  for (const at::Device device : distinct_devices(devices)) {
    const MemoryPrediction p = predict(device);
    rows.push_back({device.str(), mib(p.parameters), mib(p.optimizer), mib(p.gradients), mib(p.activations),
                    mib(p.workspace), mib(p.peak())});
  }
  return table("memory of each device, predicted, MiB", rows, /*head=*/true);
}

std::string measured_memory_table(const std::vector<at::Device>& devices, const PredictDevice& predict) {
  std::vector<std::vector<std::string>> rows = {{"device", "predicted MiB", "peak allocated MiB", "peak reserved MiB"}};
  for (const at::Device device : distinct_devices(devices)) {
    const DeviceMemory memory = device_memory(device);
    rows.push_back({device.str(), mib(predict(device).peak()), mib(memory.peak_allocated), mib(memory.peak_reserved)});
  }
  return table("memory of each device", rows, /*head=*/true);
}

std::vector<std::pair<at::Device, DeviceFacts>> facts_after_the_first(const std::vector<at::Device>& devices,
                                                                      const Launch& launch) {
  std::vector<std::pair<at::Device, DeviceFacts>> all;
  for (const at::Device device : distinct_devices(devices)) {
    if (device == devices.front()) continue;
    const c10::DeviceGuard guard(device);  // the driver tells of the current device
    all.emplace_back(device, describe_device(launch, device, /*threads=*/0));
  }
  return all;
}

void refuse_if_too_large(const std::vector<at::Device>& devices, const Launch& launch, const PredictDevice& predict,
                         const std::string& what, const std::string& advice) {
  for (const auto& [device, facts] : facts_after_the_first(devices, launch)) {
    const int64_t peak = predict(device).peak();
    if (facts.free_bytes <= 0 || peak <= facts.free_bytes) continue;
    throw UsageError(fmt::format("{} need about {} on {} ({}), which has {} of free memory: {}", what,
                                 human_bytes(static_cast<double>(peak)), device.str(), facts.name,
                                 human_bytes(static_cast<double>(facts.free_bytes)), advice));
  }
}

}  // namespace mgp

#include "examples/data_parallel/replica_options.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "common/device_list.hpp"
#include "common/error.hpp"

namespace mgp {
namespace {

constexpr size_t kMostReplicas = 64;  // a host thread each

/// As nn.DataParallel: all GPUs that are there. On the CPU two replicas, so that there is something to see.
std::vector<at::Device> default_devices(ReplicaOptions& o, int visible) {
  if (!o.cuda) return {at::Device(at::kCPU), at::Device(at::kCPU)};
  if (o.device != "auto" && o.device != "cuda") return parse_devices(o.device);
  std::vector<at::Device> devices;
  const int gpus = o.predict ? std::max(visible, 2) : std::max(visible, 1);  // claim_device() says so where none is
  for (int i = 0; i < gpus; ++i) devices.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(i));
  if (!o.predict) o.device = "0";
  return devices;
}

}  // namespace

RowSlice ReplicaOptions::rows_of(int64_t micro, size_t replica) const {
  const RowSlice pass = RowSlice{0, global_batch_size}.part(micro, accumulate);
  return pass.part(static_cast<int64_t>(replica), static_cast<int64_t>(devices.size()));
}

bool ReplicaOptions::injects(const std::string& kind, size_t replica, int64_t step) const {
  return std::any_of(faults.begin(), faults.end(), [&](const Injection& fault) {
    return fault.kind == kind && fault.rank == static_cast<int>(replica) && fault.step == step;
  });
}

void add_replica_flags(CLI::App& app, ReplicaOptions& options) {
  app.add_option("--devices", options.devices_flag,
                 "device of each replica, for example 0,1,2 or cpu,cpu; one may be named twice (all GPUs)")
      ->group("Options");
  app.add_option("--gather-outputs", options.gather_outputs,
                 "on: outputs come together on the first device and the loss is there, as in nn.DataParallel (off)")
      ->group("Options");
}

void settle_replicas(ReplicaOptions& o, const Launch& launch) {
  if (o.gather_outputs != "on" && o.gather_outputs != "off") {
    throw UsageError(fmt::format("--gather-outputs is '{}': use on or off", o.gather_outputs));
  }
  if (!o.devices_flag.empty()) {
    o.devices = parse_devices(o.devices_flag);
    set_device_from_list(o, o.devices_flag, o.first_device());
  }
  if (o.devices.size() > kMostReplicas) {
    throw UsageError(fmt::format("--devices names {} devices: at most {}", o.devices.size(), kMostReplicas));
  }
  settle(o, launch);
  const int visible = o.cuda ? static_cast<int>(torch::cuda::device_count()) : 0;
  if (o.devices.empty()) {
    o.devices = default_devices(o, visible);
  } else if (!o.predict) {
    check_visible(o.devices_flag, o.devices, visible);
  }
  // Run knows one rank, 0. Faults that hit one replica are the trainer's own business.
  for (const Injection& fault : o.inject) {
    if (fault.kind != "throw" && fault.kind != "inf") continue;
    if (fault.rank < 0 || fault.rank >= static_cast<int>(o.devices.size())) {
      throw UsageError(fmt::format("--inject {}@{},{}: there are {} replicas (0 to {}), see --devices", fault.kind,
                                   fault.rank, fault.step, o.devices.size(), o.devices.size() - 1));
    }
    o.faults.push_back(fault);
  }
  std::erase_if(o.inject, [](const Injection& fault) { return fault.kind == "throw" || fault.kind == "inf"; });
}

bool on_distinct_gpus(const std::vector<at::Device>& devices) {
  return devices.size() > 1 && devices.front().is_cuda() && distinct_devices(devices).size() == devices.size();
}

}  // namespace mgp

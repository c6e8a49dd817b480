#include "common/device.hpp"

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>

#if MGP_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "common/error.hpp"
#include "common/nvml.hpp"

namespace mgp {
namespace {

/// Number of GPUs that this process sees, -1 when the build has no CUDA. Counting makes no context on any of them.
int visible_gpus() {
#if MGP_WITH_CUDA
  return c10::cuda::device_count();
#else
  return -1;
#endif
}

std::string visible_devices_text() {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  return text == nullptr ? "CUDA_VISIBLE_DEVICES is not set" : fmt::format("CUDA_VISIBLE_DEVICES={}", text);
}

c10::Device gpu(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

/// The GPU of a rank that gets one by its local rank.
c10::Device gpu_of_rank(const Launch& launch, int visible) {
  // One visible GPU and several ranks: either the launcher gave each rank its own (Slurm's --gpus-per-task), or all see
  // the same. Only the uuids can tell, see exchange_devices().
  if (visible == 1 || launch.share_gpu) return gpu(launch.local_rank % visible);
  if (launch.local_size > visible || launch.local_rank >= visible) {
    throw UsageError(
        fmt::format("{} ranks on this host but {} visible GPUs: start at most {}, or share them with "
                    "scripts/launch.sh --share-gpu",
                    launch.local_size, visible, visible));
  }
  return gpu(launch.local_rank);
}

#if MGP_WITH_CUDA
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

void describe_gpu(DeviceFacts& facts, int index) {
  const auto check = [](cudaError_t error, const char* call) {
    if (error != cudaSuccess) throw RunError(fmt::format("{}: {}", call, cudaGetErrorString(error)));
  };
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  char pci[32] = {};
  check(cudaDeviceGetPCIBusId(pci, sizeof(pci), index), "cudaDeviceGetPCIBusId");
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");  // of the current device: this rank's own
  facts.name = properties.name;
  facts.uuid = uuid_text(properties.uuid);
  facts.pci = pci;
  if (const auto gpu = find_gpu(NvmlLibrary::open(), facts.uuid, facts.pci)) facts.physical = physical_index(*gpu);
  facts.total_bytes = static_cast<int64_t>(total_bytes);
  facts.free_bytes = static_cast<int64_t>(free_bytes);
}
#endif

}  // namespace

c10::Device choose_device(const Launch& launch, const std::string& request, int visible) {
  if (request == "cpu") return c10::Device(c10::DeviceType::CPU);
  if (request == "auto") return visible > 0 ? gpu_of_rank(launch, visible) : c10::Device(c10::DeviceType::CPU);

  int index = -1;
  const auto [end, error] = std::from_chars(request.data(), request.data() + request.size(), index);
  const bool is_index = error == std::errc() && end == request.data() + request.size() && index >= 0;
  if (request != "cuda" && !is_index) {
    throw UsageError(fmt::format("--device {}: use auto, cpu, cuda or a number", request));
  }
  if (visible < 0) {
    throw UsageError(fmt::format("--device {}: this build has no CUDA (configure with -DMGP_CUDA=ON)", request));
  }
  if (visible == 0) {
    throw UsageError(
        fmt::format("--device {}: no GPU is visible ({}): use --device cpu", request, visible_devices_text()));
  }
  if (request == "cuda") return gpu_of_rank(launch, visible);
  if (index >= visible) {
    throw UsageError(fmt::format("--device {}: this process sees {} GPU{} ({})", index, visible,
                                 visible == 1 ? "" : "s", visible == 1 ? "0" : fmt::format("0..{}", visible - 1)));
  }
  if (launch.local_size > 1 && !launch.share_gpu) {
    throw UsageError(
        fmt::format("--device {} would put {} ranks on one GPU: leave --device out, or share it with "
                    "scripts/launch.sh --share-gpu",
                    index, launch.local_size));
  }
  return gpu(index);
}

c10::Device claim_device(const Launch& launch, const std::string& request) {
  const c10::Device device = choose_device(launch, request, visible_gpus());
#if MGP_WITH_CUDA
  if (device.is_cuda()) c10::cuda::set_device(device.index());
#endif
  return device;
}

DeviceFacts describe_device(const Launch& launch, c10::Device device, int threads) {
  DeviceFacts facts;
  facts.rank = launch.rank;
  facts.pid = static_cast<int>(getpid());
  facts.host = launch.host;
  facts.device = device.str();
  facts.threads = threads;
#if MGP_WITH_CUDA
  if (device.is_cuda()) {
    describe_gpu(facts, device.index());
    return facts;
  }
#endif
  const HostMemory memory = host_memory();
  facts.name = cpu_name();
  facts.total_bytes = memory.total_bytes;
  facts.free_bytes = memory.available_bytes;
  return facts;
}

std::vector<DeviceFacts> exchange_devices(const DeviceFacts& mine, bool share_gpu, Rendezvous* rendezvous) {
  if (rendezvous == nullptr) return {mine};
  std::vector<DeviceFacts> all;
  for (const std::string& text : rendezvous->exchange("devices", serialize(mine), std::chrono::seconds(60))) {
    all.push_back(parse_device_facts(text));
  }
  if (share_gpu) return all;
  // A uuid is unique in the world: two containers with host names of their own can hold the same GPU too.
  std::map<std::string, const DeviceFacts*> holders;
  for (const DeviceFacts& facts : all) {
    if (facts.uuid.empty()) continue;
    const auto [holder, is_new] = holders.emplace(facts.uuid, &facts);
    if (is_new) continue;
    const DeviceFacts& first = *holder->second;
    const std::string where = first.host == facts.host ? facts.host : first.host + " and " + facts.host;
    throw UsageError(
        fmt::format("ranks {} and {} on host {} hold the same GPU {} ({}): start one rank for each visible GPU, "
                    "or share it with scripts/launch.sh --share-gpu",
                    first.rank, facts.rank, where, facts.uuid, facts.name));
  }
  return all;
}

std::string serialize(const DeviceFacts& facts) {
  const nlohmann::ordered_json json = {{"rank", facts.rank},
                                       {"pid", facts.pid},
                                       {"host", facts.host},
                                       {"device", facts.device},
                                       {"physical", facts.physical},
                                       {"uuid", facts.uuid},
                                       {"pci", facts.pci},
                                       {"name", facts.name},
                                       {"total_bytes", facts.total_bytes},
                                       {"free_bytes", facts.free_bytes},
                                       {"threads", facts.threads}};
  // A host name that is no valid UTF-8 must not stop a run: its odd bytes are replaced.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

DeviceFacts parse_device_facts(const std::string& text) {
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    DeviceFacts facts;
    json.at("rank").get_to(facts.rank);
    json.at("pid").get_to(facts.pid);
    json.at("host").get_to(facts.host);
    json.at("device").get_to(facts.device);
    json.at("physical").get_to(facts.physical);
    json.at("uuid").get_to(facts.uuid);
    json.at("pci").get_to(facts.pci);
    json.at("name").get_to(facts.name);
    json.at("total_bytes").get_to(facts.total_bytes);
    json.at("free_bytes").get_to(facts.free_bytes);
    json.at("threads").get_to(facts.threads);
    return facts;
  } catch (const nlohmann::json::exception& error) {
    throw RunError(
        fmt::format("device facts of a rank cannot be read: {}: are all ranks of the same build?", error.what()));
  }
}

}  // namespace mgp

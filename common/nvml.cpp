#include "common/nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <iterator>
#include <type_traits>

namespace mgp {

// ── the library ───────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

constexpr int kSuccess = 0;            // NVML_SUCCESS
constexpr int kInsufficientSize = 7;   // NVML_ERROR_INSUFFICIENT_SIZE
constexpr int kClockSm = 1;            // NVML_CLOCK_SM
constexpr int kClockMemory = 2;        // NVML_CLOCK_MEM
constexpr int kSensorGpu = 0;          // NVML_TEMPERATURE_GPU
constexpr auto kNotAvailable = ~0ULL;  // NVML_VALUE_NOT_AVAILABLE

static_assert(sizeof(NvmlUtilization) == 8 && sizeof(NvmlMemory) == 24 && sizeof(NvmlMemoryV2) == 40);
static_assert(sizeof(NvmlProcessV1) == 16 && sizeof(NvmlProcessV2) == 24);
static_assert(offsetof(NvmlMemoryV2, used) == 32 && offsetof(NvmlProcessV2, used_memory) == 8);

}  // namespace

NvmlFunctions nvml_functions(const std::function<void*(const char* name)>& symbol) {
  NvmlFunctions f;
  // The first of the names that the library has.
  const auto set = [&symbol](auto& function, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol(name));
      if (function != nullptr) return;
    }
  };
  set(f.init, {"nvmlInit_v2"});
  set(f.shutdown, {"nvmlShutdown"});
  set(f.find_by_uuid, {"nvmlDeviceGetHandleByUUID"});
  set(f.find_by_pci, {"nvmlDeviceGetHandleByPciBusId_v2"});
  set(f.index, {"nvmlDeviceGetIndex"});
  set(f.utilization, {"nvmlDeviceGetUtilizationRates"});
  set(f.power, {"nvmlDeviceGetPowerUsage"});
  set(f.power_limit, {"nvmlDeviceGetEnforcedPowerLimit"});
  set(f.clock, {"nvmlDeviceGetClockInfo"});
  set(f.throttle_reasons, {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"});
  set(f.temperature, {"nvmlDeviceGetTemperature"});
  set(f.memory, {"nvmlDeviceGetMemoryInfo"});
  set(f.memory_v2, {"nvmlDeviceGetMemoryInfo_v2"});
  set(f.processes, {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"});
  set(f.processes_v1, {"nvmlDeviceGetComputeRunningProcesses"});
  return f;
}

std::shared_ptr<const NvmlLibrary> NvmlLibrary::open() {
  // Never closed: NCCL holds it as well, and unloading a library whose thread-local data is in use is asking for trouble.
  void* handle = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  return open(nvml_functions([handle](const char* name) { return dlsym(handle, name); }));
}

std::shared_ptr<const NvmlLibrary> NvmlLibrary::open(const NvmlFunctions& functions) {
  if (functions.init == nullptr || functions.shutdown == nullptr || functions.init() != kSuccess) return nullptr;
  return std::shared_ptr<const NvmlLibrary>(new NvmlLibrary(functions));
}

NvmlLibrary::~NvmlLibrary() { functions_.shutdown(); }

// ── one look at one GPU ───────────────────────────────────────────────────────────────────────────────────────────────

std::optional<NvmlGpu> find_gpu(const std::shared_ptr<const NvmlLibrary>& library, const std::string& uuid,
                                const std::string& pci) {
  if (library == nullptr) return std::nullopt;
  const NvmlFunctions& f = library->functions();
  const std::string prefix = "GPU-";
  std::vector<std::string> uuids;
  if (!uuid.empty()) uuids.push_back(uuid);
  // CUDA gives the uuid of a MIG slice in the same 16 bytes; NVML knows it under another prefix.
  if (uuid.starts_with(prefix)) uuids.push_back("MIG-" + uuid.substr(prefix.size()));
  NvmlGpu gpu{library, nullptr};
  for (const std::string& text : uuids) {
    if (f.find_by_uuid != nullptr && f.find_by_uuid(text.c_str(), &gpu.device) == kSuccess) return gpu;
  }
  if (!pci.empty() && f.find_by_pci != nullptr && f.find_by_pci(pci.c_str(), &gpu.device) == kSuccess) return gpu;
  return std::nullopt;
}

namespace {

/// Whether a process with this id is seen from here (a zombie is).
bool process_is_here(unsigned int pid) {
  return pid <= static_cast<unsigned int>(INT_MAX) && (kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH);
}

/// Memory of this process in NVML's list; nothing when the list cannot be trusted to mean it.
template <typename Info>
std::optional<int64_t> own_bytes(int (*list)(NvmlDevice, unsigned int*, Info*), NvmlDevice device) {
  if (list == nullptr) return std::nullopt;
  std::vector<Info> infos;
  unsigned int count = 64;  // more than ever run on a GPU: one call is enough
  int result = kInsufficientSize;
  for (int attempt = 0; attempt < 3 && result == kInsufficientSize; ++attempt) {
    const unsigned int room = count + 8;  // processes may come between two calls
    // Twice the room that is told: version 3 of the drivers 535.43 to 535.86 writes 32 bytes an entry, not 24.
    infos.assign(2 * static_cast<size_t>(room), Info{});
    count = room;
    result = list(device, &count, infos.data());
  }
  if (result != kSuccess || count > infos.size() / 2) return std::nullopt;

  // Older drivers list the ids that processes have on the host. In a container such an id can be this process's own by
  // chance; but then this process stands in the list under its host id too, and that id is most likely unknown here. So
  // all must be known. The same holds for entries that were misread because of another length. (Id 0: another
  // container's process, in drivers that do translate.)
  std::optional<int64_t> bytes;
  const auto self = static_cast<unsigned int>(getpid());
  for (unsigned int i = 0; i < count; ++i) {
    const Info& info = infos[i];
    if (info.pid == 0) continue;
    if (info.pid != self) {
      if (!process_is_here(info.pid)) return std::nullopt;
      continue;
    }
    // In containers the open driver translates the id and then says 0 bytes; a CUDA context alone has hundreds of MB.
    if (info.used_memory == kNotAvailable || info.used_memory == 0) return std::nullopt;
    bytes = bytes.value_or(0) + static_cast<int64_t>(info.used_memory);  // with MIG once for each slice
  }
  return bytes;
}

std::optional<int64_t> used_bytes(const NvmlFunctions& f, NvmlDevice device) {
  NvmlMemoryV2 version2{};
  version2.version = static_cast<unsigned int>(sizeof(version2)) | (2U << 24U);
  if (f.memory_v2 != nullptr && f.memory_v2(device, &version2) == kSuccess) return static_cast<int64_t>(version2.used);
  NvmlMemory memory{};
  if (f.memory != nullptr && f.memory(device, &memory) == kSuccess) return static_cast<int64_t>(memory.used);
  return std::nullopt;
}

/// Calls a function whose last argument is where it writes one number.
template <typename Number, typename... Arguments, typename... Given>
std::optional<Number> ask(int (*function)(NvmlDevice, Arguments...), NvmlDevice device, Given... given) {
  Number value{};
  if (function == nullptr || function(device, given..., &value) != kSuccess) return std::nullopt;
  return value;
}

std::optional<double> watts(const std::optional<unsigned int>& milliwatts) {
  return milliwatts ? std::optional<double>(*milliwatts / 1000.0) : std::nullopt;
}

}  // namespace

int physical_index(const NvmlGpu& gpu) {
  const auto index = ask<unsigned int>(gpu.library->functions().index, gpu.device);
  return index ? static_cast<int>(*index) : -1;
}

std::optional<GpuSample> sample_gpu(const NvmlGpu& gpu) {
  const NvmlFunctions& f = gpu.library->functions();
  NvmlDevice device = gpu.device;
  GpuSample s;
  if (const auto utilization = ask<NvmlUtilization>(f.utilization, device)) s.utilization = utilization->gpu;
  s.power = watts(ask<unsigned int>(f.power, device));
  s.power_limit = watts(ask<unsigned int>(f.power_limit, device));
  s.sm_clock = ask<unsigned int>(f.clock, device, kClockSm);
  s.memory_clock = ask<unsigned int>(f.clock, device, kClockMemory);
  s.temperature = ask<unsigned int>(f.temperature, device, kSensorGpu);
  s.throttle_reasons = ask<unsigned long long>(f.throttle_reasons, device);
  s.device_bytes = used_bytes(f, device);
  s.process_bytes = f.processes != nullptr ? own_bytes(f.processes, device) : own_bytes(f.processes_v1, device);
  const bool any = s.utilization || s.power || s.power_limit || s.sm_clock || s.memory_clock || s.temperature ||
                   s.throttle_reasons || s.device_bytes || s.process_bytes;
  return any ? std::optional<GpuSample>(s) : std::nullopt;
}

std::vector<std::string> throttle_names(uint64_t reasons) {
  // nvmlClocksEventReason..., bit 0 first.
  static const char* const kNames[] = {"idle",
                                       "applications clocks setting",
                                       "SW power cap",
                                       "HW slowdown",
                                       "sync boost",
                                       "SW thermal slowdown",
                                       "HW thermal slowdown",
                                       "HW power brake slowdown",
                                       "display clock setting",
                                       "board limit",
                                       "reliability"};
  std::vector<std::string> names;
  for (; reasons != 0; reasons &= reasons - 1) {
    const auto bit = static_cast<size_t>(std::countr_zero(reasons));
    names.push_back(bit < std::size(kNames) ? kNames[bit] : fmt::format("reason {:#x}", uint64_t{1} << bit));
  }
  return names;
}

std::string to_text(const GpuSample& s) {
  std::string text = "GPU";
  if (s.utilization) text += fmt::format(" {:.0f}%", *s.utilization);
  if (s.power) text += fmt::format("  {:.0f} W", *s.power);
  if (s.sm_clock) text += fmt::format("  {:.0f} MHz", *s.sm_clock);
  for (const std::string& name : throttle_names(s.throttle_reasons.value_or(0))) text += "  " + name;
  return text == "GPU" ? "GPU -" : text;
}

}  // namespace mgp

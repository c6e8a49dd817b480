// What nvidia-smi would show of one GPU: utilization, power, clocks, throttle reasons, memory. The numbers come from the
// driver's management library (NVML), which is loaded at run time: without it everything here answers "nothing".
//
//   library -> find_gpu() -> sample_gpu(): one look at the GPU
//   NvmlSampler: such a look every 200 ms in a thread of its own, and their summary
//
// Each number can be absent on its own (MIG has no utilization, containers hide processes). NVML looks at the GPU from
// outside: it makes no CUDA context and waits for no kernel. Its utilization is a mean over the last 0.2 to 1 s and its
// power over the last second (Ampere and newer), so that a run of a second or two says little.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace mgp {

// ── the library ───────────────────────────────────────────────────────────────────────────────────────────────────────

// Written down by hand, so that the build needs no nvml.h (the CUDA toolkit has it in a package of its own). Compared
// with the nvml.h of CUDA 12.9 and of CUDA 13.5. Each function returns nvmlReturn_t, an enum: 0 is success.
using NvmlDevice = void*;  ///< nvmlDevice_t, an opaque pointer

/// nvmlUtilization_t
struct NvmlUtilization {
  unsigned int gpu;     ///< percent of the last sample period in which a kernel ran
  unsigned int memory;  ///< percent of it in which device memory was read or written
};

/// nvmlMemory_t, bytes; `used` includes what the driver reserves.
struct NvmlMemory {
  unsigned long long total, free, used;
};

/// nvmlMemory_v2_t, bytes; since driver 510. `used` is without `reserved`: what nvidia-smi shows as memory.used.
struct NvmlMemoryV2 {
  unsigned int version;  ///< set by the caller: size of this struct + (2 << 24)
  unsigned long long total, reserved, free, used;
};

/// nvmlProcessInfo_v1_t
struct NvmlProcessV1 {
  unsigned int pid;
  unsigned long long used_memory;  ///< bytes; all bits set: not available
};

/// nvmlProcessInfo_v2_t, which versions 2 and 3 of the function fill.
struct NvmlProcessV2 {
  unsigned int pid;
  unsigned long long used_memory;
  unsigned int gpu_instance, compute_instance;  ///< MIG
};

/// The functions that are used; null where the library does not have one. Tests fill in functions of their own.
struct NvmlFunctions {
  int (*init)() = nullptr;                                                         ///< nvmlInit_v2, counts its calls
  int (*shutdown)() = nullptr;                                                     ///< nvmlShutdown
  int (*find_by_uuid)(const char* uuid, NvmlDevice*) = nullptr;                    ///< nvmlDeviceGetHandleByUUID
  int (*find_by_pci)(const char* bus_id, NvmlDevice*) = nullptr;                   ///< nvmlDeviceGetHandleByPciBusId_v2
  int (*index)(NvmlDevice, unsigned int*) = nullptr;                               ///< nvmlDeviceGetIndex
  int (*utilization)(NvmlDevice, NvmlUtilization*) = nullptr;                      ///< nvmlDeviceGetUtilizationRates
  int (*power)(NvmlDevice, unsigned int* milliwatts) = nullptr;                    ///< nvmlDeviceGetPowerUsage
  int (*power_limit)(NvmlDevice, unsigned int* milliwatts) = nullptr;              ///< nvmlDeviceGetEnforcedPowerLimit
  int (*clock)(NvmlDevice, int type, unsigned int* mhz) = nullptr;                 ///< nvmlDeviceGetClockInfo
  int (*throttle_reasons)(NvmlDevice, unsigned long long*) = nullptr;              ///< ...GetCurrentClocksEventReasons
  int (*temperature)(NvmlDevice, int sensor, unsigned int* celsius) = nullptr;     ///< nvmlDeviceGetTemperature
  int (*memory)(NvmlDevice, NvmlMemory*) = nullptr;                                ///< nvmlDeviceGetMemoryInfo
  int (*memory_v2)(NvmlDevice, NvmlMemoryV2*) = nullptr;                           ///< nvmlDeviceGetMemoryInfo_v2
  int (*processes)(NvmlDevice, unsigned int* count, NvmlProcessV2*) = nullptr;     ///< ...GetComputeRunningProcesses_v3
  int (*processes_v1)(NvmlDevice, unsigned int* count, NvmlProcessV1*) = nullptr;  ///< the same without a suffix
};

/// Fills the table from `symbol`, which answers null for a name that it does not have. Older drivers have older names:
/// nvmlDeviceGetCurrentClocksThrottleReasons before 535, nvmlDeviceGetComputeRunningProcesses_v2 before 510.
NvmlFunctions nvml_functions(const std::function<void*(const char* name)>& symbol);

/// NVML, initialised as long as this lives. Its functions may be called from several threads at once.
class NvmlLibrary {
 public:
  /// Loads libnvidia-ml.so.1. Null without that library, without a driver, or when it cannot be initialised.
  static std::shared_ptr<const NvmlLibrary> open();
  /// The same with these functions.
  static std::shared_ptr<const NvmlLibrary> open(const NvmlFunctions& functions);
  ~NvmlLibrary();
  NvmlLibrary(const NvmlLibrary&) = delete;
  NvmlLibrary& operator=(const NvmlLibrary&) = delete;

  const NvmlFunctions& functions() const { return functions_; }

 private:
  explicit NvmlLibrary(const NvmlFunctions& functions) : functions_(functions) {}
  NvmlFunctions functions_;
};

// ── one look at one GPU ───────────────────────────────────────────────────────────────────────────────────────────────

/// A GPU as NVML knows it.
struct NvmlGpu {
  std::shared_ptr<const NvmlLibrary> library;
  NvmlDevice device = nullptr;
};

/// The GPU with this uuid ("GPU-...", as DeviceFacts has it), or else at this PCI bus id ("0000:1b:00.0"; "" for none).
/// Nothing when NVML does not know it, or when `library` is null. A MIG slice is found by CUDA's uuid of it too.
std::optional<NvmlGpu> find_gpu(const std::shared_ptr<const NvmlLibrary>& library, const std::string& uuid,
                                const std::string& pci = "");

/// The index under which nvidia-smi lists it, -1 if NVML does not say. CUDA counts in an order of its own, and only what is
/// visible.
int physical_index(const NvmlGpu& gpu);

/// What NVML said at one moment; what it could not say is absent.
struct GpuSample {
  std::optional<double> utilization;         ///< percent of the time in which any kernel ran
  std::optional<double> power;               ///< W, the whole board
  std::optional<double> power_limit;         ///< W
  std::optional<double> sm_clock;            ///< MHz
  std::optional<double> memory_clock;        ///< MHz
  std::optional<double> temperature;         ///< degrees Celsius
  std::optional<uint64_t> throttle_reasons;  ///< bits, see throttle_names()
  std::optional<int64_t> device_bytes;       ///< memory in use on the GPU, of all processes
  std::optional<int64_t> process_bytes;      ///< memory of this process: allocator, CUDA context, NCCL and all
};

/// Asks NVML now. Nothing when it answered none of the questions (the GPU is lost).
std::optional<GpuSample> sample_gpu(const NvmlGpu& gpu);

/// The reasons in the words of nvidia-smi: 0x4 -> {"SW power cap"}. A bit that is not known becomes "reason 0x800".
std::vector<std::string> throttle_names(uint64_t reasons);

/// For the progress line: "GPU 97%  655 W  1755 MHz  SW power cap"; "GPU -" without any number.
std::string to_text(const GpuSample& sample);

// ── many looks ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A reason why the clocks were below their highest, and in how many samples it was seen.
struct ThrottleReason {
  std::string name;
  int64_t samples = 0;
};

/// Means and peaks over samples, each over those samples that have the number; absent if none has.
struct GpuSummary {
  int64_t samples = 0;
  double sample_ms = 0;                                      ///< what one sample cost its thread, mean
  std::optional<double> mean_utilization, peak_utilization;  ///< percent
  std::optional<double> mean_power, peak_power;              ///< W
  std::optional<double> power_limit;                         ///< W, the last one
  std::optional<double> mean_sm_clock, mean_memory_clock;    ///< MHz
  std::optional<double> peak_temperature;                    ///< degrees Celsius
  std::optional<int64_t> peak_device_bytes, peak_process_bytes;
  std::vector<ThrottleReason> throttle_reasons;  ///< in the order of NVML's bits
};

/// Adds samples up, without keeping them.
class GpuStatistics {
 public:
  /// `ms`: what taking the sample cost.
  void add(const GpuSample& sample, double ms = 0);
  GpuSummary summary() const;

 private:
  struct Series {
    double sum = 0, peak = 0, last = 0;
    int64_t count = 0;
    void add(const std::optional<double>& value);
    std::optional<double> mean() const;
    std::optional<double> if_any(double value) const;  ///< absent when nothing was added
  };
  Series utilization_, power_, power_limit_, sm_clock_, memory_clock_, temperature_, cost_;
  std::optional<int64_t> peak_device_bytes_, peak_process_bytes_;
  int64_t throttle_samples_[64] = {};  // of each bit
};

/// One line for the report, without a line end. What is absent is left out.
std::string to_text(const GpuSummary& summary);

/// JSON text for gather_text() and the run object; what is absent is null.
std::string serialize(const GpuSummary& summary);

/// Samples one GPU in a thread of its own. No call throws: without NVML, without the GPU or without a thread there are
/// no samples, and the run goes on. Calls come from one thread.
class NvmlSampler {
 public:
  static constexpr std::chrono::milliseconds kInterval{200};

  /// Loads NVML and finds the GPU as find_gpu() does. An empty uuid (a CPU rank) loads nothing.
  explicit NvmlSampler(const std::string& uuid, const std::string& pci = "") noexcept;
  /// For tests: this GPU, or nothing, sampled at this interval.
  explicit NvmlSampler(std::optional<NvmlGpu> gpu, std::chrono::milliseconds interval = kInterval) noexcept;
  ~NvmlSampler();
  NvmlSampler(const NvmlSampler&) = delete;
  NvmlSampler& operator=(const NvmlSampler&) = delete;

  bool available() const noexcept { return gpu_.has_value(); }

  /// Takes a sample at once, and then one each interval. After a stop() it goes on: the summary is over all of them.
  void start() noexcept;
  /// Waits for a sample that is being taken (milliseconds), not for the next one.
  void stop() noexcept;

  /// The thread's last sample, without asking NVML: for the progress line.
  std::optional<GpuSample> latest() const noexcept;
  /// Asks NVML now, in the caller's thread: for a halt of --pace. It does not count in the summary.
  std::optional<GpuSample> now() const noexcept;
  /// What was sampled until now; may be called between start() and stop().
  GpuSummary summary() const;

 private:
  void sample_until_stopped() noexcept;

  std::optional<NvmlGpu> gpu_;
  std::chrono::milliseconds interval_;
  std::thread thread_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  bool stopping_ = false;
  GpuStatistics statistics_;
  std::optional<GpuSample> latest_;
};

}  // namespace mgp

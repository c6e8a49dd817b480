// Which device is mine, what is it, and how many CPU threads may I run.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/launch.hpp"
#include "common/rendezvous.hpp"

namespace mgp {

/// What the device table shows of one rank.
struct DeviceFacts {
  int rank = 0;
  int pid = 0;
  std::string host;
  std::string device;       ///< "cuda:0" as this process names it, or "cpu"
  int physical = -1;        ///< index that nvidia-smi shows, -1 if unknown or CPU
  std::string uuid;         ///< "GPU-..." or ""
  std::string pci;          ///< "0000:1b:00.0"
  std::string name;         ///< "NVIDIA H200", or the CPU model
  int64_t total_bytes = 0;  ///< device memory, or host memory for a CPU
  int64_t free_bytes = 0;
  int threads = 0;  ///< CPU threads that the rank runs
};

/// Claims the device of this rank BEFORE anything touches CUDA: one early call would put a context of 500 MB on GPU 0
/// (trial B68). `request` is auto, cpu, cuda or an index. auto: CUDA when the build has it and a GPU is visible. cuda:
/// LOCAL_RANK, modulo the visible devices only where each rank sees one or sharing was asked for. Throws UsageError
/// with both numbers when ranks exceed devices, or when CUDA was asked for and is not there.
c10::Device claim_device(const Launch& launch, const std::string& request);

/// The choice alone, without touching CUDA. `visible` is the number of GPUs that this process sees, -1 when the build
/// has no CUDA.
c10::Device choose_device(const Launch& launch, const std::string& request, int visible);

/// max(1, cores in this process's affinity mask / local ranks), or OMP_NUM_THREADS when set (never more than the
/// former: trial B76). Sets at::set_num_threads and returns it. Call before any tensor work.
int limit_threads(const Launch& launch);

/// The number alone: `omp_num_threads` is the variable's text, "" when unset. Throws UsageError if it is not a number.
int thread_limit(const std::string& omp_num_threads, int cores, int local_size);

/// Cores this process may run on, by sched_getaffinity; a container's CPU quota counts too.
int usable_cores();

/// CPU time that the control groups of this process allow, in cores; 0 when there is no limit. Reads version 2
/// (cpu.max) and version 1 (cpu.cfs_quota_us), up to the root of the hierarchy. `self` is the text of
/// /proc/self/cgroup.
double cgroup_cpu_quota(const std::string& root, const std::string& self);

/// Memory of the host, or what the control groups leave of it.
struct HostMemory {
  int64_t total_bytes = 0;
  int64_t available_bytes = 0;
};
HostMemory host_memory();

std::string cpu_name();  ///< "AMD EPYC 9554 64-Core Processor"

DeviceFacts describe_device(const Launch& launch, c10::Device device, int threads);

/// Facts of all ranks in rank order, over the store. Throws UsageError when two ranks hold the same GPU (by uuid and
/// host) without sharing: the message names both ranks, the host and the uuid (trial B67).
std::vector<DeviceFacts> exchange_devices(const DeviceFacts& mine, bool share_gpu, Rendezvous* rendezvous);

std::string serialize(const DeviceFacts& facts);
DeviceFacts parse_device_facts(const std::string& text);

/// Peak dense TFLOP/s by device name and precision for MFU ("fp32", "tf32", "bf16", "fp64"); 0 when not known.
/// Data-sheet numbers, the source beside each row.
double peak_tflops(const std::string& device_name, const std::string& precision);

/// Versions and devices for --environment and the run object: (name, value) lines in a fixed order: compiler, LibTorch,
/// CUDA header/runtime/driver, NCCL header/library, MPI library, Open MPI or other, CLI11, fmt, CPU, cores, memory.
std::vector<std::pair<std::string, std::string>> environment_lines();

/// Refuses to start when the NCCL library that was loaded is not the one whose header this was built with (trial B80):
/// both versions in the message. Nothing to do without NCCL.
void check_nccl_version();

}  // namespace mgp

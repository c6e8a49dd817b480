#include "common/device_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#if MGP_WITH_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#endif

namespace mgp {

namespace {

/// Peaks from before the allocator's own were reset by phase_peak().
struct EarlierPeaks {
  int64_t allocated = 0;
  int64_t reserved = 0;
} earlier_peaks;  // of the one device that a process trains on

}  // namespace

DeviceMemory device_memory([[maybe_unused]] c10::Device device) {
  DeviceMemory memory;
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return memory;
  at::globalContext().lazyInitDevice(device.type());  // the allocator has no statistics before that
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  memory.allocated = stats.allocated_bytes[0].current;
  memory.reserved = stats.reserved_bytes[0].current;
  memory.peak_allocated = std::max(earlier_peaks.allocated, stats.allocated_bytes[0].peak);
  memory.peak_reserved = std::max(earlier_peaks.reserved, stats.reserved_bytes[0].peak);
#endif
  return memory;
}

int64_t phase_peak([[maybe_unused]] c10::Device device) {
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return 0;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  earlier_peaks.allocated = std::max(earlier_peaks.allocated, stats.allocated_bytes[0].peak);
  earlier_peaks.reserved = std::max(earlier_peaks.reserved, stats.reserved_bytes[0].peak);
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
  return stats.allocated_bytes[0].peak;
#else
  return 0;
#endif
}

void release_cached_memory([[maybe_unused]] c10::Device device) {
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(device.type());
  c10::cuda::CUDACachingAllocator::emptyCache();
#endif
}

void reset_memory_peaks([[maybe_unused]] c10::Device device) {
  earlier_peaks = {};
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(device.type());
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
#endif
}

int64_t used_device_bytes([[maybe_unused]] c10::Device device) {
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return 0;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return static_cast<int64_t>(total_bytes - free_bytes);
#else
  return 0;
#endif
}

int64_t resident_bytes() {
  long long pages = 0;
  long long resident = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lld %lld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * sysconf(_SC_PAGESIZE);
}

void synchronize_device([[maybe_unused]] c10::Device device) {
#if MGP_WITH_CUDA
  if (device.is_cuda()) C10_CUDA_CHECK(cudaDeviceSynchronize());
#endif
}

}  // namespace mgp

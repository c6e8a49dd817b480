// Memory of the device as LibTorch's allocator and the driver count it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace mgp {

/// What LibTorch's allocator says of the device, bytes; all 0 on a CPU.
struct DeviceMemory {
  int64_t allocated = 0;  ///< in tensors
  int64_t reserved = 0;   ///< taken from the driver: in tensors and in the cache
  int64_t peak_allocated = 0, peak_reserved = 0;
};
DeviceMemory device_memory(c10::Device device);

/// The highest allocation since the last call, for the memory row of a trace. device_memory() keeps the peak of the run.
int64_t phase_peak(c10::Device device);

/// Forgets the peaks: the next run of this process has its own.
void reset_memory_peaks(c10::Device device);

/// Gives cached device memory back to the driver; nothing on a CPU.
void release_cached_memory(c10::Device device);

/// Memory in use on the whole GPU as the driver counts it, of all processes; 0 on a CPU.
int64_t used_device_bytes(c10::Device device);

/// Host memory that this process has in RAM now, bytes.
int64_t resident_bytes();

/// Waits on the host until the device has done all that it was given; nothing on a CPU.
void synchronize_device(c10::Device device);

}  // namespace mgp

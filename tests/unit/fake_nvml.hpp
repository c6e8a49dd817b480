// A management library of functions that answer what a test wrote down.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/nvml.hpp"

namespace mgp {

using std::chrono::milliseconds;

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;
constexpr int kGpuIsLost = 15;
constexpr unsigned int kNoSuchProcess = 0x7ffffff0;  // above Linux's highest possible id
constexpr int64_t kGiB = int64_t{1} << 30;

/// The GPU behind the functions below. What NVML answers is written here by a test.
struct FakeGpu {
  std::atomic<int> initialised{0};
  std::atomic<int> samples{0};
  int init_result = kSuccess;
  int result = kSuccess;  // of all queries
  std::string known_uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
  std::string known_pci = "0000:1b:00.0";
  int memory_v2_result = kSuccess;
  std::vector<NvmlProcessV2> processes;
  size_t entry_bytes = sizeof(NvmlProcessV2);  // the length of an entry that the library writes
  int slowness_ms = 0;
  int marker = 0;  // its address is the handle
};
inline FakeGpu* fake = nullptr;

inline int find(const std::string& text, const std::string& known, NvmlDevice* device) {
  if (text != known) return kNotFound;
  *device = &fake->marker;
  return kSuccess;
}

inline int write_number(NvmlDevice device, unsigned int value, unsigned int* out) {
  EXPECT_EQ(device, &fake->marker);
  if (fake->result == kSuccess) *out = value;
  return fake->result;
}

/// Writes entries of `entry_bytes` as far as they fit, as NVML does.
template <typename Info>
int write_processes(unsigned int* count, Info* infos, size_t entry_bytes) {
  const auto there = static_cast<unsigned int>(fake->processes.size());
  const unsigned int room = *count;
  *count = there;
  if (fake->result != kSuccess) return fake->result;
  if (there > room) return kInsufficientSize;
  for (unsigned int i = 0; i < there; ++i) {
    std::memcpy(reinterpret_cast<char*>(infos) + i * entry_bytes, &fake->processes[i],
                std::min(entry_bytes, sizeof(NvmlProcessV2)));
  }
  return kSuccess;
}

inline NvmlFunctions all_functions() {
  NvmlFunctions f;
  f.init = [] {
    if (fake->init_result == kSuccess) ++fake->initialised;
    return fake->init_result;
  };
  f.shutdown = [] { return --fake->initialised, kSuccess; };
  f.find_by_uuid = [](const char* uuid, NvmlDevice* device) { return find(uuid, fake->known_uuid, device); };
  f.find_by_pci = [](const char* pci, NvmlDevice* device) { return find(pci, fake->known_pci, device); };
  f.utilization = [](NvmlDevice, NvmlUtilization* out) {
    ++fake->samples;
    std::this_thread::sleep_for(milliseconds(fake->slowness_ms));
    if (fake->result == kSuccess) *out = {97, 40};
    return fake->result;
  };
  f.power = [](NvmlDevice device, unsigned int* out) { return write_number(device, 655'250, out); };
  f.power_limit = [](NvmlDevice device, unsigned int* out) { return write_number(device, 700'000, out); };
  f.clock = [](NvmlDevice device, int type, unsigned int* out) {
    EXPECT_TRUE(type == 1 || type == 2);
    return write_number(device, type == 1 ? 1755 : 3201, out);
  };
  f.throttle_reasons = [](NvmlDevice, unsigned long long* out) {
    if (fake->result == kSuccess) *out = 0x4;
    return fake->result;
  };
  f.temperature = [](NvmlDevice device, int sensor, unsigned int* out) {
    EXPECT_EQ(sensor, 0);
    return write_number(device, 61, out);
  };
  f.memory = [](NvmlDevice, NvmlMemory* out) {
    if (fake->result == kSuccess) *out = {141ULL * kGiB, 100ULL * kGiB, 41ULL * kGiB};
    return fake->result;
  };
  f.memory_v2 = [](NvmlDevice, NvmlMemoryV2* out) {
    EXPECT_EQ(out->version, 0x02000028U);  // NVML_STRUCT_VERSION(Memory, 2)
    if (fake->result == kSuccess) *out = {out->version, 141ULL * kGiB, 1ULL * kGiB, 100ULL * kGiB, 40ULL * kGiB};
    return fake->result != kSuccess ? fake->result : fake->memory_v2_result;
  };
  f.processes = [](NvmlDevice, unsigned int* count, NvmlProcessV2* infos) {
    return write_processes(count, infos, fake->entry_bytes);
  };
  f.processes_v1 = [](NvmlDevice, unsigned int* count, NvmlProcessV1* infos) {
    return write_processes(count, infos, sizeof(NvmlProcessV1));
  };
  return f;
}

class Nvml : public ::testing::Test {
 protected:
  Nvml() { fake = &gpu_; }
  ~Nvml() override {
    EXPECT_EQ(gpu_.initialised, 0) << "each nvmlInit has its nvmlShutdown";
    fake = nullptr;
  }
  static std::optional<NvmlGpu> gpu(const NvmlFunctions& functions = all_functions()) {
    return find_gpu(NvmlLibrary::open(functions), fake->known_uuid);
  }
  static GpuSample sample(const NvmlFunctions& functions = all_functions()) {
    return sample_gpu(gpu(functions).value()).value();
  }
  static NvmlProcessV2 process(unsigned int pid, int64_t bytes) {
    return {pid, static_cast<unsigned long long>(bytes), 0xffffffff, 0xffffffff};
  }
  static unsigned int self() { return static_cast<unsigned int>(getpid()); }
  static unsigned int other() { return static_cast<unsigned int>(getppid()); }  // another that is here

  FakeGpu gpu_;
};

}  // namespace mgp

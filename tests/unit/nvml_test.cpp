#include <gtest/gtest.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "common/nvml.hpp"
#include "tests/unit/fake_nvml.hpp"

namespace mgp {
namespace {

// ── the library and the GPU ───────────────────────────────────────────────────────────────────────────────────────────

TEST_F(Nvml, InitialisedAsLongAsAGpuIsHeld) {
  std::optional<NvmlGpu> held = gpu();
  ASSERT_TRUE(held.has_value());
  EXPECT_EQ(gpu_.initialised, 1);
  held.reset();
  EXPECT_EQ(gpu_.initialised, 0);
}

TEST_F(Nvml, NoLibraryNoAnswer) {
  EXPECT_EQ(NvmlLibrary::open(NvmlFunctions{}), nullptr);
  gpu_.init_result = 9;  // NVML_ERROR_DRIVER_NOT_LOADED
  EXPECT_EQ(NvmlLibrary::open(all_functions()), nullptr);
  EXPECT_FALSE(find_gpu(nullptr, gpu_.known_uuid, gpu_.known_pci).has_value());
}

TEST_F(Nvml, FindsByUuidThenMigThenPci) {
  const auto library = NvmlLibrary::open(all_functions());
  EXPECT_TRUE(find_gpu(library, gpu_.known_uuid).has_value());
  EXPECT_FALSE(find_gpu(library, "GPU-unknown").has_value());
  EXPECT_FALSE(find_gpu(library, "").has_value());
  EXPECT_TRUE(find_gpu(library, "GPU-unknown", gpu_.known_pci).has_value());
  EXPECT_FALSE(find_gpu(library, "GPU-unknown", "0000:ff:00.0").has_value());
  gpu_.known_uuid = "MIG-5";
  EXPECT_TRUE(find_gpu(library, "GPU-5").has_value());
}

TEST_F(Nvml, TakesTheNewestNameThatTheLibraryHas) {
  // Each name has an address of its own.
  static std::array<char, 32> places;
  std::map<std::string, void*> names;
  const auto symbol = [&names](const char* name) { return names.contains(name) ? names.at(name) : nullptr; };
  const auto add = [&names](const char* name) { return names[name] = &places.at(names.size()); };
  const auto address = [](auto function) { return reinterpret_cast<void*>(function); };

  const NvmlFunctions none = nvml_functions(symbol);
  EXPECT_EQ(address(none.init), nullptr);
  EXPECT_EQ(address(none.throttle_reasons), nullptr);

  void* old_reasons = add("nvmlDeviceGetCurrentClocksThrottleReasons");
  void* processes_v1 = add("nvmlDeviceGetComputeRunningProcesses");
  void* init = add("nvmlInit_v2");
  void* power = add("nvmlDeviceGetPowerUsage");
  NvmlFunctions f = nvml_functions(symbol);
  EXPECT_EQ(address(f.init), init);
  EXPECT_EQ(address(f.power), power);
  EXPECT_EQ(address(f.throttle_reasons), old_reasons);
  EXPECT_EQ(address(f.processes), nullptr);
  EXPECT_EQ(address(f.processes_v1), processes_v1);

  void* processes_v2 = add("nvmlDeviceGetComputeRunningProcesses_v2");
  EXPECT_EQ(address(nvml_functions(symbol).processes), processes_v2);
  void* processes_v3 = add("nvmlDeviceGetComputeRunningProcesses_v3");
  void* new_reasons = add("nvmlDeviceGetCurrentClocksEventReasons");
  f = nvml_functions(symbol);
  EXPECT_EQ(address(f.processes), processes_v3);
  EXPECT_EQ(address(f.throttle_reasons), new_reasons);
}

// ── one sample ────────────────────────────────────────────────────────────────────────────────────────────────────────

TEST_F(Nvml, SampleInItsUnits) {
  gpu_.processes = {process(other(), kGiB), process(self(), 39 * kGiB)};
  const GpuSample s = sample();
  EXPECT_EQ(s.utilization, 97.0);
  EXPECT_EQ(s.power, 655.25);
  EXPECT_EQ(s.power_limit, 700.0);
  EXPECT_EQ(s.sm_clock, 1755.0);
  EXPECT_EQ(s.memory_clock, 3201.0);
  EXPECT_EQ(s.temperature, 61.0);
  EXPECT_EQ(s.throttle_reasons, 0x4U);
  EXPECT_EQ(s.device_bytes, 40 * kGiB);  // version 2, without what is reserved
  EXPECT_EQ(s.process_bytes, 39 * kGiB);
  EXPECT_EQ(to_text(s), "GPU 97%  655 W  1755 MHz  SW power cap");
}

TEST_F(Nvml, MemoryFallsBackToTheFirstVersion) {
  gpu_.memory_v2_result = 25;  // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
  EXPECT_EQ(sample().device_bytes, 41 * kGiB);
  NvmlFunctions f = all_functions();
  f.memory_v2 = nullptr;
  EXPECT_EQ(sample(f).device_bytes, 41 * kGiB);
}

TEST_F(Nvml, WhatIsMissingOrUnsupportedIsAbsentAlone) {
  NvmlFunctions f = all_functions();
  f.utilization = [](NvmlDevice, NvmlUtilization* out) {
    *out = {12, 34};  // a library may write before it refuses
    return kNotSupported;
  };
  f.power = nullptr;
  f.temperature = nullptr;
  f.throttle_reasons = nullptr;
  const GpuSample s = sample(f);
  EXPECT_FALSE(s.utilization.has_value());
  EXPECT_FALSE(s.power.has_value());
  EXPECT_FALSE(s.temperature.has_value());
  EXPECT_FALSE(s.throttle_reasons.has_value());
  EXPECT_EQ(s.sm_clock, 1755.0);
  EXPECT_EQ(to_text(s), "GPU  1755 MHz");
}

TEST_F(Nvml, ALostGpuGivesNoSample) {
  const std::optional<NvmlGpu> held = gpu();
  gpu_.result = kGpuIsLost;
  EXPECT_FALSE(sample_gpu(*held).has_value());
  EXPECT_EQ(to_text(GpuSample{}), "GPU -");
}

// ── memory of this process ────────────────────────────────────────────────────────────────────────────────────────────

TEST_F(Nvml, ProcessMemoryByTheOldFunction) {
  gpu_.processes = {process(other(), kGiB), process(self(), 2 * kGiB)};
  NvmlFunctions f = all_functions();
  f.processes = nullptr;
  EXPECT_EQ(sample(f).process_bytes, 2 * kGiB);
  f.processes_v1 = nullptr;
  EXPECT_FALSE(sample(f).process_bytes.has_value());
}

TEST_F(Nvml, ProcessMemoryIsAbsentWhereProcessesAreHidden) {
  EXPECT_FALSE(sample().process_bytes.has_value()) << "an empty list";
  gpu_.processes = {process(other(), kGiB)};
  EXPECT_FALSE(sample().process_bytes.has_value()) << "others only";
  gpu_.processes = {process(kNoSuchProcess, kGiB)};
  EXPECT_FALSE(sample().process_bytes.has_value()) << "ids of the host";
}

TEST_F(Nvml, AnIdOfTheHostThatIsOursByChanceIsNotBelieved) {
  gpu_.processes = {process(self(), 7 * kGiB), process(kNoSuchProcess, kGiB)};
  EXPECT_FALSE(sample().process_bytes.has_value());
  gpu_.processes = {process(self(), 7 * kGiB), process(0xffffffff, kGiB)};
  EXPECT_FALSE(sample().process_bytes.has_value());
  gpu_.processes = {process(self(), 7 * kGiB), process(0, kGiB)};  // a translated list, with a process from elsewhere
  EXPECT_EQ(sample().process_bytes, 7 * kGiB);
}

TEST_F(Nvml, ProcessMemoryThatTheDriverDoesNotKnow) {
  gpu_.processes = {process(self(), -1)};  // NVML_VALUE_NOT_AVAILABLE
  EXPECT_FALSE(sample().process_bytes.has_value());
  gpu_.processes = {process(self(), 0)};
  EXPECT_FALSE(sample().process_bytes.has_value());
}

TEST_F(Nvml, ManyProcessesAndSlices) {
  gpu_.processes.assign(300, process(other(), kGiB));
  gpu_.processes.push_back(process(self(), kGiB));
  gpu_.processes.push_back(process(self(), 2 * kGiB));  // in another MIG slice
  EXPECT_EQ(sample().process_bytes, 3 * kGiB);
}

TEST_F(Nvml, EntriesOfAnotherLengthAreNotMisread) {
  // Drivers 535.43 to 535.86 wrote 32 bytes an entry; others were seen with 16. More would overrun a tight buffer.
  for (const size_t length : {size_t{32}, size_t{16}}) {
    gpu_.entry_bytes = length;
    gpu_.processes.assign(72, process(other(), kGiB));
    gpu_.processes[40] = process(self(), 5 * kGiB);
    EXPECT_FALSE(sample().process_bytes.has_value()) << length;
    gpu_.processes = {process(self(), 5 * kGiB)};
    EXPECT_EQ(sample().process_bytes, 5 * kGiB) << length;
  }
}

// ── throttle reasons ──────────────────────────────────────────────────────────────────────────────────────────────────

TEST(NvmlThrottle, Names) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(throttle_names(0), Names{});
  EXPECT_EQ(throttle_names(0x1), Names{"idle"});
  EXPECT_EQ(throttle_names(0x4 | 0x20 | 0x80),
            (Names{"SW power cap", "SW thermal slowdown", "HW power brake slowdown"}));
  EXPECT_EQ(throttle_names(0x2 | 0x8 | 0x10 | 0x40 | 0x100),
            (Names{"applications clocks setting", "HW slowdown", "sync boost", "HW thermal slowdown",
                   "display clock setting"}));
  EXPECT_EQ(throttle_names(0x600), (Names{"board limit", "reliability"}));
  EXPECT_EQ(throttle_names(0x800), Names{"reason 0x800"});
  EXPECT_EQ(throttle_names(uint64_t{1} << 63), Names{"reason 0x8000000000000000"});
}

}  // namespace
}  // namespace mgp

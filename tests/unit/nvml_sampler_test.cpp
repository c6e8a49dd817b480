#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/device.hpp"
#include "common/nvml.hpp"
#include "tests/unit/fake_nvml.hpp"

namespace mgp {
namespace {

using Clock = std::chrono::steady_clock;

// ── the summary ───────────────────────────────────────────────────────────────────────────────────────────────────────

TEST(NvmlSummary, MeansAndPeaksInClosedForm) {
  // Numbers 1 to n have the mean (n + 1) / 2 and the peak n; every third sample is without power, half are throttled.
  constexpr int kCount = 99;
  GpuStatistics statistics;
  double power_sum = 0;
  for (int i = 1; i <= kCount; ++i) {
    GpuSample s;
    s.utilization = i;
    if (i % 3 != 0) s.power = 10.0 * i;
    power_sum += s.power.value_or(0);
    s.power_limit = 700;
    s.sm_clock = 1000 + 2 * i;
    s.temperature = 100 - i;  // the peak comes first
    s.throttle_reasons = i % 2 == 0 ? 0x4 : 0x0;
    if (i == 1) s.throttle_reasons = 0x1 | 0x4;
    s.device_bytes = (i == 50 ? 100 : i) * kGiB;
    if (i <= 2) s.process_bytes = i * kGiB;
    statistics.add(s, /*ms=*/0.5 * i);
  }
  const GpuSummary summary = statistics.summary();
  EXPECT_EQ(summary.samples, kCount);
  EXPECT_DOUBLE_EQ(summary.sample_ms, 25);
  EXPECT_DOUBLE_EQ(summary.mean_utilization.value(), 50);
  EXPECT_EQ(summary.peak_utilization, 99.0);
  EXPECT_DOUBLE_EQ(summary.mean_power.value(), power_sum / 66);
  EXPECT_DOUBLE_EQ(summary.mean_power.value(), 10 * (4950.0 - 3 * 561) / 66);  // sum 1..99 without 3 x (1..33)
  EXPECT_EQ(summary.peak_power, 980.0);
  EXPECT_EQ(summary.power_limit, 700.0);
  EXPECT_DOUBLE_EQ(summary.mean_sm_clock.value(), 1100);
  EXPECT_FALSE(summary.mean_memory_clock.has_value());
  EXPECT_EQ(summary.peak_temperature, 99.0);
  EXPECT_EQ(summary.peak_device_bytes, 100 * kGiB);
  EXPECT_EQ(summary.peak_process_bytes, 2 * kGiB);
  ASSERT_EQ(summary.throttle_reasons.size(), 2U);
  EXPECT_EQ(summary.throttle_reasons[0].name, "idle");
  EXPECT_EQ(summary.throttle_reasons[0].samples, 1);
  EXPECT_EQ(summary.throttle_reasons[1].name, "SW power cap");
  EXPECT_EQ(summary.throttle_reasons[1].samples, 50);
}

TEST(NvmlSummary, Text) {
  EXPECT_EQ(to_text(GpuSummary{}), "GPU: no samples from NVML");
  GpuStatistics statistics;
  GpuSample s;
  s.utilization = 90;
  s.power = 500;
  s.power_limit = 700;
  s.sm_clock = 1700;
  s.temperature = 60;
  s.device_bytes = 3 * kGiB;
  s.process_bytes = kGiB;
  s.throttle_reasons = 0x5;
  statistics.add(s);
  s.utilization = 100;
  s.power = 600;
  s.sm_clock = 1800;
  s.throttle_reasons = 0x4;
  statistics.add(s);
  EXPECT_EQ(
      to_text(statistics.summary()),
      "GPU, 2 samples; utilization 95% mean, 100% peak; power 550 W mean, 600 W peak, 700 W limit; "
      "SM clock 1750 MHz mean; temperature 60 C peak; peak memory 3.00 GiB on the device, 1.00 GiB of this process; "
      "throttle reasons idle (1), SW power cap (2)");
  GpuStatistics little;
  GpuSample only;
  only.process_bytes = kGiB;
  little.add(only);
  EXPECT_EQ(to_text(little.summary()), "GPU, 1 sample; peak memory 1.00 GiB of this process");
}

TEST(NvmlSummary, Json) {
  GpuStatistics statistics;
  GpuSample s;
  s.power = 512.5;
  s.process_bytes = 3 * kGiB;
  s.throttle_reasons = 0x4;
  statistics.add(s, 2.0);
  const nlohmann::json json = nlohmann::json::parse(serialize(statistics.summary()));
  EXPECT_EQ(json.at("samples"), 1);
  EXPECT_EQ(json.at("sample_ms"), 2.0);
  EXPECT_EQ(json.at("power_w_mean"), 512.5);
  EXPECT_EQ(json.at("process_bytes_peak"), 3 * kGiB);
  EXPECT_TRUE(json.at("utilization_mean").is_null());
  EXPECT_EQ(json.at("throttle_samples"), nlohmann::json({{"SW power cap", 1}}));
  EXPECT_EQ(nlohmann::json::parse(serialize(GpuSummary{})).at("throttle_samples"), nlohmann::json::object());
}

// ── the sampler ───────────────────────────────────────────────────────────────────────────────────────────────────────

void wait_for_samples(int count) {
  for (int i = 0; i < 2000 && fake->samples < count; ++i) std::this_thread::sleep_for(milliseconds(1));
}

TEST_F(Nvml, SamplerSamplesBetweenStartAndStop) {
  gpu_.processes = {process(self(), 39 * kGiB)};
  NvmlSampler sampler(gpu(), milliseconds(1));
  EXPECT_TRUE(sampler.available());
  EXPECT_EQ(sampler.summary().samples, 0);
  EXPECT_FALSE(sampler.latest().has_value());
  sampler.start();
  sampler.start();  // nothing: it runs
  wait_for_samples(5);
  sampler.stop();
  const GpuSummary summary = sampler.summary();
  EXPECT_EQ(summary.samples, gpu_.samples);
  EXPECT_GE(summary.samples, 5);
  EXPECT_EQ(summary.mean_utilization, 97.0);
  EXPECT_EQ(summary.mean_power, 655.25);
  EXPECT_EQ(summary.peak_process_bytes, 39 * kGiB);
  EXPECT_EQ(summary.throttle_reasons.at(0).samples, summary.samples);
  ASSERT_TRUE(sampler.latest().has_value());
  EXPECT_EQ(sampler.latest()->sm_clock, 1755.0);

  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(gpu_.samples, summary.samples) << "after stop() nobody asks";
  EXPECT_EQ(sampler.now().value().power, 655.25);
  EXPECT_EQ(sampler.summary().samples, summary.samples) << "now() does not count";

  sampler.start();  // goes on
  wait_for_samples(static_cast<int>(summary.samples) + 4);
  sampler.stop();
  sampler.stop();
  EXPECT_GT(sampler.summary().samples, summary.samples);
}

TEST_F(Nvml, SamplerTakesTheFirstSampleAtOnceAndStopsWithoutWaiting) {
  NvmlSampler sampler(gpu(), std::chrono::hours(1));
  const Clock::time_point began = Clock::now();
  sampler.start();
  wait_for_samples(1);
  sampler.stop();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_EQ(sampler.summary().samples, 1);
}

TEST_F(Nvml, SamplerStopsWhenItIsDestroyed) {
  {
    NvmlSampler sampler(gpu(), std::chrono::hours(1));
    sampler.start();
  }
  EXPECT_EQ(gpu_.initialised, 0);
}

TEST_F(Nvml, SamplerNeverAsksASlowDriverWithoutAPause) {
  gpu_.slowness_ms = 20;
  NvmlSampler sampler(gpu(), milliseconds(20));
  const Clock::time_point began = Clock::now();
  sampler.start();
  wait_for_samples(4);
  sampler.stop();
  EXPECT_GE(Clock::now() - began, milliseconds(3 * 40));
  EXPECT_GE(sampler.summary().sample_ms, 20.0);
}

TEST_F(Nvml, SamplerOutlivesALostGpu) {
  NvmlSampler sampler(gpu(), milliseconds(1));
  gpu_.result = kGpuIsLost;
  sampler.start();
  wait_for_samples(3);
  sampler.stop();
  EXPECT_EQ(sampler.summary().samples, 0);
  EXPECT_FALSE(sampler.latest().has_value());
  EXPECT_FALSE(sampler.now().has_value());
  EXPECT_EQ(to_text(sampler.summary()), "GPU: no samples from NVML");
}

TEST_F(Nvml, SamplerWithoutAGpuDoesNothing) {
  for (const bool uuid_is_empty : {true, false}) {
    NvmlSampler sampler(uuid_is_empty ? "" : "GPU-00000000-0000-0000-0000-000000000000");
    EXPECT_FALSE(sampler.available());
    sampler.start();
    sampler.stop();
    EXPECT_FALSE(sampler.now().has_value());
    EXPECT_EQ(sampler.summary().samples, 0);
  }
}

// ── the real one ──────────────────────────────────────────────────────────────────────────────────────────────────────

TEST(NvmlReal, AgreesWithWhatTheProcessAllocated) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  if (NvmlLibrary::open() == nullptr) GTEST_SKIP() << "a GPU, but no NVML";
  const DeviceFacts facts = describe_device(Launch{}, c10::Device(c10::DeviceType::CUDA, 0), 1);
  NvmlSampler sampler(facts.uuid, facts.pci);
  ASSERT_TRUE(sampler.available()) << facts.uuid;
  const at::Tensor block = at::zeros({kGiB}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
  sampler.start();
  std::this_thread::sleep_for(milliseconds(500));
  sampler.stop();
  const GpuSummary summary = sampler.summary();
  std::puts(to_text(summary).c_str());
  EXPECT_GE(summary.samples, 2);
  EXPECT_LT(summary.sample_ms, 100.0);
  ASSERT_TRUE(summary.peak_device_bytes.has_value());
  EXPECT_GE(*summary.peak_device_bytes, kGiB);
  EXPECT_LE(*summary.peak_device_bytes, facts.total_bytes + 2 * kGiB);
  // Absent in most containers. Where it is there, it holds the block and the CUDA context.
  if (summary.peak_process_bytes) {
    EXPECT_GE(*summary.peak_process_bytes, kGiB);
    EXPECT_LE(*summary.peak_process_bytes, *summary.peak_device_bytes);
  }
  EXPECT_LE(summary.peak_utilization.value_or(0), 100.0);
  EXPECT_LE(summary.mean_power.value_or(0), 2 * summary.power_limit.value_or(10'000));
}

}  // namespace
}  // namespace mgp

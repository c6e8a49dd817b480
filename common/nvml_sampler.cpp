// Summaries of samples, and the thread that takes them; nvml.cpp takes one.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "common/nvml.hpp"
#include "common/text.hpp"

namespace mgp {

// ── many looks ────────────────────────────────────────────────────────────────────────────────────────────────────────

void GpuStatistics::Series::add(const std::optional<double>& value) {
  if (!value) return;
  peak = count == 0 ? *value : std::max(peak, *value);
  last = *value;
  sum += *value;
  ++count;
}

std::optional<double> GpuStatistics::Series::if_any(double value) const {
  return count > 0 ? std::optional<double>(value) : std::nullopt;
}

std::optional<double> GpuStatistics::Series::mean() const { return if_any(sum / static_cast<double>(count)); }

void GpuStatistics::add(const GpuSample& s, double ms) {
  utilization_.add(s.utilization);
  power_.add(s.power);
  power_limit_.add(s.power_limit);
  sm_clock_.add(s.sm_clock);
  memory_clock_.add(s.memory_clock);
  temperature_.add(s.temperature);
  cost_.add(ms);
  peak_device_bytes_ = std::max(peak_device_bytes_, s.device_bytes);  // absent is less than any number
  peak_process_bytes_ = std::max(peak_process_bytes_, s.process_bytes);
  for (uint64_t rest = s.throttle_reasons.value_or(0); rest != 0; rest &= rest - 1) {
    ++throttle_samples_[std::countr_zero(rest)];
  }
}

GpuSummary GpuStatistics::summary() const {
  GpuSummary s;
  s.samples = cost_.count;
  s.sample_ms = cost_.mean().value_or(0.0);
  s.mean_utilization = utilization_.mean();
  s.peak_utilization = utilization_.if_any(utilization_.peak);
  s.mean_power = power_.mean();
  s.peak_power = power_.if_any(power_.peak);
  s.power_limit = power_limit_.if_any(power_limit_.last);
  s.mean_sm_clock = sm_clock_.mean();
  s.mean_memory_clock = memory_clock_.mean();
  s.peak_temperature = temperature_.if_any(temperature_.peak);
  s.peak_device_bytes = peak_device_bytes_;
  s.peak_process_bytes = peak_process_bytes_;
  for (size_t bit = 0; bit < std::size(throttle_samples_); ++bit) {
    if (throttle_samples_[bit] == 0) continue;
    s.throttle_reasons.push_back({throttle_names(uint64_t{1} << bit).front(), throttle_samples_[bit]});
  }
  return s;
}

std::string to_text(const GpuSummary& s) {
  if (s.samples == 0) return "GPU: no samples from NVML";
  std::string text = fmt::format("GPU, {} sample{}", s.samples, s.samples == 1 ? "" : "s");
  // Opens a group with its first number, so that a group without numbers does not appear.
  std::string_view title;
  const auto part = [&](bool there, const std::string& words) {
    if (!there) return;
    text += title.empty() ? ", " : fmt::format("; {} ", std::exchange(title, ""));
    text += words;
  };
  const auto number = [&](const std::optional<double>& value, const char* unit) {
    part(value.has_value(), fmt::format("{:.0f}{}", value.value_or(0), unit));
  };
  const auto bytes = [&](const std::optional<int64_t>& value, const char* whose) {
    part(value.has_value(), human_bytes(static_cast<double>(value.value_or(0))) + whose);
  };
  title = "utilization";
  number(s.mean_utilization, "% mean");
  number(s.peak_utilization, "% peak");
  title = "power";
  number(s.mean_power, " W mean");
  number(s.peak_power, " W peak");
  number(s.power_limit, " W limit");
  title = "SM clock";
  number(s.mean_sm_clock, " MHz mean");
  title = "temperature";
  number(s.peak_temperature, " C peak");
  title = "peak memory";
  bytes(s.peak_device_bytes, " on the device");
  bytes(s.peak_process_bytes, " of this process");
  title = "throttle reasons";
  for (const ThrottleReason& reason : s.throttle_reasons)
    part(true, fmt::format("{} ({})", reason.name, reason.samples));
  return text;
}

std::string serialize(const GpuSummary& s) {
  using nlohmann::ordered_json;
  const auto value = [](const auto& number) { return number ? ordered_json(*number) : ordered_json(); };
  ordered_json json = {{"samples", s.samples},
                       {"sample_ms", s.sample_ms},
                       {"utilization_mean", value(s.mean_utilization)},
                       {"utilization_peak", value(s.peak_utilization)},
                       {"power_w_mean", value(s.mean_power)},
                       {"power_w_peak", value(s.peak_power)},
                       {"power_w_limit", value(s.power_limit)},
                       {"sm_mhz_mean", value(s.mean_sm_clock)},
                       {"memory_mhz_mean", value(s.mean_memory_clock)},
                       {"temperature_c_peak", value(s.peak_temperature)},
                       {"device_bytes_peak", value(s.peak_device_bytes)},
                       {"process_bytes_peak", value(s.peak_process_bytes)},
                       {"throttle_samples", ordered_json::object()}};
  for (const ThrottleReason& reason : s.throttle_reasons) json["throttle_samples"][reason.name] = reason.samples;
  return json.dump();
}

// ── the sampler ───────────────────────────────────────────────────────────────────────────────────────────────────────

NvmlSampler::NvmlSampler(const std::string& uuid, const std::string& pci) noexcept : interval_(kInterval) {
  try {
    if (!uuid.empty()) gpu_ = find_gpu(NvmlLibrary::open(), uuid, pci);
  } catch (...) {  // out of memory: as if there were no NVML
  }
}

NvmlSampler::NvmlSampler(std::optional<NvmlGpu> gpu, std::chrono::milliseconds interval) noexcept
    : gpu_(std::move(gpu)), interval_(interval) {}

NvmlSampler::~NvmlSampler() { stop(); }

void NvmlSampler::start() noexcept {
  if (!gpu_ || thread_.joinable()) return;
  stopping_ = false;  // no thread runs yet
  try {
    thread_ = std::thread([this] { sample_until_stopped(); });
  } catch (...) {  // the limit of threads is reached: no samples
  }
}

void NvmlSampler::stop() noexcept {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void NvmlSampler::sample_until_stopped() noexcept {
  using Clock = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const Clock::time_point began = Clock::now();
    const std::optional<GpuSample> sample = now();
    const std::chrono::duration<double, std::milli> cost = Clock::now() - began;
    lock.lock();
    latest_ = sample;
    if (sample) statistics_.add(*sample, cost.count());
    // Waits from here on: a driver that answers slowly is not asked more often than one that is quick.
    wake_.wait_for(lock, interval_, [this] { return stopping_; });
  }
}

std::optional<GpuSample> NvmlSampler::latest() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

std::optional<GpuSample> NvmlSampler::now() const noexcept {
  try {
    if (gpu_) return sample_gpu(*gpu_);
  } catch (...) {  // out of memory: as if the GPU had not answered
  }
  return std::nullopt;
}

GpuSummary NvmlSampler::summary() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return statistics_.summary();
}

}  // namespace mgp

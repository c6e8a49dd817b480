#include "examples/model_parallel/stage_clock.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "common/text.hpp"

namespace mgp {

StageClock::StageClock(std::vector<at::Device> devices, int64_t warmup)
    : devices_(std::move(devices)),
      warmup_(warmup),
      previous_end_(devices_.size()),
      phase_ms_(devices_.size(), std::vector<double>(3, 0.0)),
      step_ms_(devices_.size(), 0.0) {
  open_.work.resize(devices_.size());
}

void StageClock::begin(size_t stage, Phase phase) {
  open_.work[stage].push_back({phase, Moment::record(devices_[stage]), Moment()});
}

void StageClock::end(size_t stage) { open_.work[stage].back().ended = Moment::record(devices_[stage]); }

void StageClock::copied(int64_t bytes) {
  ++copies_;
  copied_bytes_ += bytes;
}

void StageClock::step_ended(Run* run) {
  constexpr const char* kNames[] = {"forward", "backward", "optimizer"};
  for (size_t stage = 0; run != nullptr && stage < devices_.size(); ++stage) {
    const std::string row = fmt::format("stage {} on {}", stage, devices_[stage].str());
    for (const Work& work : open_.work[stage]) {
      if (work.ended.valid()) run->span(row, kNames[work.phase], work.began, work.ended, devices_[stage]);
    }
  }
  for (const at::Device device : devices_) open_.ended.push_back(Moment::record(device));
  unread_.push_back(std::move(open_));
  open_ = {};
  open_.work.resize(devices_.size());
  ++steps_;
  while (!unread_.empty() && passed(unread_.front())) {
    read(unread_.front());
    unread_.pop_front();
  }
}

bool StageClock::passed(const Step& step) const {
  return std::all_of(step.ended.begin(), step.ended.end(), [](const Moment& mark) { return mark.passed(); });
}

void StageClock::read(const Step& step) {
  // The first step has none before it to be measured from.
  const bool counts = ++read_ > std::max<int64_t>(warmup_, 1);
  counted_ += counts ? 1 : 0;
  for (size_t stage = 0; stage < devices_.size(); ++stage) {
    for (const Work& work : step.work[stage]) {
      if (counts && work.ended.valid()) phase_ms_[stage][work.phase] += Moment::milliseconds(work.began, work.ended);
    }
    if (counts) step_ms_[stage] += Moment::milliseconds(previous_end_[stage], step.ended[stage]);
    previous_end_[stage] = step.ended[stage];
  }
}

std::string StageClock::report() {
  for (; !unread_.empty(); unread_.pop_front()) read(unread_.front());
  if (counted_ == 0) {
    return fmt::format("busy time and gap: not measured, all {} steps are first or warm-up steps\n", steps_);
  }
  const double steps = static_cast<double>(counted_);
  std::vector<std::vector<std::string>> rows = {
      {"stage", "device", "forward ms", "backward ms", "optimizer ms", "busy ms", "gap ms", "busy"}};
  double busiest = 0;
  for (size_t stage = 0; stage < devices_.size(); ++stage) {
    const std::vector<double>& ms = phase_ms_[stage];
    const double busy = std::accumulate(ms.begin(), ms.end(), 0.0) / steps;
    const double whole = step_ms_[stage] / steps;
    busiest = std::max(busiest, busy / whole);
    rows.push_back({std::to_string(stage), devices_[stage].str(), fmt::format("{:.2f}", ms[forward] / steps),
                    fmt::format("{:.2f}", ms[backward] / steps), fmt::format("{:.2f}", ms[optimizer] / steps),
                    fmt::format("{:.2f}", busy), fmt::format("{:.2f}", std::max(0.0, whole - busy)),
                    fmt::format("{:.0f}%", 100.0 * busy / whole)});
  }
  return table(fmt::format("time of each stage in a step, mean of {} steps", counted_), rows, /*head=*/true) +
         fmt::format("sequential by nature: one stage works at a time, the busiest {:.0f}% of a step\n",
                     100.0 * busiest);
}

}  // namespace mgp

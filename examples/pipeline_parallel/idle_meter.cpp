#include "examples/pipeline_parallel/idle_meter.hpp"

#include <fmt/format.h>

#include "common/text.hpp"

namespace mgp {

void IdleMeter::begin_step() {
  read(/*wait=*/false);
  open_.push_back({Moment::record(device_), {}, {}});
}

void IdleMeter::busy_began() { open_.back().busy.emplace_back(Moment::record(device_), Moment{}); }

void IdleMeter::busy_ended() { open_.back().busy.back().second = Moment::record(device_); }

void IdleMeter::end_step() { open_.back().ended = Moment::record(device_); }

void IdleMeter::read(bool wait) {
  while (!open_.empty() && (wait || open_.front().ended.passed())) {
    const Step step = std::move(open_.front());
    open_.pop_front();
    Times times;
    times.whole = Moment::milliseconds(step.began, step.ended);
    for (const auto& [began, ended] : step.busy) times.busy += Moment::milliseconds(began, ended);
    times_.push_back(times);
  }
}

std::string IdleMeter::report(Communicator& world, int64_t warmup, double predicted) {
  read(/*wait=*/true);
  Times sum;
  for (size_t step = static_cast<size_t>(warmup); step < times_.size(); ++step) {
    sum.whole += times_[step].whole;
    sum.busy += times_[step].busy;
  }
  const std::string mine = sum.whole > 0 ? fmt::format("{:.1f}", 100.0 * (1.0 - sum.busy / sum.whole)) : "";
  const std::vector<std::string> all = world.gather_text("idle share", mine);
  if (mine.empty() || world.rank() != 0) return "";
  std::vector<std::vector<std::string>> rows = {{"stage", "predicted %", "measured %"}};
  for (size_t stage = 0; stage < all.size(); ++stage) {
    rows.push_back(
        {std::to_string(stage), fmt::format("{:.1f}", 100.0 * predicted), world.size() == 1 ? mine : all[stage]});
  }
  return table("share of forward and backward in which a stage does not compute: it waits, or sends", rows, true);
}

}  // namespace mgp

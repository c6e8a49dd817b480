// When each stage worked: busy time and gap of every stage, measured with marks on its own device.
//
// A mark is taken on a device's stream, and two marks can be compared only on the same device. So a stage's step lasts
// from the end of the optimizer's work on its device in the step before to the end of that work in this one; what is
// not busy in between is gap: the time in which the stage waited for the others.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/run.hpp"
#include "common/timing.hpp"

namespace mgp {

class StageClock {
 public:
  enum Phase { forward, backward, optimizer };

  /// `warmup`: steps left out of the report.
  StageClock(std::vector<at::Device> devices, int64_t warmup);

  /// Marks the device of `stage` now. begin() may come from autograd's thread, one stage at a time.
  void begin(size_t stage, Phase phase);
  void end(size_t stage);
  /// A copy to another device was queued.
  void copied(int64_t bytes);
  /// Ends the step on all devices, draws it in the trace of `run` (null: nowhere), a row a stage, and reads earlier
  /// steps whose marks have passed: never waits.
  void step_ended(Run* run);

  int64_t copies() const { return copies_; }
  int64_t copied_bytes() const { return copied_bytes_; }
  int64_t steps() const { return steps_; }

  /// Means over the steps after the warm-up: a row a stage. Waits for the devices.
  std::string report();

 private:
  struct Work {
    Phase phase;
    Moment began, ended;
  };
  struct Step {
    std::vector<std::vector<Work>> work;  // [stage]
    std::vector<Moment> ended;            // [stage]
  };
  void read(const Step& step);
  bool passed(const Step& step) const;

  std::vector<at::Device> devices_;
  int64_t warmup_;
  Step open_;
  std::deque<Step> unread_;
  std::vector<Moment> previous_end_;  // [stage]; not valid before the first step
  int64_t steps_ = 0, read_ = 0, counted_ = 0;
  int64_t copies_ = 0, copied_bytes_ = 0;
  std::vector<std::vector<double>> phase_ms_;  // [stage][phase], sums
  std::vector<double> step_ms_;                // [stage], sums
};

}  // namespace mgp

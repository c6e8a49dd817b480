// How much of a step a stage does not compute: what the formula (p - 1) / (m + p - 1) is compared with.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "common/communicator.hpp"
#include "common/timing.hpp"

namespace mgp {

/// Marks in the compute stream; nothing here waits for the device before report().
class IdleMeter {
 public:
  explicit IdleMeter(at::Device device) : device_(device) {}

  /// The stages begin together: they have just come from the collective that ends a step.
  void begin_step();
  /// Around each forward and backward, after what they wait for has come.
  void busy_began();
  void busy_ended();
  /// After a collective of all stages, so that the end is the same for all.
  void end_step();

  /// One line a stage on rank 0, predicted and measured, over all steps but the first `warmup`; "" if there is none.
  /// Collective.
  std::string report(Communicator& world, int64_t warmup, double predicted);

 private:
  struct Step {
    Moment began, ended;
    std::vector<std::pair<Moment, Moment>> busy;
  };
  struct Times {
    double whole = 0, busy = 0;
  };
  void read(bool wait);

  const at::Device device_;
  std::deque<Step> open_;     // marks that the device may still have before it
  std::vector<Times> times_;  // milliseconds of each step
};

}  // namespace mgp

// Points in time on a device's stream, so that the same code measures GPU work and CPU work.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>

namespace mgp {

/// A mark in the current stream of a CUDA device (a timing event), or on the host clock for the CPU.
/// Recording never waits. A difference of two marks can be read once both have passed.
class Moment {
 public:
  Moment() = default;
  /// Marks the current stream of `device` now.
  static Moment record(c10::Device device);

  bool valid() const { return valid_; }
  /// Whether the mark is part of a CUDA graph: each replay records it anew, and it tells the time of the last one.
  bool captured() const;
  /// Whether the device has reached the mark. Always true on the CPU.
  bool passed() const;
  /// Waits on the host until the mark has passed.
  void synchronize() const;
  /// Milliseconds from `earlier` to `later`; negative if the order is the other way. Waits for both.
  static double milliseconds(const Moment& earlier, const Moment& later);

 private:
  struct CudaEvent;                   // hides the CUDA headers from the readers of this one
  std::shared_ptr<CudaEvent> event_;  // CUDA only
  std::chrono::steady_clock::time_point host_;
  bool valid_ = false;
};

}  // namespace mgp

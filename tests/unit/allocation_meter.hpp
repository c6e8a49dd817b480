// How many bytes of CPU tensors are alive, by the reports that LibTorch's allocator gives to a profiler.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace mgp {

/// Counts from its construction on, on this thread. On a CPU backward runs on the thread that called it, so it counts
/// too. Tensors that were made before are not seen, neither alive nor when they go.
class AllocationMeter {
 public:
  AllocationMeter() : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  int64_t now() const { return counter_->now; }    ///< bytes alive
  int64_t peak() const { return counter_->peak; }  ///< the most since the start or reset_peak()
  void reset_peak() { counter_->peak = counter_->now; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
      now += bytes;  // negative when memory is freed
      peak = std::max(peak, now);
    }
    void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
    int64_t now = 0, peak = 0;
  };

  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace mgp

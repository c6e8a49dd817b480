// One optimizer step as a CUDA graph (--cuda-graph on), and what must stay in place for it.
//
// Eager, the host launches some thousand kernels a step, and a GPU that is faster than the host waits for it. A CUDA graph
// records the launches of one step, forward, backward, NCCL, clipping and optimizer, and repeats them with one call.
// It repeats them exactly: the same kernels with the same addresses and the same numbers. So
//   - what changes from step to step stands in tensors that stay where they are: the batch (StepBatches), the learning rate
//     (LearningRate in optimizer.hpp), the loss scale;
//   - no host code of the step runs in a replay: hooks, marks and counters run when it is captured, and never again;
//   - nothing in it may ask the device a question.
// Order of steps: 1 to 3 run eagerly (DDP cuts its buckets anew, libraries make their workspaces), 4 is captured and
// replayed, from then on every step is one replay. Memory of the graph is a pool of its own and stays reserved.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "common/communicator.hpp"
#include "common/data.hpp"

namespace mgp {

/// Runs the body of a training step: as it is, or as a CUDA graph.
class StepGraph {
 public:
  /// Steps that run eagerly before the capture.
  static constexpr int64_t kWarmupSteps = 3;

  /// With `enabled` a stream of its own is current from here until the end of this object's life: capture is not possible
  /// on the default stream, and autograd runs backward on the stream on which forward ran. Make it before the model.
  /// `world` (may be null): its ledger counts the captured calls in each replay, its watchdog sees each replay as a call.
  StepGraph(bool enabled, at::Device device, Communicator* world);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// Calls `work`; from the fourth call on replays what it launched. Tensors that `work` leaves behind (the loss) have the
  /// values of the last replay: copy what must last. Throws RunError when the step cannot be captured.
  void run(const std::function<void()>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null: not enabled
};

/// The microbatches of one step. With `fixed` each stays in the tensors of the first step, and later ones are copied there.
class StepBatches {
 public:
  StepBatches(int64_t count, bool fixed) : batches_(static_cast<size_t>(count)), fixed_(fixed) {}
  void put(int64_t micro, const Batch& batch);
  const Batch& operator[](int64_t micro) const { return batches_[static_cast<size_t>(micro)]; }

 private:
  std::vector<Batch> batches_;
  bool fixed_;
};

}  // namespace mgp

#include "common/step_graph.hpp"

#include <fmt/format.h>

#include "common/error.hpp"

#if MGP_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>

#include "common/watchdog.hpp"
#if MGP_WITH_NCCL
#include "common/nccl_support.hpp"
#endif
#endif

namespace mgp {

void StepBatches::put(int64_t micro, const Batch& batch) {
  Batch& mine = batches_[static_cast<size_t>(micro)];
  if (!fixed_ || !mine.tokens.defined()) {
    mine = batch;
    return;
  }
  mine.tokens.copy_(batch.tokens, /*non_blocking=*/true);
  mine.labels.copy_(batch.labels, /*non_blocking=*/true);
}

#if MGP_WITH_CUDA

struct StepGraph::Impl {
  Impl(at::Device device_in, Communicator* world_in)
      : device(device_in),
        world(world_in),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_in.index())),
        current(stream) {}
  ~Impl() { forget(/*all=*/true); }

  void capture(const std::function<void()>& work);
  void replay();
  void watch(const Moment& began, const Moment& ended);
  void forget(bool all);

  at::Device device;
  Communicator* world;  // null in a trainer of one process
  c10::cuda::CUDAStream stream;
  c10::cuda::CUDAStreamGuard current;  // `stream` is the current one as long as this lives
  int64_t eager_steps = 0;
  int64_t replays = 0;
  std::unique_ptr<at::cuda::CUDAGraph> graph;
  std::vector<LedgerRow> calls;                     // that one replay makes
  std::deque<std::pair<uint64_t, Moment>> watched;  // replays that the watchdog knows, and their ends
};

void StepGraph::Impl::capture(const std::function<void()>& work) {
  stream.synchronize();
  // The graph allocates from a pool of its own. What the eager steps left in the cache would lie idle beside it.
  c10::cuda::CUDACachingAllocator::emptyCache();
  std::vector<LedgerRow> before;
  if (world != nullptr) before = world->ledger().rows();
  auto captured = std::make_unique<at::cuda::CUDAGraph>();
  // Thread-local: other threads may go on asking about their events, as the watchdog does (trial B85).
  captured->capture_begin(/*pool=*/{0, 0}, cudaStreamCaptureModeThreadLocal);
  try {
    work();
    captured->capture_end();
  } catch (const std::exception& error) {
    std::string line = error.what();
    line.erase(std::min(line.find('\n'), line.size()));  // LibTorch appends its own stack
    throw RunError(
        fmt::format("the step could not be captured as a CUDA graph: {}; run it with --cuda-graph off", line));
  }
  c10::cuda::CUDACachingAllocator::emptyCache();  // what the step dropped of the eager steps: the old gradients
  if (world != nullptr) calls = difference(world->ledger().rows(), before);
  graph = std::move(captured);
}

void StepGraph::Impl::replay() {
  const bool watching = world != nullptr && !calls.empty();
  // Capturing has counted the calls of the first replay.
  if (watching && replays > 0) world->ledger().count_again(calls);
  ++replays;
  Moment began, ended;
  if (watching) began = Moment::record(device);
  graph->replay();
  if (!watching) return;
  ended = Moment::record(device);
  watch(began, ended);
}

/// Inside a graph no call of its own is under watch, so the whole replay is one.
void StepGraph::Impl::watch([[maybe_unused]] const Moment& began, [[maybe_unused]] const Moment& ended) {
#if MGP_WITH_NCCL
  forget(/*all=*/false);
  int64_t count = 0;
  for (const LedgerRow& row : calls) count += row.calls;
  const auto question = [device = device](const Moment& mark) {
    return [mark, device] {
      enter_watching_thread(device);
      return mark.passed();
    };
  };
  const uint64_t id = world->watchdog().begin_call(
      fmt::format("replay {} of the step's CUDA graph with its {} collectives", replays, count), question(ended),
      question(began), {"CUDA graph", nullptr, replays});
  watched.emplace_back(id, ended);
#endif
}

void StepGraph::Impl::forget(bool all) {
  while (!watched.empty() && (all || watched.front().second.passed())) {
    world->watchdog().finish_call(watched.front().first);
    watched.pop_front();
  }
}

#else

struct StepGraph::Impl {};

#endif

StepGraph::StepGraph(bool enabled, [[maybe_unused]] at::Device device, [[maybe_unused]] Communicator* world) {
#if MGP_WITH_CUDA
  if (enabled) impl_ = std::make_unique<Impl>(device, world);
#else
  if (enabled) throw UsageError("--cuda-graph on: this build has no CUDA (configure with -DMGP_CUDA=ON)");
#endif
}

StepGraph::~StepGraph() = default;

void StepGraph::run(const std::function<void()>& work) {
#if MGP_WITH_CUDA
  if (impl_) {
    if (!impl_->graph && impl_->eager_steps++ >= kWarmupSteps) impl_->capture(work);
    if (impl_->graph) return impl_->replay();
  }
#endif
  work();
}

}  // namespace mgp

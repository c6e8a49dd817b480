// What only a GPU can get wrong: order between streams, memory that is reused too early, graphs.
//   MGP_TEST_DEVICE=cuda scripts/launch.sh --share-gpu -n 2 multi_rank_tests
#if MGP_WITH_CUDA && MGP_WITH_NCCL

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <thread>

#include "tests/multi_rank/world.hpp"

namespace {

using mgp::ReduceOp;
using namespace mgp_test;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!world().device().is_cuda()) GTEST_SKIP() << "needs GPU ranks";
  }
  static at::Tensor filled(int64_t numel, double value) {
    return at::full({numel}, value, at::TensorOptions().dtype(at::kFloat).device(world().device()));
  }
};

TEST_F(Cuda, CommunicationWaitsForComputeAndComputeForCommunication) {
  const at::Tensor matrix = at::full({1024, 1024}, 1.0 / 1024.0, filled(1, 0.0).options());
  for (int round = 0; round < 10; ++round) {
    at::Tensor x = at::full({1024, 1024}, static_cast<double>(round), matrix.options());
    for (int i = 0; i < 20; ++i) x = at::matmul(x, matrix);  // keeps the value, takes a while
    mgp::Work work = world().all_reduce(x, ReduceOp::sum, {"x"});
    work.wait();
    const at::Tensor after = x * 2.0;  // queued at once, must see the sum
    const double expected = 2.0 * round * world().size();
    EXPECT_NEAR(after.max().item<double>(), expected, 1e-2 * (expected + 1.0));
    EXPECT_NEAR(after.min().item<double>(), expected, 1e-2 * (expected + 1.0));
  }
}

TEST_F(Cuda, MemoryIsNotReusedWhileItIsSent) {
  // The works are forgotten and the tensors dropped at once; what is allocated next must not land in them.
  std::vector<at::Tensor> gathered;
  const int64_t numel = int64_t{1} << 20;
  for (int i = 0; i < 10; ++i) {
    gathered.push_back(filled(numel * world().size(), -1.0));
    { const mgp::Work forgotten = world().all_gather(gathered.back(), filled(numel, i), {"gathered"}); }
    const at::Tensor intruder = filled(numel, 1000.0);
  }
  world().barrier("all gathered");
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(gathered[static_cast<size_t>(i)].min().item<double>(), i);
    EXPECT_EQ(gathered[static_cast<size_t>(i)].max().item<double>(), i);
  }
}

TEST_F(Cuda, CallsFromAnotherThreadOnAnotherStream) {
  // As autograd's hooks make them.
  const at::Tensor x = filled(1000, 1.0);
  c10::cuda::getCurrentCUDAStream(world().device().index()).synchronize();
  std::thread([&] {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, world().device().index()));
    x.add_(1.0);
    world().all_reduce(x, ReduceOp::sum, {"x"}).wait();
    x.mul_(3.0);
    c10::cuda::getCurrentCUDAStream(world().device().index()).synchronize();
  }).join();
  EXPECT_EQ(x.min().item<double>(), 6.0 * world().size());
}

TEST_F(Cuda, CapturedInAGraphAndReplayed) {
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool(false, world().device().index());
  const at::Tensor x = filled(100000, 1.0);
  const at::Tensor y = filled(100000, 0.0);
  side.synchronize();
  c10::cuda::getCurrentCUDAStream(world().device().index()).synchronize();
  std::optional<mgp::Communicator> child = world().split(0, world().rank(), "child");
  const auto step = [&] {
    x.add_(1.0);
    mgp::Work in_world = world().all_reduce(x, ReduceOp::avg, {"x"});
    in_world.wait();
    y.copy_(x);
    mgp::Work in_child = child->all_reduce(y, ReduceOp::sum, {"y"});
    in_child.wait();
    y.add_(0.5);
    return in_world;
  };
  mgp::Work captured;
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    for (int i = 0; i < 3; ++i) captured = step();  // warm-up: x is 4
    side.synchronize();
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    captured = step();
    // The watchdog asks about the calls before the capture meanwhile; that must not disturb it.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    graph.capture_end();
    for (int i = 0; i < 5; ++i) graph.replay();
    side.synchronize();
  }
  EXPECT_NEAR(x.min().item<double>(), 9.0, 1e-4);
  EXPECT_NEAR(y.max().item<double>(), 9.0 * world().size() + 0.5, 1e-3);
  // The marks are recorded by each replay.
  EXPECT_GT(mgp::Moment::milliseconds(captured.began(), captured.ended()), 0.0);
  // And plain calls go on working.
  const at::Tensor z = filled(10, 1.0);
  world().all_reduce(z, ReduceOp::sum, {"z"}).wait();
  EXPECT_EQ(z.min().item<double>(), world().size());
  captured = mgp::Work();
  graph.reset();
  world().barrier("before the child leaves");
}

TEST_F(Cuda, TheHashOfATensorIsTheSameOnTheCpu) {
  const at::Tensor x = at::arange(3000001, filled(1, 0.0).options());
  EXPECT_EQ(mgp::hash_tensors({x, x.narrow(0, 1, 7)}), mgp::hash_tensors({x.cpu(), x.cpu().narrow(0, 1, 7)}));
}

}  // namespace

#endif

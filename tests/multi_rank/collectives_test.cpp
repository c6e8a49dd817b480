// Closed-form results of every collective, for every type, with empty, odd and long tensors.
#include <fmt/format.h>

#include "common/wire.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

using mgp::ReduceOp;
using namespace mgp_test;

std::string label(const char* call, int64_t numel, at::ScalarType type, ReduceOp op = ReduceOp::sum) {
  return fmt::format("{} of {} x {}, {}", call, numel, at::toString(type), mgp::name_of(op));
}

void check_all_reduce(int64_t numel, at::ScalarType type, ReduceOp op) {
  const at::Tensor tensor = pattern(numel, type, world().rank());
  world().all_reduce(tensor, op, {"t"}).wait();
  expect_close(tensor, reduced_pattern(numel, type, op, world().size()), label("all_reduce", numel, type, op));
}

void check_reduce(int64_t numel, at::ScalarType type, ReduceOp op, int root) {
  const at::Tensor tensor = pattern(numel, type, world().rank());
  world().reduce(tensor, root, op, {"t"}).wait();
  const at::Tensor expected =
      world().rank() == root ? reduced_pattern(numel, type, op, world().size()) : pattern(numel, type, world().rank());
  expect_close(tensor, expected, label("reduce", numel, type, op));
}

void check_broadcast(int64_t numel, at::ScalarType type, int root) {
  const at::Tensor tensor = pattern(numel, type, world().rank());
  world().broadcast(tensor, root, {"t"}).wait();
  expect_close(tensor, pattern(numel, type, root), label("broadcast", numel, type));
}

at::Tensor patterns_of_all(int64_t numel, at::ScalarType type) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world().size(); ++rank) parts.push_back(pattern(numel, type, rank));
  return at::cat(parts);
}

void check_all_gather(int64_t numel, at::ScalarType type) {
  const at::Tensor output = constant(numel * world().size(), type, 99);
  world().all_gather(output, pattern(numel, type, world().rank()), {"t"}).wait();
  expect_close(output, patterns_of_all(numel, type), label("all_gather", numel, type));
  // The input may be this rank's own part of the output.
  const at::Tensor same = constant(numel * world().size(), type, 99);
  const at::Tensor part = same.narrow(0, world().rank() * numel, numel);
  part.copy_(pattern(numel, type, world().rank()));
  world().all_gather(same, part, {"t"}).wait();
  expect_close(same, patterns_of_all(numel, type), label("all_gather in place", numel, type));
}

void check_reduce_scatter(int64_t numel, at::ScalarType type, ReduceOp op) {
  const int64_t all = numel * world().size();
  const at::Tensor expected = reduced_pattern(all, type, op, world().size()).narrow(0, world().rank() * numel, numel);
  const at::Tensor output = constant(numel, type, 99);
  world().reduce_scatter(output, pattern(all, type, world().rank()), op, {"t"}).wait();
  expect_close(output, expected, label("reduce_scatter", numel, type, op));
  // The output may be this rank's own part of the input.
  const at::Tensor same = pattern(all, type, world().rank());
  const at::Tensor part = same.narrow(0, world().rank() * numel, numel);
  world().reduce_scatter(part, same, op, {"t"}).wait();
  expect_close(part, expected, label("reduce_scatter in place", numel, type, op));
}

void check_everything(int64_t numel, at::ScalarType type) {
  for (const ReduceOp op : kAllOps) {
    check_all_reduce(numel, type, op);
    check_reduce_scatter(numel, type, op);
    check_reduce(numel, type, op, world().size() - 1);
  }
  check_all_gather(numel, type);
  for (int root = 0; root < world().size(); ++root) check_broadcast(numel, type, root);
}

TEST(Collectives, EveryCallEveryTypeEverySize) {
  for (const at::ScalarType type : kAllTypes) {
    for (const int64_t numel : kSizes) check_everything(numel, type);
  }
}

TEST(Collectives, RootsOfAReduce) {
  for (int root = 0; root < world().size(); ++root) check_reduce(33, at::kFloat, ReduceOp::sum, root);
}

TEST(Collectives, LongTensorsGoInPieces) {
  if (!world().device().is_cpu()) GTEST_SKIP() << "only MPI counts with int";
  mgp::set_mpi_chunk_limit(5);
  for (const at::ScalarType type : {at::kDouble, at::kBFloat16, at::kByte}) {
    for (const int64_t numel : {0, 4, 5, 6, 23}) check_everything(numel, type);
  }
  mgp::set_mpi_chunk_limit(0);  // back to what MPI can count
}

TEST(Collectives, LowPrecisionSumsRoundEachStepOnly) {
  // 256 + 1 + ... cannot be held by bf16 (steps of 2 from 256 on), but each step is rounded to nearest, not cut off.
  const at::Tensor tensor = constant(3, at::kBFloat16, world().rank() == 0 ? 256.0 : 2.0);
  world().all_reduce(tensor, ReduceOp::sum, {"t"}).wait();
  expect_close(tensor, constant(3, at::kBFloat16, 256.0 + 2.0 * (world().size() - 1)), "bf16 sum");
}

TEST(Collectives, ShapesAreKept) {
  const at::Tensor tensor = pattern(24, at::kFloat, world().rank()).view({2, 3, 4});
  world().all_reduce(tensor, ReduceOp::sum, {"t"}).wait();
  expect_close(tensor.view({-1}), reduced_pattern(24, at::kFloat, ReduceOp::sum, world().size()), "3-dim");
  // A scalar (0-dim) tensor, as a loss is.
  const at::Tensor scalar = constant(1, at::kFloat, world().rank() + 1.0).reshape({});
  world().all_reduce(scalar, ReduceOp::max, {"t"}).wait();
  EXPECT_EQ(scalar.item<float>(), static_cast<float>(world().size()));
}

TEST(Collectives, ManyMayBeUnderWayAndWaitedForInAnotherOrder) {
  std::vector<at::Tensor> tensors;
  std::vector<mgp::Work> works;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(constant(1000 + i, at::kFloat, i + world().rank()));
    works.push_back(world().all_reduce(tensors.back(), ReduceOp::sum, {fmt::format("tensor {}", i)}));
  }
  const int size = world().size();
  for (int i = 9; i >= 0; --i) {
    const auto index = static_cast<size_t>(i);
    works[index].wait();
    works[index].wait();  // twice is harmless
    expect_close(tensors[index], constant(1000 + i, at::kFloat, i * size + size * (size - 1) / 2.0), "overlapping");
    EXPECT_TRUE(works[index].began().valid());
    EXPECT_TRUE(works[index].ended().valid());
    EXPECT_GE(mgp::Moment::milliseconds(works[index].began(), works[index].ended()), 0.0);
  }
}

TEST(Collectives, ProgressMovesWhatWasStarted) {
  const at::Tensor tensor = constant(100000, at::kFloat, 1.0);
  mgp::Work work = world().all_reduce(tensor, ReduceOp::sum, {"t"});
  for (int i = 0; i < 1000000 && !work.done(); ++i) world().progress();
  EXPECT_TRUE(work.done());
  work.wait();
  expect_close(tensor, constant(100000, at::kFloat, world().size()), "progress");
}

TEST(Collectives, AWorkMayBeForgotten) {
  // The communicator keeps the tensor alive; the next call on the same ranks finds everything in order.
  for (int i = 0; i < 20; ++i) {
    const mgp::Work forgotten = world().all_reduce(constant(5000, at::kFloat, 1.0), ReduceOp::sum, {"forgotten"});
  }
  check_all_reduce(10, at::kFloat, ReduceOp::sum);
}

TEST(Collectives, AnEmptyWorkIsDone) {
  mgp::Work work;
  EXPECT_FALSE(work.valid());
  EXPECT_TRUE(work.done());
  work.wait();
}

}  // namespace

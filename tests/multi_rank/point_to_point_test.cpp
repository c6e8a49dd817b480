// send and recv: rings in which everybody sends first, order, and sizes that do not match.
#include <fmt/format.h>

#include "common/wire.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

using mgp::ReduceOp;
using namespace mgp_test;

int next_rank() { return (world().rank() + 1) % world().size(); }
int previous_rank() { return (world().rank() + world().size() - 1) % world().size(); }

void expect_ring_arrives(int64_t numel, at::ScalarType type) {
  const at::Tensor out = pattern(numel, type, world().rank());
  const at::Tensor in = constant(numel, type, 99);
  mgp::CommGroup group(world());
  const mgp::Work sent = world().send(out, next_rank(), {"to the next"});
  const mgp::Work received = world().recv(in, previous_rank(), {"from the one before"});
  group.finish().wait();
  expect_close(in, pattern(numel, type, previous_rank()), fmt::format("ring of {} x {}", numel, at::toString(type)));
}

TEST(PointToPoint, RingsOfEveryTypeAndSize) {
  for (const at::ScalarType type : kAllTypes) {
    for (const int64_t numel : {1, 7, 1000}) expect_ring_arrives(numel, type);
  }
}

TEST(PointToPoint, RingOfLongMessages) {
  // Small messages are buffered, so two neighbours that both send first are only found out by long ones: 64 MiB.
  constexpr int64_t kBytes = int64_t{64} << 20;
  const auto options = at::TensorOptions().dtype(at::kByte).device(world().device());
  const at::Tensor out = at::full({kBytes}, world().rank(), options);
  const at::Tensor in = at::full({kBytes}, 99, options);
  mgp::CommGroup group(world());
  const mgp::Work sent = world().send(out, next_rank(), {"to the next"});
  const mgp::Work received = world().recv(in, previous_rank(), {"from the one before"});
  group.finish().wait();
  EXPECT_TRUE(at::equal(in, at::full({kBytes}, previous_rank(), options)));
}

TEST(PointToPoint, PiecesArriveInOrder) {
  mgp::set_mpi_chunk_limit(5);
  expect_ring_arrives(23, at::kLong);
  expect_ring_arrives(5, at::kLong);
  mgp::set_mpi_chunk_limit(0);
}

TEST(PointToPoint, MessagesBetweenTwoRanksArriveInOrder) {
  std::vector<at::Tensor> in;
  mgp::CommGroup group(world());
  for (int i = 0; i < 5; ++i) {
    in.push_back(constant(10, at::kFloat, -1.0));
    const mgp::Work sent = world().send(constant(10, at::kFloat, i), next_rank(), {fmt::format("message {}", i)});
    const mgp::Work received = world().recv(in.back(), previous_rank(), {fmt::format("message {}", i)});
  }
  group.finish().wait();
  for (int i = 0; i < 5; ++i) expect_close(in[static_cast<size_t>(i)], constant(10, at::kFloat, i), "order");
}

TEST(PointToPoint, OneWay) {
  if (world().size() < 2) GTEST_SKIP() << "needs two ranks";
  const at::Tensor tensor = pattern(100, at::kFloat, world().rank());
  if (world().rank() == 0) world().send(tensor, 1, {"one way"}).wait();
  if (world().rank() == 1) {
    world().recv(tensor, 0, {"one way"}).wait();
    expect_close(tensor, pattern(100, at::kFloat, 0), "one way");
  }
  world().barrier("after one way");
}

TEST(PointToPoint, GroupsMixWithCollectives) {
  // A group may hold small collectives too: they become one launch.
  const at::Tensor a = constant(10, at::kFloat, 1.0);
  const at::Tensor b = constant(20, at::kDouble, 2.0);
  mgp::CommGroup group(world());
  mgp::Work first = world().all_reduce(a, ReduceOp::sum, {"a"});
  const mgp::Work second = world().all_reduce(b, ReduceOp::sum, {"b"});
  EXPECT_NE(error_of([&] { first.wait(); }).find("its group is still open"), std::string::npos);
  group.finish().wait();
  expect_close(a, constant(10, at::kFloat, world().size()), "a");
  expect_close(b, constant(20, at::kDouble, 2.0 * world().size()), "b");
}

TEST(PointToPoint, AnEmptyGroupAndAGroupThatIsLeft) {
  {
    mgp::CommGroup group(world());
    group.finish().wait();
  }
  const at::Tensor tensor = constant(10, at::kFloat, 1.0);
  {
    mgp::CommGroup group(world());
    const mgp::Work work = world().all_reduce(tensor, ReduceOp::sum, {"t"});
  }  // ends the group
  world().barrier("after the group");
  expect_close(tensor, constant(10, at::kFloat, world().size()), "left group");
}

TEST(PointToPoint, AShorterMessageIsAnError) {
  // (A longer one is MPI's own error, after which Open MPI's other calls are not to be relied on: not tried here.)
  if (!world().device().is_cpu() || world().size() < 2) GTEST_SKIP() << "MPI tells, with two ranks";
  if (world().rank() == 0) world().send(pattern(5, at::kFloat, 0), 1, {"x"}).wait();
  if (world().rank() == 1) {
    const at::Tensor tensor = constant(7, at::kFloat, 0.0);
    EXPECT_EQ(error_of([&] { world().recv(tensor, 0, {"x"}).wait(); }),
              "world recv 'x' from rank 0 f32[7]: the tensor has room for 7 elements, the message has 5");
  }
  world().barrier("after a wrong size");
}

}  // namespace

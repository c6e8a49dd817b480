// Sub-communicators: who is in which, in which order, and that they do not disturb each other.
#include <fmt/format.h>

#include "common/mesh.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

using mgp::Communicator;
using mgp::ReduceOp;
using namespace mgp_test;

double sum_in(Communicator& group, double value) {
  const at::Tensor tensor = constant(5, at::kDouble, value);
  group.all_reduce(tensor, ReduceOp::sum, {"t"}).wait();
  return tensor.cpu()[0].item<double>();
}

TEST(Split, ByParity) {
  const int rank = world().rank();
  std::optional<Communicator> group = world().split(rank % 2, rank, "parity");
  EXPECT_TRUE(group.has_value());
  if (!group) return;
  std::vector<int> expected;
  double sum = 0.0;
  for (int other = rank % 2; other < world().size(); other += 2) {
    expected.push_back(other);
    sum += other;
  }
  EXPECT_EQ(group->name(), "parity");
  EXPECT_EQ(group->members(), expected);
  EXPECT_EQ(group->size(), static_cast<int>(expected.size()));
  EXPECT_EQ(group->rank(), rank / 2);
  EXPECT_EQ(group->device(), world().device());
  EXPECT_DOUBLE_EQ(sum_in(*group, rank), sum);
  // Parent and child at the same time.
  const at::Tensor a = constant(100, at::kFloat, 1.0);
  const at::Tensor b = constant(100, at::kFloat, 1.0);
  mgp::Work in_world = world().all_reduce(a, ReduceOp::sum, {"a"});
  mgp::Work in_group = group->all_reduce(b, ReduceOp::sum, {"b"});
  in_group.wait();
  in_world.wait();
  expect_close(a, constant(100, at::kFloat, world().size()), "parent");
  expect_close(b, constant(100, at::kFloat, group->size()), "child");
}

TEST(Split, TheKeyOrdersTheRanks) {
  const int last = world().size() - 1;
  std::optional<Communicator> group = world().split(0, last - world().rank(), "reversed");
  EXPECT_TRUE(group.has_value());
  if (!group) return;
  EXPECT_EQ(group->rank(), last - world().rank());
  for (int rank = 0; rank <= last; ++rank) EXPECT_EQ(group->members()[static_cast<size_t>(rank)], last - rank);
  // Rank 0 of the group is the last of the world.
  const at::Tensor tensor = constant(3, at::kInt, world().rank());
  group->broadcast(tensor, 0, {"t"}).wait();
  EXPECT_EQ(tensor.cpu()[0].item<int>(), last);
}

TEST(Split, EqualKeysKeepTheOldOrder) {
  std::optional<Communicator> group = world().split(3, 7, "same");
  EXPECT_TRUE(group.has_value());
  if (group) {
    EXPECT_EQ(group->rank(), world().rank());
  }
}

TEST(Split, ANegativeColorStaysOut) {
  const bool out = world().rank() == world().size() - 1;
  std::optional<Communicator> group = world().split(out ? -1 : 0, 0, "all but the last");
  EXPECT_EQ(group.has_value(), !out);
  if (group) {
    EXPECT_EQ(group->size(), world().size() - 1);
    EXPECT_DOUBLE_EQ(sum_in(*group, 1.0), world().size() - 1.0);
  }
  world().barrier("after staying out");
}

TEST(Split, AGroupCanBeSplitAgain) {
  std::optional<Communicator> all = world().split(0, 0, "all");
  EXPECT_TRUE(all.has_value());
  if (!all) return;
  std::optional<Communicator> alone = all->split(all->rank(), 0, "alone");
  EXPECT_TRUE(alone.has_value());
  if (!alone) return;
  EXPECT_EQ(alone->size(), 1);
  EXPECT_EQ(alone->members(), std::vector<int>{world().rank()});
  EXPECT_DOUBLE_EQ(sum_in(*alone, world().rank()), world().rank());
}

TEST(Split, MeshGroups) {
  for (int columns = 1; columns <= world().size(); ++columns) {
    if (world().size() % columns != 0) continue;
    const mgp::Mesh2D mesh = mgp::make_mesh(world().size(), columns, "--tp");
    mgp::MeshGroups groups = mgp::split_mesh(world(), mesh, "tp", "dp");
    EXPECT_EQ(groups.row.name(), "tp");
    EXPECT_EQ(groups.column.name(), "dp");
    EXPECT_EQ(groups.row.members(), mesh.row_ranks(mesh.row_of(world().rank())));
    EXPECT_EQ(groups.column.members(), mesh.column_ranks(mesh.column_of(world().rank())));
    // A sum over rows, then over columns, is the sum over all.
    const double all = world().size() * (world().size() - 1) / 2.0;
    EXPECT_DOUBLE_EQ(sum_in(groups.column, sum_in(groups.row, world().rank())), all);
  }
}

TEST(Split, TextOfASubgroupStaysInIt) {
  const int rank = world().rank();
  std::optional<Communicator> group = world().split(rank % 2, rank, "parity");
  if (!group) return;
  const std::vector<std::string> texts = group->gather_text("names", fmt::format("rank {}", rank));
  EXPECT_EQ(texts.size(), static_cast<size_t>(group->size()));
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], fmt::format("rank {}", group->members()[i]));
}

}  // namespace

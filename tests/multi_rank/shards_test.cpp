// Pieces of tensors, norms over them, and units of both kinds, with numbers that can be done by hand.
#include "common/shards.hpp"

#include <ATen/core/grad_mode.h>

#include "common/model.hpp"
#include "common/optimizer.hpp"
#include "examples/fsdp/flat_unit.hpp"
#include "examples/fsdp2/dim0_unit.hpp"
#include "tests/multi_rank/world.hpp"

namespace mgp {
namespace {

using mgp_test::world;

at::TensorOptions options() { return at::TensorOptions().dtype(at::kDouble).device(world().device()); }

TEST(Shards, TheNormIsThatOfAllPieces) {
  // Trial B19: 3 on rank 0, 4 on rank 1, nothing elsewhere; a clip to 1 leaves 0.6 and 0.8.
  const int rank = world().rank();
  std::vector<at::Tensor> gradients;
  if (rank < 2) gradients.push_back(at::full({1}, rank == 0 ? 3.0 : 4.0, options()));
  const double expected = world().size() == 1 ? 3.0 : 5.0;
  const at::Tensor norm = sharded_gradient_norm(gradients, world());
  EXPECT_NEAR(norm.item<double>(), expected, 1e-12);
  clip_gradients(gradients, norm, 1.0);
  if (rank < 2) {
    EXPECT_NEAR(gradients[0].item<double>(), (rank == 0 ? 3.0 : 4.0) / expected, 1e-6);
  }
}

TEST(Shards, WholeTensorsComeTogetherOnRankZero) {
  const int ranks = world().size();
  const int rank = world().rank();
  // "even" is cut into ranges of 7 elements and what is left; "last" lies on the last rank alone.
  const std::vector<ParameterShape> shapes = {{"even", {ranks * 7 - 3, 1}}, {"last", {2, 2}}};
  std::vector<Piece> mine = {{shapes[0], rank * 7, rank + 1 == ranks ? 4 : 7}};
  NamedTensors local = {{"even", at::arange(rank * 7, rank * 7 + mine[0].count, options())}};
  if (rank + 1 == ranks) {
    mine.insert(mine.begin(), {shapes[1], 0, 4});
    local.insert(local.begin(), {"last", at::arange(100, 104, options()).view({2, 2})});
  }
  ShardLayout layout(shapes, mine, at::kDouble, world());
  const NamedTensors whole = layout.gather(local);
  ASSERT_EQ(whole.size(), rank == 0 ? 2U : 0U);
  if (rank == 0) {
    const auto cpu = at::TensorOptions().dtype(at::kDouble);
    EXPECT_TRUE(at::equal(whole[0].second, at::arange(ranks * 7 - 3, cpu).view({-1, 1})));
    EXPECT_TRUE(at::equal(whole[1].second, at::arange(100, 104, cpu).view({2, 2})));
  }
  const at::Tensor all = at::arange(ranks * 7 - 3, options()).view({-1, 1});
  EXPECT_TRUE(at::equal(layout.cut(mine.size() - 1, all), local.back().second));
}

TEST(Shards, AnElementThatNobodyHoldsIsFound) {
  const ParameterShape shape{"x", {world().size() + 1}};
  EXPECT_THROW(ShardLayout({shape}, {{shape, world().rank(), 1}}, at::kDouble, world()), std::exception);
}

TEST(Shards, RowsAreCutAsTorchChunkCuts) {
  for (const int64_t rows : {1, 2, 5, 9, 10, 32000}) {
    for (const int64_t ranks : {1, 2, 3, 4, 7}) {
      const std::vector<at::Tensor> chunks = at::arange(rows).chunk(ranks);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const RowRange block = row_range(rows, rank, ranks);
        const bool there = rank < static_cast<int64_t>(chunks.size());
        EXPECT_EQ(block.count, there ? chunks[static_cast<size_t>(rank)].size(0) : 0) << rows << " on " << ranks;
        if (there) {
          EXPECT_EQ(block.first, chunks[static_cast<size_t>(rank)][0].item<int64_t>());
        }
      }
    }
  }
}

/// A unit of three parameters that divide by nothing.
UnitParameters small_unit() {
  UnitParameters unit{"layer 0", {{"a.weight", {5, 3}}, {"a.bias", {7}}, {"norm.weight", {1}}}, {}};
  for (const ParameterShape& shape : unit.shapes) {
    unit.tensors.push_back(at::empty(shape.shape, at::kDouble).set_requires_grad(true));
  }
  return unit;
}

std::unique_ptr<Unit> make_unit(bool flat, const UnitParameters& parameters) {
  if (flat) {
    return std::make_unique<FlatUnit>(parameters, world(), ShardStrategy::full, at::kDouble, at::kDouble, 7);
  }
  return std::make_unique<Dim0Unit>(parameters, world(), nullptr, at::kDouble, at::kDouble, 7);
}

TEST(Shards, AUnitIsGatheredFreedAndReduced) {
  for (const bool flat : {true, false}) {
    const UnitParameters parameters = small_unit();
    const std::unique_ptr<Unit> unit = make_unit(flat, parameters);
    const int ranks = world().size();
    int64_t held = 0;
    for (const Piece& piece : unit->pieces()) held += piece.count;
    at::Tensor all = at::full({1}, static_cast<double>(held), options());
    world().all_reduce(all, ReduceOp::sum, {"held"}).wait();
    EXPECT_EQ(all.item<double>(), 5 * 3 + 7 + 1) << "no element twice, none missing, no padding";

    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(parameters.tensors[0].storage().nbytes(), 0U);
      unit->start_gather();
      unit->finish_gather();
      for (size_t p = 0; p < parameters.shapes.size(); ++p) {
        const ParameterShape& shape = parameters.shapes[p];
        const at::Tensor expected = initial_value(shape, 7, 0, shape.numel()).view(shape.shape).to(world().device());
        EXPECT_TRUE(at::equal(parameters.tensors[p].detach(), expected)) << shape.name;
      }
      // Autograd saves the weight; the unit is freed and comes back at the same place before backward.
      const at::Tensor x = at::ones({2, 3}, options()).set_requires_grad(true);
      const at::Tensor y = at::linear(x, parameters.tensors[0]);  // [2, 5]
      unit->free();
      unit->start_gather();
      unit->finish_gather();
      (y.sum() * (world().rank() + 1.0)).backward();
      const at::Tensor weight = parameters.tensors[0].detach();
      EXPECT_TRUE(at::allclose(x.grad(), weight.sum(0).expand({2, 3}) * (world().rank() + 1.0)));
      unit->start_reduce();
      EXPECT_FALSE(parameters.tensors[0].grad().defined());
      unit->free();
      unit->finish_reduce();
      for (size_t i = 0; i < unit->shards().size(); ++i) {
        const auto& [name, shard] = unit->shards()[i];
        // Two rows of ones on each rank, times its number: 2 (1 + ... + n). The others got no gradient.
        const double expected = name == "a.weight" ? ranks * (ranks + 1.0) : 0.0;
        EXPECT_TRUE(at::equal(shard.grad(), at::full_like(shard, expected))) << name;
      }
    }
  }
}

}  // namespace
}  // namespace mgp

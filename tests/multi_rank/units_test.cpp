// Units as the runner drives them: a parameter that is used twice, frozen ones, and gradients summed over ranks, against
// the same computation in one piece on every rank.
#include <algorithm>
#include <memory>

#include "common/model.hpp"
#include "examples/fsdp/flat_unit.hpp"
#include "examples/fsdp/unit_runner.hpp"
#include "examples/fsdp2/dim0_unit.hpp"
#include "tests/multi_rank/world.hpp"

namespace mgp {
namespace {

using mgp_test::world;

constexpr uint64_t kSeed = 7;

at::TensorOptions options() { return at::TensorOptions().dtype(at::kDouble).device(world().device()); }

/// Unit "a" lifts, "b" uses its matrix twice and has a bias, "c" lowers; rows that divide by nothing.
const std::vector<std::vector<ParameterShape>> kShapes = {
    {{"a.weight", {5, 3}}}, {{"b.weight", {5, 5}}, {"b.bias", {5}}}, {{"c.weight", {2, 5}}}};

struct Net {
  std::vector<std::vector<at::Tensor>> units;  // leaves, in the order of kShapes

  at::Tensor a(const at::Tensor& x) const { return x.matmul(units[0][0].t()).tanh(); }  // [2, 3] -> [2, 5]
  at::Tensor b(const at::Tensor& x) const {                                             // tied: the same weight twice
    return (x.matmul(units[1][0].t()) + units[1][1]).tanh().matmul(units[1][0]).tanh();
  }
  at::Tensor c(const at::Tensor& x) const { return x.matmul(units[2][0].t()).sum(); }
};

Net make_net(const std::vector<std::string>& frozen) {
  Net net;
  for (const auto& unit : kShapes) {
    net.units.emplace_back();
    for (const ParameterShape& shape : unit) {
      const bool trains = std::find(frozen.begin(), frozen.end(), shape.name) == frozen.end();
      at::Tensor leaf = initial_value(shape, kSeed, 0, shape.numel()).view(shape.shape).to(options());
      if (shape.name == "b.bias") leaf.fill_(0.25);
      net.units.back().push_back(leaf.set_requires_grad(trains));
    }
  }
  return net;
}

/// Rank `rank`'s rows of step `step`, [2, 3].
at::Tensor rows_of(int rank, int step) {
  return at::arange(6, options()).view({2, 3}).mul(0.1 * (rank + 1)).add(0.3 * step).sin();
}

using MakeUnit = std::unique_ptr<Unit> (*)(UnitParameters);

std::unique_ptr<Unit> flat(UnitParameters parameters) {
  return std::make_unique<FlatUnit>(std::move(parameters), world(), ShardStrategy::full, at::kDouble, at::kDouble,
                                    kSeed);
}
std::unique_ptr<Unit> by_rows(UnitParameters parameters) {
  return std::make_unique<Dim0Unit>(std::move(parameters), world(), nullptr, at::kDouble, at::kDouble, kSeed);
}

void expect_whole_gradients(MakeUnit make, const std::vector<std::string>& frozen) {
  // In one piece: the rows of all ranks, and gradients that add up.
  const Net whole = make_net(frozen);
  for (int rank = 0; rank < world().size(); ++rank) whole.c(whole.b(whole.a(rows_of(rank, 1)))).backward();

  Net net = make_net(frozen);
  std::vector<std::unique_ptr<Unit>> units;
  for (size_t u = 0; u < kShapes.size(); ++u)
    units.push_back(make({std::string(1, "abc"[u]), kShapes[u], net.units[u]}));
  for (const auto& unit : units) {  // initial_value() makes biases 0, and a gradient of 0 would show little
    for (const auto& [name, shard] : unit->shards()) {
      if (name == "b.bias") shard.fill_(0.25);
    }
  }
  UnitRunner runner(std::move(units), ShardStrategy::full, /*max_inflight=*/2, world());
  for (int step = 0; step < 2; ++step) {  // the second time in memory that has been used
    runner.begin_step();
    runner.begin_microbatch(/*last=*/true);
    at::Tensor x = runner.forward(
        0, [&](const at::Tensor& in) { return net.a(in); }, rows_of(world().rank(), step));
    x = runner.forward(
        1, [&](const at::Tensor& in) { return net.b(in); }, x);
    x = runner.forward(
        2, [&](const at::Tensor& in) { return net.c(in); }, x);
    x.backward();
    runner.end_microbatch();
  }
  for (size_t u = 0; u < kShapes.size(); ++u) {
    const Unit& unit = *runner.units()[u];
    for (size_t i = 0; i < unit.pieces().size(); ++i) {
      const Piece& piece = unit.pieces()[i];
      size_t p = 0;
      while (kShapes[u][p].name != piece.of.name) ++p;
      const at::Tensor& expected = whole.units[u][p].grad();
      const at::Tensor& mine = unit.shards()[i].second.grad();
      ASSERT_EQ(expected.defined(), mine.defined()) << piece.of.name;
      if (!expected.defined()) continue;
      EXPECT_GT(expected.abs().max().item<double>(), 1e-3) << piece.of.name;  // else the comparison says nothing
      EXPECT_TRUE(at::allclose(mine.flatten(), expected.flatten().narrow(0, piece.first, piece.count), 1e-12, 1e-12))
          << piece.of.name;
    }
    for (const at::Tensor& parameter : unit.parameters()) {
      EXPECT_EQ(parameter.storage().nbytes(), 0U) << unit.name();  // nothing stays whole
    }
  }
}

TEST(Units, ATiedParameterGetsBothGradients) {
  for (const MakeUnit make : {flat, by_rows}) expect_whole_gradients(make, {});
}

TEST(Units, FrozenUnitsAreGatheredAndNotReduced) {
  const std::vector<std::vector<std::string>> cases = {
      {"a.weight"}, {"b.weight", "b.bias"}, {"c.weight"}, {"a.weight", "b.weight", "b.bias"}};
  for (const std::vector<std::string>& frozen : cases) {
    for (const MakeUnit make : {flat, by_rows}) {
      SCOPED_TRACE(frozen.front());
      const int64_t before = world().ledger().total("reduce_scatter", Purpose::training).payload_bytes;
      expect_whole_gradients(make, frozen);
      int64_t padded = 0;  // of what is trained
      for (const auto& unit : kShapes) {
        if (std::find(frozen.begin(), frozen.end(), unit.front().name) != frozen.end()) continue;
        padded +=
            make == flat ? FlatUnit::padded_numel(unit, world().size()) : Dim0Unit::padded_numel(unit, world().size());
      }
      EXPECT_EQ(world().ledger().total("reduce_scatter", Purpose::training).payload_bytes - before,
                2 * padded * 8);  // two steps of doubles
    }
  }
}

TEST(Units, AFrozenParameterBesideATrainedOne) {  // rows alone: a flat unit has one gradient
  for (const char* frozen : {"b.weight", "b.bias"}) {
    SCOPED_TRACE(frozen);
    expect_whole_gradients(by_rows, {frozen});
  }
}

TEST(Units, ATieAcrossUnitsIsRefused) {
  Net net = make_net({});
  std::vector<std::unique_ptr<Unit>> units;
  units.push_back(by_rows({"a", kShapes[0], net.units[0]}));
  units.push_back(by_rows({"b", {kShapes[1][0], kShapes[0][0]}, {net.units[1][0], net.units[0][0]}}));
  try {
    const UnitRunner runner(std::move(units), ShardStrategy::full, 2, world());
    FAIL() << "two units with one parameter were taken";
  } catch (const RunError& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 34), "units a and b share a parameter: o") << error.what();
  }
}

}  // namespace
}  // namespace mgp

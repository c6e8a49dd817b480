// f and g, layers that are cut over ranks, pieces of blocks, and the norm, with numbers that can be done by hand.
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "common/sharded_rows.hpp"
#include "examples/tensor_parallel/collective_functions.hpp"
#include "examples/tensor_parallel/parallel_model.hpp"
#include "tests/multi_rank/world.hpp"

namespace mgp {
namespace {

using mgp_test::error_of;
using mgp_test::world;

at::TensorOptions options() { return at::TensorOptions().dtype(at::kDouble).device(world().device()); }
TensorParallel tp() { return {&world(), at::kDouble}; }

/// 0 + 1 + ... + (ranks - 1).
double sum_of_ranks() { return world().size() * (world().size() - 1) / 2.0; }

TEST(TensorParallel, FCopiesForwardAndSumsBackward) {
  const at::Tensor x = at::arange(6, options()).view({2, 3}).set_requires_grad(true);
  const at::Tensor y = copy_to_ranks(x, world(), "x");
  EXPECT_TRUE(at::equal(y, x));
  (y * static_cast<double>(world().rank())).sum().backward();  // each rank asks for another change
  EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, sum_of_ranks(), options())));
}

TEST(TensorParallel, GSumsForwardAndCopiesBackward) {
  const at::Tensor x = at::ones({2, 3}, options()).set_requires_grad(true);
  const at::Tensor y = sum_over_ranks(x * static_cast<double>(world().rank()), world(), "x");
  EXPECT_TRUE(at::equal(y, at::full({2, 3}, sum_of_ranks(), options())));
  (y * 5.0).sum().backward();
  // 5 through g as it is, times this rank's factor; a sum here would count each gradient once a rank.
  EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, 5.0 * world().rank(), options())));
}

TEST(TensorParallel, TheRowParallelBiasIsAddedOnce) {
  // Trial B38: weights 0, bias (1, 2, 3); a bias on every rank would give (n, 2n, 3n).
  RowParallelLinear layer(/*mine=*/2, /*out=*/3, options(), tp(), "fc2");
  const at::NoGradGuard no_grad;
  layer.weight.zero_();
  layer.bias.copy_(at::arange(1, 4, options()));
  EXPECT_TRUE(at::equal(layer.forward(at::ones({1, 2}, options())), at::arange(1, 4, options()).view({1, 3})));
}

TEST(TensorParallel, ReplicatedGradientsCountOnceInTheNorm) {
  // Trial B20: parts 3 on rank 0 and 4 on rank 1, a replica 12: 13 (with the replica once a rank: 17.69 on two ranks).
  const int rank = world().rank();
  std::vector<at::Tensor> parts;
  if (rank < 2) parts.push_back(at::full({1}, rank == 0 ? 3.0 : 4.0, options()));
  const std::vector<at::Tensor> replicas = {at::full({1}, 12.0, options())};
  const double expected = world().size() == 1 ? std::sqrt(153.0) : 13.0;
  EXPECT_NEAR(parallel_gradient_norm(parts, replicas, world()).item<double>(), expected, 1e-12);
  EXPECT_NEAR(parallel_gradient_norm({}, replicas, world()).item<double>(), 12.0, 1e-12);
}

/// A model whose sizes divide by nothing.
ModelConfig uneven(ModelKind kind) {
  ModelConfig config = preset_config("tiny", kind);
  config.layers = 2;
  config.dim = 20;
  config.heads = 5;
  config.mlp_dim = 13;
  config.vocab_size = 11;
  config.seq_len = 6;
  config.classes = 3;
  return config;
}

TEST(TensorParallel, ThePartsTogetherAreTheWholeModel) {
  for (const ModelKind kind : {ModelKind::mlp, ModelKind::classifier}) {
    const ModelConfig config = uneven(kind);
    const Model model = make_parallel_model(config, /*seed=*/7, world().device(), at::kDouble, tp());
    const std::vector<Piece> pieces = parallel_pieces(config, world().rank(), world().size());
    ShardLayout layout(parameter_shapes(config), pieces, at::kDouble, world());
    const NamedTensors local = named_parameters(*model);
    const NamedTensors gathered = layout.gather(local);
    const Model whole = make_model(config, /*seed=*/7, at::kCPU, at::kDouble);
    const NamedTensors expected = named_parameters(*whole);
    for (size_t i = 0; i < gathered.size(); ++i) {
      EXPECT_EQ(gathered[i].first, expected[i].first);
      EXPECT_TRUE(at::equal(gathered[i].second, expected[i].second)) << gathered[i].first;
    }
    for (size_t i = 0; i < pieces.size(); ++i) {  // and back
      const at::Tensor part = layout.cut(i, expected[i].second).view(local[i].second.sizes());
      EXPECT_TRUE(at::equal(part, local[i].second.detach().cpu())) << local[i].first;
    }
  }
}

TEST(TensorParallel, LogitsAndGradientsAreThoseOfTheWholeModel) {
  for (const ModelKind kind : {ModelKind::mlp, ModelKind::classifier}) {
    for (const bool checkpointing : {false, true}) {
      ModelConfig config = uneven(kind);
      config.checkpoint_activations = checkpointing;
      const Model model = make_parallel_model(config, /*seed=*/7, world().device(), at::kDouble, tp());
      const Model whole = make_model(config, /*seed=*/7, world().device(), at::kDouble);
      const at::Tensor tokens =
          at::arange(3 * config.seq_len, options().dtype(at::kLong)).remainder(config.vocab_size).view({3, -1});
      const at::Tensor logits = model->forward(tokens), expected = whole->forward(tokens);  // [3, classes]
      EXPECT_LT((logits - expected).abs().max().item<double>(), 1e-12);
      logits.square().sum().backward();
      expected.square().sum().backward();
      const std::vector<Piece> pieces = parallel_pieces(config, world().rank(), world().size());
      const NamedTensors mine = named_parameters(*model), theirs = named_parameters(*whole);
      for (size_t i = 0; i < pieces.size(); ++i) {
        const Piece& piece = pieces[i];
        const at::Tensor cut = theirs[i].second.grad().reshape({piece.blocks, -1}).narrow(1, piece.first, piece.count);
        const at::Tensor gradient = mine[i].second.grad().reshape({piece.blocks, -1});
        EXPECT_LT((gradient - cut).abs().max().item<double>(), 1e-11) << piece.of.name;
      }
    }
  }
}

TEST(TensorParallel, SizesThatLeaveARankWithNothingAreRefused) {
  ModelConfig config = uneven(ModelKind::classifier);
  EXPECT_NO_THROW(check_parallel_sizes(config, 5));
  EXPECT_THROW(check_parallel_sizes(config, 6), UsageError);  // 5 heads
  config.kind = ModelKind::mlp;
  EXPECT_NO_THROW(check_parallel_sizes(config, 13));
  EXPECT_THROW(check_parallel_sizes(config, 14), UsageError);
}

TEST(TensorParallel, ColumnsAreNoRowsOfAShardedCheckpoint) {
  const ModelConfig config = uneven(ModelKind::mlp);
  const ShardLayout layout(parameter_shapes(config), parallel_pieces(config, world().rank(), world().size()),
                           at::kDouble, world());
  EXPECT_NE(error_of([&] { ranges_to_save(layout); }).find("fc2.weight"), std::string::npos);
}

}  // namespace
}  // namespace mgp

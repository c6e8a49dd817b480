// Activation checkpointing of single blocks: gradients, and what holds again in the second run.
#include "common/activation_checkpoint.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>

#include "common/error.hpp"
#include "common/precision.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

at::Tensor random_state() { return at::globalContext().defaultGenerator(at::kCPU).get_state().clone(); }

/// y = tanh(x W^T), and what a test wants to know about its runs.
struct Probe {
  at::Tensor weight = at::linspace(-1, 1, 16).view({4, 4}).set_requires_grad(true);
  int runs = 0;
  int throw_in_run = 0;
  std::vector<at::ScalarType> dtypes;  ///< of the matmul in each run: what autocast made of it
  bool input_needs_gradient = false;   ///< in the last run

  Block block() {
    return [this](const at::Tensor& x) {
      const at::Tensor product = at::linear(x, weight);  // [.., 4] -> [.., 4]
      dtypes.push_back(product.scalar_type());
      input_needs_gradient = x.requires_grad();
      if (++runs == throw_in_run) throw std::out_of_range("planned");
      return at::tanh(product);
    };
  }
  at::Tensor take_gradient() {
    const at::Tensor gradient = weight.grad();
    weight.mutable_grad() = at::Tensor();
    return gradient;
  }
};

const at::Tensor kData = at::linspace(-2, 2, 12).view({3, 4});

TEST(Checkpointing, ParametersTrainThoughTheInputIsDataThatNeedsNoGradient) {
  Probe probe;
  probe.block()(kData).sum().backward();
  const at::Tensor expected = probe.take_gradient();
  const at::Tensor x = kData.clone();
  checkpointed(probe.block(), x, false).sum().backward();
  EXPECT_TRUE(at::equal(probe.take_gradient(), expected));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_FALSE(probe.input_needs_gradient);  // so nothing is computed for it
  // Nor may the input be of a type that could have a gradient.
  const at::Tensor tokens = at::tensor({3, 0, 3}, at::kLong);
  const auto look_up = [&probe](const at::Tensor& index) { return at::embedding(probe.weight, index); };
  checkpointed(look_up, tokens, false).sum().backward();
  EXPECT_TRUE(at::equal(probe.take_gradient().sum(1), at::tensor({4.0F, 0.0F, 0.0F, 8.0F})));
}

TEST(Checkpointing, AnInputAloneGetsItsGradientThroughFrozenParameters) {
  Probe probe;
  probe.weight.set_requires_grad(false);
  const at::Tensor x = kData.clone().set_requires_grad(true);
  probe.block()(x).sum().backward();
  const at::Tensor expected = x.grad();
  x.mutable_grad() = at::Tensor();
  checkpointed(probe.block(), x, false).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), expected));
  EXPECT_FALSE(probe.weight.grad().defined());
  checkpointed(probe.block(), kData, false).sum().backward();  // nothing needs a gradient: nothing happens
  EXPECT_FALSE(probe.weight.grad().defined());
}

TEST(Checkpointing, AnOutputThatIsUsedTwiceRunsAgainOnce) {
  Probe probe;
  const auto use_twice = [](const at::Tensor& y) { return (y * y).sum() + y.exp().sum(); };
  const at::Tensor x = kData.clone().set_requires_grad(true);
  use_twice(probe.block()(x)).backward();
  const at::Tensor expected = probe.take_gradient(), expected_x = x.grad();
  x.mutable_grad() = at::Tensor();
  probe.runs = 0;
  use_twice(checkpointed(probe.block(), x, false)).backward();
  EXPECT_EQ(probe.runs, 2);
  EXPECT_TRUE(at::equal(probe.take_gradient(), expected));
  EXPECT_TRUE(at::equal(x.grad(), expected_x));
}

TEST(Checkpointing, ABlockMayHoldCheckpointedBlocks) {
  Probe probe;
  const auto twice = [&probe](const at::Tensor& x) { return probe.block()(probe.block()(x)); };
  twice(kData).sum().backward();
  const at::Tensor expected = probe.take_gradient();
  const auto inner = [&probe](const at::Tensor& x) {
    return checkpointed(probe.block(), checkpointed(probe.block(), x, false), false);
  };
  checkpointed(inner, kData, false).sum().backward();
  EXPECT_TRUE(at::equal(probe.take_gradient(), expected));
}

TEST(Checkpointing, ASecondBackwardNeedsTheGraphToBeKept) {
  Probe probe;
  const at::Tensor x = kData.clone().set_requires_grad(true);
  const at::Tensor loss = checkpointed(probe.block(), x, false).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = probe.weight.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(probe.weight.grad(), 2 * once));
  EXPECT_EQ(probe.runs, 3);
  try {
    loss.backward();
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_TRUE(contains(error.what(), {"backward through the graph a second time"}));
  }
  EXPECT_EQ(probe.runs, 3);
}

TEST(Checkpointing, RefusesWhatANestedBackwardCannotGive) {
  Probe probe;
  const at::Tensor x = kData.clone().set_requires_grad(true);
  const auto error_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const RunError& error) {
      return error.what();
    }
    return "";
  };
  const at::Tensor loss = checkpointed(probe.block(), x, false).sum();
  EXPECT_TRUE(
      contains(error_of([&] { torch::autograd::grad({loss}, {x}); }), {"torch::autograd::grad", "use backward()"}));
  const at::Tensor other = checkpointed(probe.block(), x, false).sum();
  const auto with_create_graph = [&] { torch::autograd::grad({other}, {x}, {}, true, /*create_graph=*/true); };
  EXPECT_TRUE(contains(error_of(with_create_graph), {"create_graph"}));
  EXPECT_FALSE(probe.weight.grad().defined());
}

TEST(Checkpointing, AnInputThatWasWrittenToIsFound) {
  Probe probe;
  const at::Tensor x = kData * kData.clone().set_requires_grad(true);
  const at::Tensor loss = checkpointed(probe.block(), x, false).sum();
  x.detach().add_(1);
  try {
    loss.backward();
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_TRUE(contains(error.what(), {"modified by an inplace operation"}));
  }
}

// ── what holds again in the second run ──────────────────────────────────────────────────────────────────────────────

using Dtypes = std::vector<at::ScalarType>;

TEST(Checkpointing, TheSecondRunHasTheAutocastOfForward) {
  Probe probe;
  const at::Tensor x = kData.clone().set_requires_grad(true);
  at::Tensor loss;
  {
    const Autocast autocast(at::kCPU, Precision::bf16);
    loss = checkpointed(probe.block(), x, false).sum();
  }
  // As on a GPU, where backward runs on a thread whose dtype nobody has set.
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  loss.backward();
  EXPECT_EQ(probe.dtypes, (Dtypes{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);

  // The other way round: no autocast in forward, so none in the second run, wherever backward is called.
  probe.dtypes.clear();
  loss = checkpointed(probe.block(), x, false).sum();
  const Autocast autocast(at::kCPU, Precision::bf16);
  loss.backward();
  EXPECT_EQ(probe.dtypes, (Dtypes{at::kFloat, at::kFloat}));
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Checkpointing, CastsOfForwardReachNobodyElse) {
  // Older versions of LibTorch would find forward's copy of the weight in the cache of casts. That copy has no graph,
  // so the weight would get no gradient from the plain use and from the second run.
  Probe probe;
  const auto loss_of = [&](const std::function<at::Tensor(const at::Tensor&)>& run) {
    return run(kData).sum() + at::linear(kData, probe.weight).sum();
  };
  for (const bool backward_inside : {false, true}) {
    at::Tensor gradients[2];
    for (const bool checkpoint : {false, true}) {
      at::Tensor loss;
      {
        const Autocast autocast(at::kCPU, Precision::bf16);
        loss = loss_of(
            [&](const at::Tensor& x) { return checkpoint ? checkpointed(probe.block(), x, false) : probe.block()(x); });
        if (backward_inside) loss.backward();
      }
      if (!backward_inside) loss.backward();
      gradients[checkpoint ? 1 : 0] = probe.take_gradient();
    }
    ASSERT_TRUE(gradients[1].defined());
    // Two casts instead of one: the two parts are added in fp32 instead of bf16.
    EXPECT_TRUE(at::allclose(gradients[1], gradients[0], /*rtol=*/0.02, /*atol=*/0.02)) << gradients[1] << gradients[0];
  }
}

TEST(Checkpointing, DropoutDrawsTheSameNumbersAndTheGeneratorGoesOn) {
  Probe probe;
  std::vector<at::Tensor> seen;
  const auto block = [&](const at::Tensor& x) {
    seen.push_back(at::dropout(probe.weight.detach(), 0.5, /*train=*/true));
    return at::linear(at::dropout(x, 0.5, /*train=*/true), probe.weight);
  };
  at::manual_seed(3);
  const at::Tensor loss = checkpointed(block, kData, /*draws_random_numbers=*/true).sum();
  at::rand({5});  // others draw in between
  const at::Tensor before = random_state();
  loss.backward();
  EXPECT_TRUE(at::equal(random_state(), before));
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_TRUE(at::equal(seen[0], seen[1]));
  const at::Tensor gradient = probe.take_gradient();

  at::manual_seed(3);
  block(kData).sum().backward();
  EXPECT_TRUE(at::equal(probe.take_gradient(), gradient));
}

TEST(Checkpointing, TheGeneratorIsLeftAloneWhenTheBlockDrawsNothing) {
  // Seen from a block that does draw, against its word: other numbers in the second run, and they stay drawn.
  std::vector<at::Tensor> seen;
  const auto block = [&seen](const at::Tensor& x) {
    seen.push_back(at::rand({8}));
    return x * 2;
  };
  at::manual_seed(3);
  checkpointed(block, kData.clone().set_requires_grad(true), /*draws_random_numbers=*/false).sum().backward();
  const at::Tensor next = at::rand({8});
  at::manual_seed(3);
  ASSERT_EQ(seen.size(), 2U);
  for (const at::Tensor& numbers : {seen[0], seen[1], next}) EXPECT_TRUE(at::equal(numbers, at::rand({8})));
}

TEST(Checkpointing, AnExceptionInTheSecondRunComesThroughAndLeavesNoTrace) {
  Probe probe;
  probe.throw_in_run = 2;
  const auto block = [&](const at::Tensor& x) { return probe.block()(at::dropout(x, 0.5, /*train=*/true)); };
  const at::Tensor x = kData.clone().set_requires_grad(true);
  at::Tensor loss;
  {
    const Autocast autocast(at::kCPU, Precision::bf16);
    loss = checkpointed(block, x, /*draws_random_numbers=*/true).sum();
  }
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  const at::Tensor before = random_state();
  EXPECT_THROW(loss.backward(), std::out_of_range);
  EXPECT_EQ(probe.dtypes, (Dtypes{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_TRUE(at::equal(random_state(), before));
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);

  probe.throw_in_run = 3;  // in forward
  EXPECT_THROW(checkpointed(block, x, false), std::out_of_range);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

}  // namespace
}  // namespace mgp

// --weights low: bf16 weights for the model, fp32 masters for the optimizer, fp32 gradients in between.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/model.hpp"
#include "common/optimizer.hpp"

namespace mgp {
namespace {

ModelConfig small() {
  ModelConfig config = preset_config("tiny", ModelKind::classifier);
  config.layers = 2;
  return config;
}

TEST(LowWeights, TheModelGetsNewMemoryAndTheMastersKeepTheOld) {
  Model model = make_model(small(), 7, at::kCPU, at::kFloat);
  const NamedTensors before = copies_on_cpu(named_parameters(*model));
  const void* const memory = named_parameters(*model).front().second.data_ptr();
  const NamedTensors masters = lower_weights(*model, at::kBFloat16);
  const NamedTensors after = named_parameters(*model);
  ASSERT_EQ(masters.size(), after.size());
  EXPECT_EQ(masters.front().second.data_ptr(), memory);
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(masters[i].first, after[i].first);
    EXPECT_TRUE(at::equal(masters[i].second, before[i].second));
    EXPECT_FALSE(masters[i].second.requires_grad());
    EXPECT_TRUE(after[i].second.requires_grad());
    EXPECT_TRUE(at::equal(after[i].second.detach(), before[i].second.to(at::kBFloat16)));
  }
}

TEST(LowWeights, NothingHappensInTheSameDtype) {
  Model model = make_model(small(), 7, at::kCPU, at::kFloat);
  const NamedTensors masters = lower_weights(*model, at::kFloat);
  for (size_t i = 0; i < masters.size(); ++i) {
    EXPECT_TRUE(masters[i].second.is_same(named_parameters(*model)[i].second));
  }
  AdamW optimizer(named_parameters(*model), masters, {});
  EXPECT_TRUE(optimizer.masters().front().second.is_same(optimizer.parameters().front().second));
}

TEST(LowWeights, SmallUpdatesAddUpInTheMasters) {
  // 100 steps of 1e-3 x 0.1 around 1: far below bf16's spacing there (1/128), which alone would never move.
  const at::Tensor master = at::ones({4});
  at::Tensor weight = at::ones({4}, at::kBFloat16).set_requires_grad(true);
  at::Tensor reference = at::ones({4}).set_requires_grad(true);
  AdamW low({{"norm.weight", weight}}, {{"norm.weight", master}}, {});
  AdamW exact({{"norm.weight", reference}}, {});
  for (int step = 0; step < 100; ++step) {
    weight.mutable_grad() = at::ones({4});  // fp32, as widen_gradients or a bucket leaves it
    reference.mutable_grad() = at::ones({4});
    low.step(1e-4);
    exact.step(1e-4);
  }
  EXPECT_TRUE(at::equal(master, reference.detach()));  // the same kernel on the same numbers
  EXPECT_NEAR(master[0].item<double>(), 0.99, 1e-4);
  EXPECT_TRUE(at::equal(weight.detach(), master.to(at::kBFloat16)));
}

TEST(LowWeights, GradientsBecomeFp32AndAddUpThere) {
  const at::Tensor weight = at::ones({3}, at::kBFloat16).set_requires_grad(true);
  const NamedTensors parameters = {{"w", weight}};
  widen_gradients(parameters);  // none yet
  EXPECT_FALSE(weight.grad().defined());
  (weight * 256).sum().backward();
  widen_gradients(parameters);
  ASSERT_EQ(weight.grad().scalar_type(), at::kFloat);
  (weight * 1).sum().backward();  // 257 is no bf16 number
  widen_gradients(parameters);
  ASSERT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(weight.grad()[0].item<double>(), 257.0);
}

TEST(LowWeights, WideningLeavesFp32AndFp64Alone) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor weight = at::ones({3}, type).set_requires_grad(true);
    weight.mutable_grad() = at::ones({3}, type);
    const at::Tensor gradient = weight.grad();
    widen_gradients({{"w", weight}});
    EXPECT_TRUE(weight.grad().is_same(gradient));
  }
}

}  // namespace
}  // namespace mgp

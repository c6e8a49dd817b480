// The loss scale: torch.amp.GradScaler's algorithm, step by step, and its place in a step.
#include "common/loss_scaler.hpp"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/optimizer.hpp"

namespace mgp {
namespace {

constexpr double kInf = INFINITY;

at::Tensor vector(std::initializer_list<double> values, at::ScalarType type = at::kFloat) {
  return at::tensor(std::vector<double>(values), at::kDouble).to(type);
}

/// One step with these gradients; returns found_inf.
double step_with(LossScaler& scaler, const std::vector<at::Tensor>& gradients) {
  scaler.unscale(gradients, nullptr);
  const double found = scaler.found_inf().item<double>();
  scaler.update();
  return found;
}

TEST(LossScaler, DoesNothingWhenOff) {
  LossScaler scaler(false, {}, at::kCPU);
  const at::Tensor loss = vector({3.0});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  const at::Tensor gradient = vector({1.0, kInf});
  scaler.unscale({gradient}, nullptr);
  scaler.update();
  EXPECT_FALSE(scaler.found_inf().defined());
  EXPECT_FALSE(scaler.numbers().defined());
  EXPECT_EQ(gradient[0].item<double>(), 1.0);
  EXPECT_EQ(scaler.current_scale(), 1.0);
}

TEST(LossScaler, HalvesAtOnceAndDoublesAfterGoodSteps) {
  LossScaler scaler(true, {1024.0, 3}, at::kCPU);
  const std::vector<bool> overflow = {false, true, false, false, false, false, true, true, false};
  // Computed by hand: 3 good steps in a row double, one overflow halves and starts the count anew.
  const std::vector<double> after = {1024, 512, 512, 512, 1024, 1024, 512, 256, 256};
  for (size_t i = 0; i < overflow.size(); ++i) {
    EXPECT_EQ(step_with(scaler, {vector({1.0, overflow[i] ? kInf : 2.0})}), overflow[i] ? 1.0 : 0.0);
    EXPECT_EQ(scaler.current_scale(), after[i]) << "after step " << i + 1;
  }
  EXPECT_EQ(scaler.good_steps(), 1);
}

TEST(LossScaler, OneBadElementOfManyTensorsIsFound) {
  for (const double bad : {kInf, -kInf, std::nan("")}) {
    LossScaler scaler(true, {2.0, 100}, at::kCPU);
    std::vector<at::Tensor> gradients;
    for (int i = 0; i < 5; ++i) gradients.push_back(at::ones({1000}));
    gradients[3][777] = bad;
    EXPECT_EQ(step_with(scaler, gradients), 1.0);
    EXPECT_EQ(scaler.current_scale(), 1.0);
  }
}

TEST(LossScaler, ClippingSeesUnscaledGradients) {
  // Trial B17: gradient (3, 4), scale 1024, limit 10. The norm is 5 and nothing is clipped.
  LossScaler scaler(true, {1024.0, 100}, at::kCPU);
  const at::Tensor gradient = vector({3.0 * 1024, 4.0 * 1024});
  scaler.unscale({gradient}, nullptr);
  const at::Tensor norm = gradient_norm({gradient});
  clip_gradients({gradient}, norm, 10.0);
  EXPECT_EQ(norm.item<double>(), 5.0);
  EXPECT_EQ(gradient[0].item<double>(), 3.0);
  EXPECT_EQ(gradient[1].item<double>(), 4.0);
}

TEST(LossScaler, NumbersAreThoseOfTheStep) {
  LossScaler scaler(true, {8.0, 100}, at::kCPU);
  step_with(scaler, {vector({kInf})});
  EXPECT_EQ(scaler.numbers()[0].item<double>(), 8.0);  // the scale that overflowed, not the next one
  EXPECT_EQ(scaler.numbers()[1].item<double>(), 1.0);
  EXPECT_EQ(scaler.current_scale(), 4.0);
}

TEST(LossScaler, ContinuesFromACheckpoint) {
  LossScaler straight(true, {16.0, 3}, at::kCPU), first(true, {16.0, 3}, at::kCPU), second(true, {99.0, 3}, at::kCPU);
  for (LossScaler* scaler : {&straight, &first}) step_with(*scaler, {vector({1.0})});
  second.restore(first.current_scale(), first.good_steps());
  for (int i = 0; i < 2; ++i) {
    step_with(straight, {vector({1.0})});
    step_with(second, {vector({1.0})});
  }
  EXPECT_EQ(straight.current_scale(), 32.0);
  EXPECT_EQ(second.current_scale(), 32.0);
}

TEST(AdamWWithLossScaler, ASkippedStepChangesNothing) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor parameter = vector({1.0, 2.0}, type).set_requires_grad(true);
    AdamW optimizer({{"weight", parameter}}, {});
    const auto step = [&](double gradient, double found_inf) {
      parameter.mutable_grad() = vector({gradient, gradient}, type);
      optimizer.step(0.1, vector({found_inf}).squeeze());
    };
    step(1.0, 0.0);
    const at::Tensor before = parameter.detach().clone();
    const at::Tensor moment = optimizer.exp_avg()[0].second.clone();
    step(kInf, 1.0);
    EXPECT_TRUE(at::equal(parameter.detach(), before));
    EXPECT_TRUE(at::equal(optimizer.exp_avg()[0].second, moment));
    EXPECT_EQ(optimizer.steps()[0].second.item<double>(), 1.0);
    step(1.0, 0.0);
    EXPECT_FALSE(at::equal(parameter.detach(), before));
    EXPECT_EQ(optimizer.steps()[0].second.item<double>(), 2.0);
  }
}

}  // namespace
}  // namespace mgp

// AdamW, clipping and learning rates against closed forms and against LibTorch's own optimizer.
#include "common/optimizer.hpp"

#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/optim/adamw.h>
#if MGP_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

#include <cmath>

#include "common/data.hpp"
#include "common/model.hpp"

namespace mgp {
namespace {

/// The CPU, and a GPU where there is one.
std::vector<at::Device> devices() {
  if (torch::cuda::is_available()) return {at::kCPU, at::Device(at::kCUDA, 0)};
  return {at::kCPU};
}

at::TensorOptions on(at::Device device, at::ScalarType dtype) {
  return at::TensorOptions().device(device).dtype(dtype);
}

at::Tensor leaf(at::Tensor value) { return value.detach().clone().requires_grad_(); }

TEST(AdamW, FirstStepInClosedForm) {
  // Step 1: m / (1 - beta1) = g and v / (1 - beta2) = g^2, so p <- p (1 - lr wd) - lr g / (|g| + eps).
  const at::Tensor matrix = leaf(at::tensor({1.0, -2.0}, at::kDouble).view({1, 2}));
  const at::Tensor bias = leaf(at::tensor({3.0}, at::kDouble));
  const at::Tensor position = leaf(at::full({1, 1}, 4.0, at::kDouble));
  AdamWOptions options;
  options.weight_decay = 0.1;
  AdamW optimizer({{"a.weight", matrix}, {"a.bias", bias}, {"position.weight", position}}, options);
  matrix.mutable_grad() = at::tensor({0.5, -1e-8}, at::kDouble).view({1, 2});
  bias.mutable_grad() = at::tensor({-2.0}, at::kDouble);
  position.mutable_grad() = at::ones({1, 1}, at::kDouble);
  optimizer.step(/*lr=*/0.01);
  EXPECT_NEAR(matrix[0][0].item<double>(), 1.0 * (1 - 0.001) - 0.01 * 0.5 / (0.5 + 1e-8), 1e-14);
  EXPECT_NEAR(matrix[0][1].item<double>(), -2.0 * (1 - 0.001) + 0.01 * 1e-8 / (2e-8), 1e-14);
  EXPECT_NEAR(bias[0].item<double>(), 3.0 + 0.01 * 2.0 / (2.0 + 1e-8), 1e-14);         // no decay
  EXPECT_NEAR(position[0][0].item<double>(), 4.0 - 0.01 * 1.0 / (1.0 + 1e-8), 1e-14);  // no decay
  EXPECT_NEAR(optimizer.exp_avg()[0].second[0][0].item<double>(), 0.1 * 0.5, 1e-15);
  EXPECT_NEAR(optimizer.exp_avg_sq()[1].second[0].item<double>(), 0.001 * 4.0, 1e-15);
  EXPECT_EQ(optimizer.exp_avg()[2].first, "position.weight");
  for (const auto& [name, count] : optimizer.steps()) EXPECT_EQ(count.item<double>(), 1.0) << name;
}

TEST(AdamW, SameAsLibTorchsOwnOverTwentySteps) {
  ModelConfig config = preset_config("tiny", ModelKind::mlp);
  config.layers = 2;
  for (const at::Device device : devices()) {
    const SyntheticTokens data(config, 1, 4, SyntheticTokens::Mode::fresh, device);
    const Model ours = make_model(config, 7, device, at::kDouble);
    const Model theirs = make_model(config, 7, device, at::kDouble);
    AdamW optimizer(named_parameters(*ours), {});
    std::vector<at::Tensor> decayed, plain;
    for (const auto& [name, tensor] : named_parameters(*theirs)) {
      (has_weight_decay(name, tensor.dim()) ? decayed : plain).push_back(tensor);
    }
    const auto settings = [](double weight_decay) {
      return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-3).weight_decay(weight_decay));
    };
    torch::optim::AdamW reference({{decayed, settings(0.01)}, {plain, settings(0.0)}});
    for (int64_t step = 1; step <= 20; ++step) {
      const Batch batch = data.rows(step, {0, 4});
      optimizer.zero_grad();
      reference.zero_grad();
      (cross_entropy_sum(ours->forward(batch.tokens), batch.labels) / 4).backward();
      (cross_entropy_sum(theirs->forward(batch.tokens), batch.labels) / 4).backward();
      optimizer.step(1e-3);
      reference.step();
    }
    const NamedTensors a = named_parameters(*ours), b = named_parameters(*theirs);
    for (size_t i = 0; i < a.size(); ++i) {
      const double difference = (a[i].second - b[i].second).norm().item<double>();
      EXPECT_LE(difference, 1e-9 * std::max(1.0, b[i].second.norm().item<double>())) << a[i].first << " on " << device;
    }
  }
}

TEST(AdamW, AMissingGradientCountsAsZeros) {
  const at::Tensor with_zeros = leaf(at::ones({2, 2})), without = leaf(at::ones({2, 2}));
  AdamW one({{"w", with_zeros}}, {}), other({{"w", without}}, {});
  for (AdamW* optimizer : {&one, &other}) {  // a first step with a gradient, so that there is momentum
    optimizer->parameters()[0].second.mutable_grad() = at::ones({2, 2});
    optimizer->step(0.1);
    optimizer->zero_grad();
    EXPECT_FALSE(optimizer->parameters()[0].second.grad().defined());
  }
  with_zeros.mutable_grad() = at::zeros({2, 2});
  one.step(0.1);
  other.step(0.1);
  EXPECT_TRUE(at::equal(with_zeros, without));
  EXPECT_EQ(other.steps()[0].second.item<double>(), 2.0);
}

TEST(AdamW, StateIsLive) {
  const at::Tensor weight = leaf(at::ones({2, 2}));
  AdamW optimizer({{"w", weight}}, {});
  {
    const at::NoGradGuard no_grad;
    optimizer.exp_avg()[0].second.fill_(1.0);  // what loading a checkpoint does
    optimizer.exp_avg_sq()[0].second.fill_(4.0);
    optimizer.steps()[0].second.fill_(1e6);  // so many steps that the bias corrections are 1
  }
  weight.mutable_grad() = at::zeros({2, 2});
  optimizer.step(0.1);
  const double expected = 1.0 * (1 - 0.1 * 0.01) - 0.1 * 0.9 / std::sqrt(0.999 * 4.0);
  EXPECT_NEAR(weight[0][0].item<double>(), expected, 1e-6);
}

TEST(Clip, NormAndFactorAreGlobal) {
  // Trial B19: gradients 3 and 4, limit 1: norm 5, gradients 0.6 and 0.8.
  const std::vector<at::Tensor> gradients = {at::full({1}, 3.0), at::full({1, 1}, 4.0)};
  const at::Tensor norm = gradient_norm(gradients);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_NEAR(norm.item<double>(), 5.0, 1e-6);
  clip_gradients(gradients, norm, 1.0);
  EXPECT_NEAR(gradients[0].item<double>(), 0.6, 1e-6);
  EXPECT_NEAR(gradients[1].item<double>(), 0.8, 1e-6);
  // Trial B20: 3, 4 and 12 make 13.
  EXPECT_NEAR(gradient_norm({at::full({1}, 3.0), at::full({1}, 4.0), at::full({1}, 12.0)}).item<double>(), 13.0, 1e-5);
}

TEST(Clip, BelowTheLimitNothingChanges) {
  // Trial B17: gradient (3, 4), limit 10: no clipping, norm 5. A limit of 0 switches clipping off.
  for (const double limit : {10.0, 0.0, -1.0}) {
    const std::vector<at::Tensor> gradients = {at::tensor({3.0, 4.0}, at::kFloat)};
    const at::Tensor norm = gradient_norm(gradients);
    clip_gradients(gradients, norm, limit);
    EXPECT_NEAR(norm.item<double>(), 5.0, 1e-6);
    EXPECT_TRUE(at::equal(gradients[0], at::tensor({3.0, 4.0}, at::kFloat)));
  }
}

TEST(Clip, NormIsSummedInFp32OrFp64) {
  EXPECT_EQ(gradient_norm({}).item<double>(), 0.0);
  EXPECT_EQ(gradient_norm({at::ones({0})}).item<double>(), 0.0);
  for (const at::Device device : devices()) {
    // 40,000 ones: in bf16 a running sum of squares stops at 256.
    const at::Tensor norm = gradient_norm({at::ones({40'000}, on(device, at::kBFloat16))});
    EXPECT_EQ(norm.scalar_type(), at::kFloat);
    EXPECT_NEAR(norm.item<double>(), 200.0, 1e-3) << device;
    EXPECT_EQ(gradient_norm({at::ones({4}, on(device, at::kDouble))}).scalar_type(), at::kDouble);
    // As large as the embedding's gradient of the base preset, where running sums in fp32 lose 1 %.
    const at::Tensor large = at::full({24'576'001}, 1e-3f, on(device, at::kFloat));
    EXPECT_NEAR(gradient_norm({large}).item<double>() / (1e-3f * std::sqrt(24'576'001.0)), 1.0, 1e-6) << device;
  }
}

TEST(Clip, LowPrecisionGradientsAreScaledInPlace) {
  for (const at::Device device : devices()) {
    const std::vector<at::Tensor> gradients = {at::full({2}, 3.0, on(device, at::kBFloat16)),
                                               at::full({2, 2}, 4.0, on(device, at::kBFloat16))};
    clip_gradients(gradients, gradient_norm(gradients), 1.0);
    EXPECT_NEAR(gradient_norm(gradients).item<double>(), 1.0, 5e-3) << device;
    EXPECT_EQ(gradients[0].scalar_type(), at::kBFloat16);
  }
}

TEST(AdamW, NothingInAStepMakesTheHostWait) {
#if MGP_WITH_CUDA
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const at::Tensor weight = leaf(at::ones({64, 64}, on(at::kCUDA, at::kFloat)));
  const at::Tensor bias = leaf(at::ones({64}, on(at::kCUDA, at::kFloat)));
  AdamW optimizer({{"w.weight", weight}, {"w.bias", bias}}, {});
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);  // a wait throws
  EXPECT_NO_THROW({
    weight.mutable_grad() = at::ones_like(weight);
    const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
    clip_gradients(gradients, gradient_norm(gradients), 1.0);
    optimizer.step(1e-3);
    optimizer.zero_grad();
  });
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
#else
  GTEST_SKIP() << "built without CUDA";
#endif
}

TEST(Clip, GradientsOfSkipsUndefinedOnes) {
  const at::Tensor a = leaf(at::ones({1})), b = leaf(at::ones({1}));
  b.mutable_grad() = at::full({1}, 2.0);
  const std::vector<at::Tensor> gradients = gradients_of({{"a", a}, {"b", b}});
  ASSERT_EQ(gradients.size(), 1u);
  EXPECT_TRUE(gradients[0].is_same(b.grad()));
}

TEST(LrSchedule, WarmUpThenConstantOrCosine) {
  LrSchedule schedule;
  EXPECT_EQ(schedule.at(1), 1e-3);
  EXPECT_EQ(schedule.at(1'000'000), 1e-3);
  schedule.warmup = 4;
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.25e-3);
  EXPECT_DOUBLE_EQ(schedule.at(3), 0.75e-3);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1e-3);
  EXPECT_DOUBLE_EQ(schedule.at(5), 1e-3);
  schedule.kind = LrSchedule::Kind::cosine;
  schedule.total = 14;
  EXPECT_DOUBLE_EQ(schedule.at(2), 0.5e-3);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1e-3);
  EXPECT_NEAR(schedule.at(9), 0.55e-3, 1e-15);  // half way between lr and a tenth of it
  EXPECT_NEAR(schedule.at(14), 0.1e-3, 1e-15);
  EXPECT_NEAR(schedule.at(100), 0.1e-3, 1e-15);  // and stays there
  for (int64_t step = 5; step < 14; ++step) EXPECT_GT(schedule.at(step), schedule.at(step + 1));
  schedule.min_ratio = 0.0;
  EXPECT_NEAR(schedule.at(14), 0.0, 1e-18);
}

}  // namespace
}  // namespace mgp

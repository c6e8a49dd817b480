// The two models with --checkpoint-activations compute what they compute without it, bit for bit.
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/cuda.h>

#include <map>

#include "common/data.hpp"
#include "common/model.hpp"
#include "common/precision.hpp"

namespace mgp {
namespace {

at::Tensor random_state(at::Device device) { return at::globalContext().defaultGenerator(device).get_state().clone(); }

struct Setting {
  ModelKind kind;
  Precision precision;
  bool low_weights;
  double dropout;
};

std::string name_of(const Setting& s) {
  return std::string(s.kind == ModelKind::mlp ? "mlp " : "classifier ") + to_string(s.precision) +
         (s.low_weights ? " low weights" : "") + ", dropout " + std::to_string(s.dropout);
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
    for (const double dropout : {0.0, 0.1}) {
      all.push_back({kind, Precision::fp32, false, dropout});
      all.push_back({kind, Precision::fp64, false, dropout});
      all.push_back({kind, Precision::bf16, false, dropout});
      all.push_back({kind, Precision::bf16, true, dropout});
    }
  }
  return all;
}

struct CountFirings : torch::autograd::PostAccumulateGradHook {
  explicit CountFirings(int& count) : count_(count) {}
  void operator()(const torch::autograd::Variable&) override { ++count_; }
  int& count_;
};

/// What is left of one step: `passes` backward passes on different rows.
struct Step {
  std::vector<at::Tensor> losses;
  NamedTensors gradients;
  std::map<std::string, int> firings;  ///< of each parameter's post-accumulate hook
  at::Tensor random_state;             ///< of the device's generator, after the last pass
};

Step take_step(const Setting& setting, bool checkpoint, int64_t passes = 1, at::Device device = at::kCPU) {
  ModelConfig config = preset_config("tiny", setting.kind);
  config.layers = 3;
  config.dropout = setting.dropout;
  config.checkpoint_activations = checkpoint;
  const Model model = make_model(config, 7, device, storage_dtype(setting.precision));
  const NamedTensors masters =
      lower_weights(*model, setting.low_weights ? compute_dtype(setting.precision) : storage_dtype(setting.precision));
  const SyntheticTokens data(config, 42, 4 * passes, SyntheticTokens::Mode::fresh, device);

  Step step;
  for (const auto& [name, parameter] : named_parameters(*model)) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<CountFirings>(step.firings[name]));
  }
  at::manual_seed(11);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch batch = data.rows(1, {4 * pass, 4 * pass + 4});
    at::Tensor logits;
    {
      const Autocast autocast(device, setting.low_weights ? Precision::fp32 : setting.precision);
      logits = model->forward(batch.tokens);
    }
    const at::Tensor loss = cross_entropy_sum(logits, batch.labels);
    loss.backward();
    step.losses.push_back(loss.detach().cpu());
  }
  step.random_state = random_state(device);
  for (const auto& [name, parameter] : named_parameters(*model)) {
    step.gradients.emplace_back(name, parameter.grad().cpu());
  }
  return step;
}

void expect_equal(const Step& plain, const Step& checkpointed_step) {
  ASSERT_EQ(plain.losses.size(), checkpointed_step.losses.size());
  for (size_t i = 0; i < plain.losses.size(); ++i) {
    EXPECT_TRUE(at::equal(plain.losses[i], checkpointed_step.losses[i]));
  }
  ASSERT_EQ(plain.gradients.size(), checkpointed_step.gradients.size());
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    const auto& [name, gradient] = plain.gradients[i];
    EXPECT_EQ(gradient.scalar_type(), checkpointed_step.gradients[i].second.scalar_type()) << name;
    EXPECT_TRUE(at::equal(gradient, checkpointed_step.gradients[i].second)) << name;
  }
  EXPECT_TRUE(at::equal(plain.random_state, checkpointed_step.random_state));
  EXPECT_EQ(plain.firings, checkpointed_step.firings);
}

TEST(CheckpointedModel, LossGradientsHooksAndGeneratorAreThoseOfPlainBackward) {
  for (const Setting& setting : settings()) {
    SCOPED_TRACE(name_of(setting));
    const Step plain = take_step(setting, false);
    const Step again = take_step(setting, true);
    expect_equal(plain, again);
    for (const auto& [name, count] : again.firings) EXPECT_EQ(count, 1) << name;
  }
}

TEST(CheckpointedModel, DropoutInThisTestIsReallyOn) {
  const Step without = take_step({ModelKind::mlp, Precision::fp32, false, 0.0}, true);
  const Step with = take_step({ModelKind::mlp, Precision::fp32, false, 0.1}, true);
  EXPECT_FALSE(at::equal(without.losses[0], with.losses[0]));
  EXPECT_FALSE(at::equal(without.random_state, with.random_state));
}

TEST(CheckpointedModel, TwoBackwardPassesAddUp) {
  for (const Setting& setting : settings()) {
    SCOPED_TRACE(name_of(setting));
    const Step again = take_step(setting, true, 2);
    expect_equal(take_step(setting, false, 2), again);
    for (const auto& [name, count] : again.firings) EXPECT_EQ(count, 2) << name;
  }
}

/// Attention by the math kernel for one scope: the backward of the fused kernels of a GPU adds with atomics.
class MathAttention {
 public:
  MathAttention() { allow_fused(false); }
  ~MathAttention() { allow_fused(true); }
  MathAttention(const MathAttention&) = delete;
  MathAttention& operator=(const MathAttention&) = delete;

 private:
  static void allow_fused(bool on) {
    at::globalContext().setSDPUseFlash(on);
    at::globalContext().setSDPUseMemEfficient(on);
    at::globalContext().setSDPUseCuDNN(on);
  }
};

TEST(CheckpointedModel, OnAGpuTooBitForBit) {
  // There backward runs on a thread of its own, with its own autocast dtype, and the generator is the GPU's.
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const at::Device device(at::kCUDA, 0);
  const MathAttention attention;
  for (const Setting& setting : settings()) {
    SCOPED_TRACE(name_of(setting));
    const Step again = take_step(setting, true, 2, device);
    expect_equal(take_step(setting, false, 2, device), again);
    for (const auto& [name, count] : again.firings) EXPECT_EQ(count, 2) << name;
  }
}

TEST(CheckpointedModel, ForwardWithoutGradientsIsTheSameAndKeepsNoGraph) {
  for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
    ModelConfig config = preset_config("tiny", kind);
    const Batch batch = SyntheticTokens(config, 42, 4, SyntheticTokens::Mode::fresh, at::kCPU).rows(1, {0, 4});
    const at::Tensor plain = make_model(config, 7, at::kCPU, at::kFloat)->forward(batch.tokens);
    config.checkpoint_activations = true;
    const Model model = make_model(config, 7, at::kCPU, at::kFloat);
    EXPECT_TRUE(at::equal(model->forward(batch.tokens), plain));
    const at::NoGradGuard no_grad;
    const at::Tensor logits = model->forward(batch.tokens);
    EXPECT_TRUE(at::equal(logits, plain));
    EXPECT_FALSE(logits.requires_grad());
  }
}

}  // namespace
}  // namespace mgp

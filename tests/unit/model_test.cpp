// The models: names, initial values, shapes, gradients, empty batches.
#include "common/model.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/cuda.h>

#include <chrono>
#include <cmath>

#include "common/data.hpp"
#include "common/precision.hpp"

namespace mgp {
namespace {

constexpr ModelKind kBoth[] = {ModelKind::classifier, ModelKind::mlp};

/// The CPU, and a GPU where there is one.
std::vector<at::Device> devices() {
  if (torch::cuda::is_available()) return {at::kCPU, at::Device(at::kCUDA, 0)};
  return {at::kCPU};
}

Batch batch_of(const ModelConfig& config, int64_t rows, at::Device device = at::kCPU) {
  const int64_t global_batch = std::max<int64_t>(rows, 1);
  return SyntheticTokens(config, 42, global_batch, SyntheticTokens::Mode::fresh, device).rows(1, {0, rows});
}

at::Tensor parameter(const NamedTensors& parameters, const std::string& name) {
  for (const auto& [known, tensor] : parameters) {
    if (known == name) return tensor;
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(Model, NamesShapesAndOrderFollowFromTheConfiguration) {
  for (const ModelKind kind : kBoth) {
    const ModelConfig config = preset_config("tiny", kind);
    const Model model = make_model(config, 1, at::kMeta, at::kFloat);
    const NamedTensors parameters = named_parameters(*model);
    const std::vector<ParameterShape> shapes = parameter_shapes(config);
    ASSERT_EQ(parameters.size(), shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_EQ(parameters[i].first, shapes[i].name);
      EXPECT_EQ(parameters[i].second.sizes(), at::IntArrayRef(shapes[i].shape)) << shapes[i].name;
      EXPECT_TRUE(parameters[i].second.requires_grad() && parameters[i].second.is_leaf());
    }
  }
}

TEST(Model, AnyPieceOfAnyParameterIsThatPieceOfTheModel) {
  for (const ModelKind kind : kBoth) {
    const ModelConfig config = preset_config("tiny", kind);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const Model model = make_model(config, 7, at::kCPU, dtype);
      const NamedTensors parameters = named_parameters(*model);
      const std::vector<ParameterShape> shapes = parameter_shapes(config);
      for (size_t i = 0; i < shapes.size(); ++i) {
        const int64_t n = shapes[i].numel();
        const at::Tensor whole = parameters[i].second.detach().flatten();
        for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, n}, {n / 3, n / 2}, {n - 1, 1}}) {
          const at::Tensor piece = initial_value(shapes[i], 7, first, count).to(dtype);
          ASSERT_TRUE(at::equal(piece, whole.slice(0, first, first + count))) << shapes[i].name;
        }
      }
    }
  }
}

TEST(Model, InitialValuesFollowTheRule) {
  const Model model = make_model(preset_config("tiny", ModelKind::classifier), 7, at::kCPU, at::kDouble);
  for (const auto& [name, tensor] : named_parameters(*model)) {
    if (tensor.dim() == 2) {
      const double expected = 0.5 / std::sqrt(static_cast<double>(tensor.size(1)));
      EXPECT_NEAR(tensor.std().item<double>() / expected, 1.0, 5.0 / std::sqrt(2.0 * tensor.numel())) << name;
    } else {
      const bool gain = name.find("norm") != std::string::npos && name.ends_with(".weight");
      EXPECT_TRUE(tensor.eq(gain ? 1.0 : 0.0).all().item<bool>()) << name;
    }
  }
  // Layers of one shape start differently (trial B57), and so do seeds.
  const NamedTensors parameters = named_parameters(*model);
  const at::Tensor first = parameter(parameters, "encoder.layers.0.linear1.weight");
  EXPECT_FALSE(at::equal(first, parameter(parameters, "encoder.layers.1.linear1.weight")));
  const Model other = make_model(preset_config("tiny", ModelKind::classifier), 8, at::kCPU, at::kDouble);
  EXPECT_FALSE(at::equal(first, parameter(named_parameters(*other), "encoder.layers.0.linear1.weight")));
  EXPECT_THROW(initial_value({"x.weight", {2, 3}}, 1, 4, 3), c10::Error);
}

TEST(Model, LossStartsNearLnOfTheClasses) {
  for (const ModelKind kind : kBoth) {
    const ModelConfig config = preset_config("tiny", kind);
    const Model model = make_model(config, 7, at::kCPU, at::kFloat);
    const Batch batch = batch_of(config, 32);
    const at::Tensor logits = model->forward(batch.tokens);
    EXPECT_EQ(logits.sizes(), at::IntArrayRef({32, 10}));
    EXPECT_NEAR((cross_entropy_sum(logits, batch.labels) / 32).item<double>(), std::log(10.0),
                0.35);  // logits spread by 0.5
  }
}

TEST(Model, GradientsArriveInTheOrderThatIsPredicted) {
  struct Record : torch::autograd::PostAccumulateGradHook {
    Record(std::vector<std::string>& order, std::string name) : order_(order), name_(std::move(name)) {}
    void operator()(const torch::autograd::Variable&) override { order_.push_back(name_); }
    std::vector<std::string>& order_;
    std::string name_;
  };
  for (const at::Device device : devices()) {
    for (const ModelKind kind : kBoth) {
      for (const Precision precision : {Precision::fp32, Precision::fp64, Precision::bf16}) {
        // With checkpointing each layer has a backward of its own, nested in the outer one: the order stays the same.
        for (const bool checkpoint : {false, true}) {
          ModelConfig config = preset_config("tiny", kind);
          config.layers = 3;
          config.checkpoint_activations = checkpoint;
          const Model model = make_model(config, 7, device, storage_dtype(precision));
          std::vector<std::string> order;
          for (auto& [name, tensor] : named_parameters(*model)) {
            torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<Record>(order, name));
          }
          const Batch batch = batch_of(config, 4, device);
          at::Tensor logits;
          {
            const Autocast autocast(device, precision);
            logits = model->forward(batch.tokens);
          }
          cross_entropy_sum(logits, batch.labels).backward();
          EXPECT_EQ(order, gradient_arrival_order(config, precision == Precision::bf16))
              << to_string(precision) << " on " << device << (checkpoint ? ", checkpointed" : "");
        }
      }
    }
  }
}

TEST(Model, RowsAddUpHoweverTheyAreCut) {
  for (const ModelKind kind : kBoth) {
    ModelConfig config = preset_config("tiny", kind);
    config.layers = 2;
    const Model model = make_model(config, 7, at::kCPU, at::kDouble);
    const NamedTensors parameters = named_parameters(*model);
    const Batch batch = batch_of(config, 7);
    (cross_entropy_sum(model->forward(batch.tokens), batch.labels) / 7).backward();
    std::vector<at::Tensor> whole;
    for (const auto& [name, tensor] : parameters) {
      whole.push_back(tensor.grad().clone());
      tensor.mutable_grad() = at::Tensor();
    }
    const RowSlice all{0, 7};
    for (int64_t part = 0; part < 9; ++part) {  // 9 parts of 7 rows: two are empty and add zeros
      const RowSlice rows = all.part(part, 9);
      const at::Tensor logits = model->forward(batch.tokens.slice(0, rows.begin, rows.end));
      (cross_entropy_sum(logits, batch.labels.slice(0, rows.begin, rows.end)) / 7).backward();
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const double difference = (parameters[i].second.grad() - whole[i]).norm().item<double>();
      EXPECT_LE(difference, 1e-13 * std::max(1.0, whole[i].norm().item<double>())) << parameters[i].first;
    }
  }
}

TEST(Model, NoRowsGiveZeroLossAndZeroGradients) {
  // On a CPU only: LibTorch's attention kernels for GPUs take no empty batch. The trainers refuse configurations in which
  // a part of the batch would be empty.
  for (const at::Device device : {at::Device(at::kCPU)}) {
    for (const ModelKind kind : kBoth) {
      for (const Precision precision : {Precision::fp32, Precision::bf16}) {
        ModelConfig config = preset_config("tiny", kind);
        config.checkpoint_activations = precision == Precision::bf16;  // either way
        const Model model = make_model(config, 7, device, at::kFloat);
        const Batch batch = batch_of(config, 0, device);
        at::Tensor logits;
        {
          const Autocast autocast(device, precision);
          logits = model->forward(batch.tokens);
        }
        EXPECT_EQ(logits.sizes(), at::IntArrayRef({0, 10}));
        const at::Tensor loss = cross_entropy_sum(logits, batch.labels);
        EXPECT_EQ(loss.item<double>(), 0.0);
        loss.backward();
        for (const auto& [name, tensor] : named_parameters(*model)) {
          ASSERT_TRUE(tensor.grad().defined()) << name;
          EXPECT_EQ(tensor.grad().abs().max().item<double>(), 0.0) << name << " on " << device;
        }
      }
    }
  }
}

TEST(Model, AGpuStartsFromTheBitsOfTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  const Model on_cpu = make_model(config, 7, at::kCPU, at::kFloat);
  const Model on_gpu = make_model(config, 7, at::kCUDA, at::kFloat);
  const NamedTensors a = named_parameters(*on_cpu), b = named_parameters(*on_gpu);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].second, b[i].second.cpu())) << a[i].first;
  EXPECT_TRUE(at::equal(batch_of(config, 5).tokens, batch_of(config, 5, at::kCUDA).tokens.cpu()));
  EXPECT_TRUE(at::equal(batch_of(config, 5).labels, batch_of(config, 5, at::kCUDA).labels.cpu()));
}

TEST(Model, AttentionCopiesNoLayouts) {
  // q, k and v are views of the one projection, and the attention output is already in [B, T, H, D] order in memory.
  const at::Tensor qkv = at::randn({2, 36, 3 * 96});
  const std::vector<at::Tensor> parts = qkv.view({2, 36, 3, 12, 8}).unbind(2);
  const at::Tensor q = parts[0].transpose(1, 2);
  EXPECT_EQ(q.storage().data(), qkv.storage().data());
  const at::Tensor out = at::scaled_dot_product_attention(q, parts[1].transpose(1, 2), parts[2].transpose(1, 2));
  EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
}

TEST(Model, DropoutActsOnlyInTrainingAndOnlyWhenAskedFor) {
  for (const ModelKind kind : kBoth) {
    ModelConfig config = preset_config("tiny", kind);
    const Batch batch = batch_of(config, 2);
    const at::Tensor plain = make_model(config, 7, at::kCPU, at::kFloat)->forward(batch.tokens);
    config.dropout = 0.5;
    const Model model = make_model(config, 7, at::kCPU, at::kFloat);
    EXPECT_FALSE(at::equal(model->forward(batch.tokens), model->forward(batch.tokens)));
    model->eval();
    EXPECT_TRUE(at::equal(model->forward(batch.tokens), plain));
  }
}

TEST(Model, CrossEntropyIsSummedInFp32) {
  const at::Tensor logits = at::tensor({1.0, 2.0, 0.0, 0.0}, at::kDouble).view({2, 2});
  const at::Tensor labels = at::tensor({0, 1}, at::kLong);
  const double expected = std::log1p(std::exp(1.0)) + std::log(2.0);
  EXPECT_NEAR(cross_entropy_sum(logits, labels).item<double>(), expected, 1e-15);
  const at::Tensor low = cross_entropy_sum(logits.to(at::kBFloat16), labels);
  EXPECT_EQ(low.scalar_type(), at::kFloat);
  EXPECT_NEAR(low.item<double>(), expected, 1e-6);
}

TEST(Model, BaseIsMadeInAboutASecond) {
  const auto begin = std::chrono::steady_clock::now();
  const Model model = make_model(preset_config("base", ModelKind::classifier), 7, at::kCPU, at::kFloat);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  RecordProperty("milliseconds", static_cast<int>(took.count() * 1e3));
  EXPECT_LT(took.count(), 10.0);  // a loaded machine is slower; LibTorch's own initialisation is the thing to notice
}

}  // namespace
}  // namespace mgp

// Memory of activations, measured by LibTorch's allocator on a CPU: what is alive, and whether the prediction is right.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "common/activation_checkpoint.hpp"
#include "common/data.hpp"
#include "common/model.hpp"
#include "common/precision.hpp"
#include "common/predict.hpp"
#include "tests/unit/allocation_meter.hpp"

namespace mgp {
namespace {

// ── single blocks ───────────────────────────────────────────────────────────────────────────────────────────────────

TEST(ActivationMemory, OneBlockAtATimeIsAliveAndNoneAfterwards) {
  // Each block notes its inner tensor weakly, and counts at its begin how many of the others' are still there.
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  std::vector<Weak> inner;
  std::vector<int64_t> alive;
  const at::Tensor weight = at::eye(4).set_requires_grad(true);
  const auto block = [&](const at::Tensor& x) {
    alive.push_back(std::count_if(inner.begin(), inner.end(), [](const Weak& tensor) { return !tensor.expired(); }));
    const at::Tensor hidden = at::linear(x, weight);
    inner.emplace_back(hidden.getIntrusivePtr());
    return at::tanh(hidden * hidden);  // both keep what they read
  };
  const auto run = [&](bool checkpoint) {
    at::Tensor x = at::linspace(-2, 2, 12).view({3, 4});
    for (int layer = 0; layer < 4; ++layer) x = checkpoint ? checkpointed(block, x, false) : block(x);
    x.sum().backward();
  };
  run(false);
  EXPECT_EQ(alive, (std::vector<int64_t>{0, 1, 2, 3}));  // so the count does see what is kept
  inner.clear();
  alive.clear();
  run(true);
  EXPECT_EQ(alive, std::vector<int64_t>(8, 0));
  for (const Weak& tensor : inner) EXPECT_TRUE(tensor.expired());
}

TEST(ActivationMemory, TheGraphKeepsTheInputAndNothingElse) {
  constexpr int64_t rows = 1024;
  const int64_t bytes = rows * 4 * 4;
  const at::Tensor weight = at::eye(4).set_requires_grad(true);
  const auto block = [&weight](const at::Tensor& x) { return at::tanh(at::linear(x, weight)); };
  const AllocationMeter meter;
  {
    const at::Tensor loss = checkpointed(block, at::ones({rows, 4}) * 2, false).sum();
    EXPECT_EQ(meter.now(), bytes + 4);  // x, and the loss
    loss.backward();
    EXPECT_EQ(meter.now(), 4 + 4 * 16);  // the loss, and the weight's gradient
  }
  EXPECT_EQ(meter.now(), 4 * 16);
  checkpointed(block, at::ones({rows, 4}), false);  // thrown away without a backward
  EXPECT_EQ(meter.now(), 4 * 16);
}

TEST(ActivationMemory, CastsOfWeightsEndWithTheBlock) {
  const at::Tensor weight = at::eye(64).set_requires_grad(true);
  const at::Tensor x = at::ones({2, 64}).set_requires_grad(true);
  const auto block = [&weight](const at::Tensor& in) { return at::linear(in, weight); };
  const AllocationMeter meter;
  const Autocast autocast(at::kCPU, Precision::bf16);
  const at::Tensor y = checkpointed(block, x, false);
  EXPECT_EQ(meter.now(), 2 * 64 * 2);  // y in bf16; the cache of casts is still open, and empty
  block(x);
  EXPECT_GE(meter.now(), 2 * 64 * 2 + 64 * 64 * 2);  // the plain block leaves the weight there
}

// ── whole models ────────────────────────────────────────────────────────────────────────────────────────────────────

/// The math kernel of attention instead of the fused one, for one scope: what --deterministic chooses on a GPU.
class MathAttention {
 public:
  explicit MathAttention(bool on) { at::globalContext().setSDPUseFlash(!on); }
  ~MathAttention() { at::globalContext().setSDPUseFlash(true); }
  MathAttention(const MathAttention&) = delete;
  MathAttention& operator=(const MathAttention&) = delete;
};

struct Measured {
  int64_t kept = 0;  ///< by forward
  int64_t peak = 0;  ///< of backward, gradients included
};

/// One step of the model that `options` describe, on the CPU.
Measured measure(const Options& options) {
  const MathAttention attention(options.deterministic);
  const Model model = make_model(options.model, 7, at::kCPU, storage_dtype(options.precision));
  const NamedTensors masters = lower_weights(*model, options.weight_dtype());
  const SyntheticTokens data(options.model, 42, options.batch_size, SyntheticTokens::Mode::fresh, at::kCPU);
  AllocationMeter meter;
  Measured measured;
  for (int64_t pass = 0; pass < options.accumulate; ++pass) {
    const Batch batch = data.rows(1, RowSlice{0, options.batch_size}.part(pass, options.accumulate));
    const int64_t before = meter.now() - static_cast<int64_t>(batch.tokens.nbytes());
    at::Tensor loss;
    {
      const Autocast autocast(at::kCPU, options.autocast());
      loss = cross_entropy_sum(model->forward(batch.tokens), batch.labels);
    }
    measured.kept = meter.now() - before;
    loss.backward();
  }
  measured.peak = meter.peak();
  return measured;
}

/// `rows` rows of a model in which the activations weigh more (many rows) or the gradients do (few).
Options options_of(ModelKind kind, Precision precision, bool low_weights, bool checkpoint, int64_t rows) {
  Options options;
  options.model = preset_config("tiny", kind);
  options.model.layers = 4;
  options.model.seq_len = 64;
  options.model.checkpoint_activations = checkpoint;
  options.precision = precision;
  options.weights = low_weights ? "low" : "autocast";
  options.batch_size = options.global_batch_size = rows;
  options.cuda = true;  // the fused kernels of attention, of which the CPU has one, too
  return options;
}

void expect_near(int64_t predicted, int64_t measured, double tolerance, const char* what) {
  const double ratio = static_cast<double>(predicted) / static_cast<double>(measured);
  EXPECT_NEAR(ratio, 1.0, tolerance) << what << ": predicted " << predicted << ", measured " << measured;
}

TEST(ActivationMemory, IsWhatWasPredictedWithAndWithoutCheckpointing) {
  struct Arithmetic {
    Precision precision;
    bool low_weights, math_attention;
  };
  for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
    for (const Arithmetic& a : {Arithmetic{Precision::fp32, false, false}, Arithmetic{Precision::fp32, false, true},
                                Arithmetic{Precision::fp64, false, true}, Arithmetic{Precision::bf16, false, false},
                                Arithmetic{Precision::bf16, false, true}, Arithmetic{Precision::bf16, true, false}}) {
      for (const int64_t rows : {2, 32}) {
        // Low gradients are widened 32 MiB at a time: nothing in a real model, but more than two rows in this one.
        if (a.low_weights && rows == 2) continue;
        for (const bool checkpoint : {false, true}) {
          Options options = options_of(kind, a.precision, a.low_weights, checkpoint, rows);
          options.deterministic = a.math_attention;
          SCOPED_TRACE(std::string(kind == ModelKind::mlp ? "mlp " : "classifier ") + to_string(a.precision) +
                       (a.low_weights ? " low weights" : "") + (a.math_attention ? ", math" : "") +
                       (checkpoint ? ", checkpointed, " : ", ") + std::to_string(rows) + " rows");
          const Measured measured = measure(options);
          expect_near(activation_bytes(options.model, a.precision, a.math_attention, rows, a.low_weights),
                      measured.kept, 0.02, "kept by forward");
          const MemoryPrediction memory = predict_memory(options, {});
          expect_near(memory.activations + memory.gradients, measured.peak, 0.06, "peak of backward");
        }
      }
    }
  }
}

TEST(ActivationMemory, OfOnePassStandsBesideTheGradientsOfThePassBefore) {
  for (const bool checkpoint : {false, true}) {
    Options options = options_of(ModelKind::classifier, Precision::fp32, false, checkpoint, 32);
    options.accumulate = 2;
    const Measured measured = measure(options);
    expect_near(activation_bytes(options.model, Precision::fp32, false, 16), measured.kept, 0.02, "kept by forward");
    const MemoryPrediction memory = predict_memory(options, {});
    EXPECT_EQ(memory.gradients, 4 * parameter_count(options.model));
    expect_near(memory.activations + memory.gradients, measured.peak, 0.06, "peak of backward");
  }
}

}  // namespace
}  // namespace mgp

// Autocast: what it does to dtypes, and that nothing of it stays behind.
#include "common/precision.hpp"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/data.hpp"
#include "common/error.hpp"
#include "common/model.hpp"

namespace mgp {
namespace {

bool autocast_on() { return at::autocast::is_autocast_enabled(at::kCPU); }

at::ScalarType matmul_dtype() {
  const at::Tensor a = at::ones({4, 4});
  return at::matmul(a, a).scalar_type();
}

TEST(Precision, NamesGoBothWays) {
  for (const char* name : {"fp32", "tf32", "bf16", "fp16", "fp64"}) EXPECT_EQ(to_string(parse_precision(name)), name);
  try {
    parse_precision("fp8");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "--precision 'fp8' is unknown: use fp32, tf32, bf16, fp16 or fp64");
  }
}

TEST(Precision, StorageIsFp32ButInFp64) {
  EXPECT_EQ(storage_dtype(Precision::fp64), at::kDouble);
  for (const Precision precision : {Precision::fp32, Precision::tf32, Precision::bf16, Precision::fp16}) {
    EXPECT_EQ(storage_dtype(precision), at::kFloat);
  }
}

TEST(Precision, AutocastActsOnlyInBf16AndOnlyInItsScope) {
  for (const Precision precision : {Precision::fp32, Precision::tf32, Precision::fp64}) {
    const Autocast autocast(at::kCPU, precision);
    EXPECT_FALSE(autocast_on());
    EXPECT_EQ(matmul_dtype(), at::kFloat);
  }
  {
    const Autocast autocast(at::kCPU, Precision::bf16);
    EXPECT_EQ(matmul_dtype(), at::kBFloat16);
  }
  EXPECT_FALSE(autocast_on());
  EXPECT_EQ(matmul_dtype(), at::kFloat);
}

TEST(Precision, AutocastRestoresWhatWasThereAfterExceptionsToo) {
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  try {
    const Autocast autocast(at::kCPU, Precision::bf16);
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(autocast_on());
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
}

TEST(Precision, WeightsAreCastOnceInTheOutermostScopeAndForgottenAtItsEnd) {
  const at::Tensor weight = at::ones({4, 4}).requires_grad_();
  const at::Tensor x = at::ones({2, 4});
  const auto cast_of = [&] { return at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU); };
  at::Tensor first;
  {
    const Autocast outer(at::kCPU, Precision::bf16);
    first = cast_of();
    {
      const Autocast inner(at::kCPU, Precision::bf16);
      EXPECT_TRUE(cast_of().is_same(first));
    }
    EXPECT_TRUE(autocast_on());             // the inner scope gave back what it found
    EXPECT_TRUE(cast_of().is_same(first));  // and left the cache to the outer one
  }
  {
    const at::NoGradGuard no_grad;
    weight.fill_(3.0);  // what an optimizer step does
  }
  const Autocast autocast(at::kCPU, Precision::bf16);
  EXPECT_FALSE(cast_of().is_same(first));
  EXPECT_EQ(at::matmul(x, weight)[0][0].item<double>(), 12.0);  // not the stale 4
}

TEST(Precision, Bf16GradientsAreFp32AndNearThoseOfFp32) {
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  const Batch batch = SyntheticTokens(config, 1, 8, SyntheticTokens::Mode::fresh, at::kCPU).rows(1, {0, 8});
  std::vector<at::Tensor> gradients;
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    const Model model = make_model(config, 7, at::kCPU, storage_dtype(precision));
    at::Tensor logits;
    {
      const Autocast autocast(at::kCPU, precision);
      logits = model->forward(batch.tokens);
    }
    EXPECT_EQ(logits.scalar_type(), precision == Precision::bf16 ? at::kBFloat16 : at::kFloat);
    cross_entropy_sum(logits, batch.labels).backward();
    std::vector<at::Tensor> flat;
    for (const auto& [name, tensor] : named_parameters(*model)) {
      EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat) << name;
      flat.push_back(tensor.grad().flatten());
    }
    gradients.push_back(at::cat(flat));
  }
  const double relative = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item<double>();
  EXPECT_GT(relative, 0.0);
  EXPECT_LT(relative, 0.05);
}

TEST(Precision, SwitchesOfTf32) {
  apply_precision(Precision::tf32);
  EXPECT_TRUE(at::globalContext().allowTF32CuBLAS());
  EXPECT_TRUE(at::globalContext().allowTF32CuDNN());
  apply_precision(Precision::fp32);
  EXPECT_FALSE(at::globalContext().allowTF32CuBLAS());
  EXPECT_FALSE(at::globalContext().allowTF32CuDNN());
}

TEST(Precision, DeterministicSetsSwitchesAndKeepsWhatTheUserSet) {
  at::Context& context = at::globalContext();
  setenv("NCCL_ALGO", "Tree", 1);
  unsetenv("NCCL_PROTO");
  apply_deterministic(at::kCPU);
  EXPECT_TRUE(context.userEnabledFlashSDP());  // on the CPU the fused attention sums in a fixed order
  apply_deterministic();
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
  EXPECT_STREQ(std::getenv("NCCL_ALGO"), "Tree");
  EXPECT_STREQ(std::getenv("NCCL_PROTO"), "Simple");
  EXPECT_TRUE(context.deterministicAlgorithms());
  EXPECT_FALSE(context.deterministicAlgorithmsWarnOnly());
  EXPECT_TRUE(context.deterministicCuDNN());
  EXPECT_FALSE(context.userEnabledFlashSDP());
  EXPECT_FALSE(context.userEnabledMemEfficientSDP());
  EXPECT_FALSE(context.userEnabledCuDNNSDP());
  EXPECT_TRUE(context.userEnabledMathSDP());
  // Leave the process as the other tests expect it.
  context.setDeterministicAlgorithms(false, false);
  context.setDeterministicCuDNN(false);
  context.setSDPUseFlash(true);
  context.setSDPUseMemEfficient(true);
  context.setSDPUseCuDNN(true);
  for (const char* name : {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"}) unsetenv(name);
}

}  // namespace
}  // namespace mgp

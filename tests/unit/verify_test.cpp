// The proof itself is proved: right runs pass, and each kind of wrong number fails.
#include "common/verify.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace mgp {
namespace {

TrainingRecord record() {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  TrainingRecord r;
  r.losses = {2.3, 2.2};
  r.norms = {1.5, 1.4};
  r.first_gradients = {{"a.weight", at::arange(1, 13, options).view({3, 4})},
                       {"attn.in_proj_bias", at::tensor({1.0, 2.0, 1e-9, -1e-9, 3.0, 4.0}, options)}};
  r.initial_parameters = {{"a.weight", at::ones({3, 4}, options)}, {"attn.in_proj_bias", at::zeros({6}, options)}};
  r.final_parameters = {{"a.weight", at::full({3, 4}, 1.01, options)},
                        {"attn.in_proj_bias", at::full({6}, 0.01, options)}};
  return r;
}

TrainingRecord deep_copy(const TrainingRecord& r) {
  TrainingRecord copy = r;
  for (NamedTensors* list : {&copy.first_gradients, &copy.initial_parameters, &copy.final_parameters}) {
    for (auto& [name, tensor] : *list) tensor = tensor.clone();
  }
  return copy;
}

TEST(Verify, EqualRunsPass) {
  for (const Precision precision : {Precision::fp32, Precision::fp64}) {
    const Verdict verdict = compare_exact(record(), record(), precision);
    EXPECT_TRUE(verdict.passed()) << verdict.report();
    // 1 matrix + 3 parts of the bias, 2 losses, 2 norms, 1 over the parameters.
    EXPECT_EQ(verdict.checks.size(), 4u + 2u + 2u + 1u);
  }
}

TEST(Verify, EachKindOfDifferenceFails) {
  const auto fails = [](auto&& change, const char* what) {
    TrainingRecord wrong = deep_copy(record());
    change(wrong);
    const Verdict verdict = compare_exact(wrong, record(), Precision::fp32);
    EXPECT_FALSE(verdict.passed()) << what;
    EXPECT_NE(verdict.report().find("NOT EQUAL"), std::string::npos);
  };
  fails([](TrainingRecord& r) { r.first_gradients[0].second.mul_(2); }, "a doubled gradient");
  fails([](TrainingRecord& r) { r.first_gradients[0].second.mul_(1 + 1e-4); }, "a gradient off by 1e-4");
  fails([](TrainingRecord& r) { r.first_gradients[1].second.slice(0, 0, 2).mul_(1.001); }, "the query bias alone");
  fails([](TrainingRecord& r) { r.first_gradients[0].second[0][0] = NAN; }, "a NaN");
  fails([](TrainingRecord& r) { r.losses[1] *= 1 + 1e-5; }, "a loss");
  fails([](TrainingRecord& r) { r.norms[0] = NAN; }, "a norm that is no number");
  fails([](TrainingRecord& r) { r.norms[0] *= 1 + 2e-5; }, "a norm");
  // 1e-3 of the update, which is 1e-5 of the weights: judged against the update made.
  fails([](TrainingRecord& r) { r.final_parameters[0].second.add_(1e-5); }, "parameters");
}

TEST(Verify, NoiseWhereTheTrueGradientIsZeroPasses) {
  TrainingRecord noisy = deep_copy(record());
  noisy.first_gradients[1].second.slice(0, 2, 4).fill_(3e-8);  // key bias: all noise, far below 1e-4 of the whole
  EXPECT_TRUE(compare_exact(noisy, record(), Precision::fp32).passed());
  EXPECT_FALSE(compare_exact(noisy, record(), Precision::fp64).passed());
}

TEST(Verify, LowPrecisionMayBeTwiceAsFar) {
  const TrainingRecord truth = record();
  TrainingRecord low = deep_copy(truth), near = deep_copy(truth), far = deep_copy(truth);
  low.first_gradients[0].second.mul_(1.01);
  near.first_gradients[0].second.mul_(0.985);
  far.first_gradients[0].second.mul_(1.025);
  EXPECT_TRUE(compare_low(near, low, truth).passed());
  EXPECT_FALSE(compare_low(far, low, truth).passed());
  far = deep_copy(truth);
  far.losses[0] = NAN;
  EXPECT_FALSE(compare_low(far, low, truth).passed());
}

TEST(Verify, AnEmptyVerdictDoesNotPass) {
  EXPECT_FALSE(Verdict{}.passed());
  TrainingRecord shorter = record();
  shorter.losses.pop_back();
  EXPECT_THROW(compare_exact(shorter, record(), Precision::fp32), std::exception);
  TrainingRecord fewer = record();
  fewer.first_gradients.pop_back();
  EXPECT_THROW(compare_exact(fewer, record(), Precision::fp32), std::exception);
}

TEST(Verify, ASkippedStepIsJudgedByItsNorm) {
  TrainingRecord run = record();
  run.skipped = {false, true};
  run.norms = {1.5, INFINITY};
  EXPECT_TRUE(compare_exact(run, record(), Precision::fp32).passed());
  EXPECT_TRUE(compare_low(run, record(), record()).passed());
  run.norms[1] = 1.4;  // skipped without a reason
  EXPECT_FALSE(compare_exact(run, record(), Precision::fp32).passed());
  EXPECT_FALSE(compare_low(run, record(), record()).passed());
  run.skipped = {false, false};
  run.norms[1] = NAN;  // not skipped, though it had to be
  EXPECT_FALSE(compare_exact(run, record(), Precision::fp32).passed());
  EXPECT_FALSE(compare_low(run, record(), record()).passed());
}

}  // namespace
}  // namespace mgp

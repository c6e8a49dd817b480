// Data parallel gradients with numbers that can be done by hand.
#include "examples/ddp/gradient_reducer.hpp"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include "common/optimizer.hpp"
#include "examples/ddp/naive_reduce.hpp"
#include "tests/multi_rank/world.hpp"

namespace mgp {
namespace {

using mgp_test::world;

at::Tensor parameter(std::vector<double> values) {
  return at::tensor(values, at::kDouble).to(world().device()).set_requires_grad(true);
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor cpu = tensor.detach().cpu().contiguous();
  return {cpu.data_ptr<double>(), cpu.data_ptr<double>() + cpu.numel()};
}

TEST(GradientReducer, TheSmallestModel) {
  // Trial B01: y = w x, w = 1, loss = mean(y), SGD 0.1, rank r has x = 2r + 1. The mean over n ranks of x is n, so
  // w becomes 1 - 0.1 n; a sum would give 1 - 0.1 n^2, a missing reduction another w on each rank.
  const int ranks = world().size();
  const at::Tensor w = parameter({1.0});
  GradientReducer reducer({{"w", w}}, world(), 25.0);
  reducer.begin_step();
  reducer.begin_backward(/*last=*/true);
  ((w * (2.0 * world().rank() + 1.0)).sum() / static_cast<double>(ranks)).backward();
  reducer.wait();
  const at::NoGradGuard no_grad;
  w.sub_(0.1 * w.grad());
  EXPECT_NEAR(w.item<double>(), 1.0 - 0.1 * ranks, 1e-15);
}

TEST(GradientReducer, AParameterUsedOnRankZeroOnly) {
  // Trial B08: no hang, zeros from the others, the same result on all ranks; also in later steps.
  const at::Tensor body = parameter({1.0, 2.0}), head = parameter({3.0}), never = parameter({5.0});
  GradientReducer reducer({{"body", body}, {"head", head}, {"never", never}}, world(), 1e-6);
  for (int step = 0; step < 3; ++step) {
    for (const at::Tensor& p : {body, head, never}) p.mutable_grad() = at::Tensor();
    reducer.begin_step();
    reducer.begin_backward(true);
    at::Tensor loss = body.sum();
    if (world().rank() == 0) loss = loss * head.sum();
    loss.backward();
    reducer.wait();
    EXPECT_EQ(values_of(body.grad()), std::vector<double>(2, 3.0 + (world().size() - 1)));
    EXPECT_EQ(values_of(head.grad()), std::vector<double>(1, 3.0));
    EXPECT_EQ(values_of(never.grad()), std::vector<double>(1, 0.0));
  }
  EXPECT_EQ(reducer.order().size(), 3u);
  EXPECT_EQ(reducer.order().back(), "never");
}

TEST(GradientReducer, AccumulationAddsAndSendsOnce) {
  const at::Tensor a = parameter({1.0, 1.0}), b = parameter({1.0});
  GradientReducer reducer({{"a", a}, {"b", b}}, world(), 1e-6);
  for (int step = 0; step < 2; ++step) {
    for (const at::Tensor& p : {a, b}) p.mutable_grad() = at::Tensor();
    const int64_t before = world().ledger().total("all_reduce", Purpose::training).calls;
    reducer.begin_step();
    for (int micro = 0; micro < 3; ++micro) {
      reducer.begin_backward(/*last=*/micro == 2);
      // b has no part in the first pass: its gradient comes later than its bucket's neighbours expect.
      at::Tensor loss = (a * static_cast<double>(world().rank() + micro)).sum();
      if (micro > 0) loss = loss + b.sum();
      loss.backward();
    }
    reducer.wait();
    const int n = world().size();
    // Over micro 0..2: 3 r + 3; over ranks: 3 n(n-1)/2 + 3n.
    EXPECT_EQ(values_of(a.grad()), std::vector<double>(2, 1.5 * n * (n - 1) + 3.0 * n));
    EXPECT_EQ(values_of(b.grad()), std::vector<double>(1, 2.0 * n));
    EXPECT_EQ(world().ledger().total("all_reduce", Purpose::training).calls - before,
              static_cast<int64_t>(reducer.bucket_count()));
  }
}

TEST(GradientReducer, GradientsAreViewsOfTheBuckets) {
  const at::Tensor a = parameter({1.0, 2.0}), b = parameter({3.0, 4.0, 5.0});
  GradientReducer reducer({{"a", a}, {"b", b}}, world(), 25.0);
  reducer.begin_step();
  reducer.begin_backward(true);
  (a.sum() + b.sum()).backward();
  reducer.wait();
  EXPECT_EQ(reducer.bucket_count(), 1u);
  EXPECT_TRUE(a.grad().is_alias_of(b.grad()));  // one flat buffer holds both, each on a line of 128 bytes
  EXPECT_EQ(a.grad().storage_offset() % 16, 0);
  EXPECT_EQ(b.grad().storage_offset() % 16, 0);
}

TEST(GradientReducer, ObservedOrderReplacesTheGuess) {
  // Registered a, b, c and used in the order c, a, b: gradients come b, a, c; the guess was c, b, a.
  const at::Tensor a = parameter({1.0}), b = parameter({2.0}), c = parameter({3.0});
  GradientReducer reducer({{"a", a}, {"b", b}, {"c", c}}, world(), 1e-6);
  EXPECT_TRUE(reducer.order().empty());
  reducer.begin_step();
  reducer.begin_backward(true);
  (((c * 1.0).sin() + a).sin() + b).sum().backward();
  reducer.wait();
  EXPECT_EQ(reducer.order(), (std::vector<std::string>{"b", "a", "c"}));
  // A saved order is taken as it is; a wrong one is refused.
  GradientReducer resumed({{"a", a}, {"b", b}, {"c", c}}, world(), 1e-6, {"c", "a", "b"});
  EXPECT_EQ(resumed.order(), (std::vector<std::string>{"c", "a", "b"}));
  EXPECT_NE(mgp_test::error_of([&] {
              GradientReducer({{"a", a}}, world(), 1.0, {"x"});
            }).find("'x'"),
            std::string::npos);
}

TEST(NaiveReduce, GivesTheSameSums) {
  const at::Tensor a = parameter({1.0, 2.0}), unused = parameter({3.0});
  (a * static_cast<double>(world().rank() + 1)).sum().backward();
  StepTimes times;
  reduce_gradients_one_by_one({{"a", a}, {"unused", unused}}, world(), times);
  const int n = world().size();
  EXPECT_EQ(values_of(a.grad()), std::vector<double>(2, n * (n + 1) / 2.0));
  EXPECT_EQ(values_of(unused.grad()), std::vector<double>(1, 0.0));
  EXPECT_EQ(times.last_label, "unused");
}

TEST(Replicas, ADriftIsFoundAndTheRankNamed) {
  const at::Tensor same = at::ones({5}, at::kDouble).to(world().device());
  world().expect_same("parameters", hash_tensors({same}));
  if (world().size() == 1) return;
  const at::Tensor drifted = world().rank() == 1 ? same + 1e-16 * 3 : same;
  const std::string error = mgp_test::error_of([&] { world().expect_same("parameters", hash_tensors({drifted})); });
  EXPECT_NE(error.find("parameters"), std::string::npos);
  EXPECT_NE(error.find("1"), std::string::npos);
}

}  // namespace
}  // namespace mgp

// The step without a graph, and what stays in place for one. Graphs themselves need a GPU: tests/gpu.
#include "common/step_graph.hpp"

#include <gtest/gtest.h>

#include "common/optimizer.hpp"

namespace mgp {
namespace {

Batch batch(int64_t value) { return {at::full({2, 3}, value, at::kLong), at::full({2}, value, at::kLong)}; }

TEST(StepGraph, WithoutAGraphEveryStepRuns) {
  StepGraph graph(/*enabled=*/false, at::kCPU, nullptr);
  int steps = 0;
  for (int i = 0; i < 10; ++i) graph.run([&] { ++steps; });
  EXPECT_EQ(steps, 10);
}

TEST(StepBatches, KeepTheirTensorsOnlyWhenFixed) {
  for (const bool fixed : {false, true}) {
    StepBatches batches(2, fixed);
    batches.put(0, batch(1));
    batches.put(1, batch(2));
    const at::Tensor first = batches[0].tokens;
    batches.put(0, batch(3));
    EXPECT_EQ(batches[0].tokens.is_same(first), fixed);
    EXPECT_TRUE(at::equal(batches[0].tokens, batch(3).tokens));
    EXPECT_TRUE(at::equal(batches[0].labels, batch(3).labels));
    EXPECT_TRUE(at::equal(batches[1].tokens, batch(2).tokens));
    EXPECT_EQ(at::equal(first, batch(3).tokens), fixed);
  }
}

TEST(LearningRate, StepsAreTheSameBitsFromTheHostAndFromTheDevice) {
  // 0.1 is no fp32 number: a step that took the double would differ.
  for (const double value : {0.1, 3e-4}) {
    std::vector<at::Tensor> results;
    for (const bool on_device : {false, true}) {
      const at::Tensor weight = at::linspace(-3, 3, 1001, at::kFloat).view({7, 143}).requires_grad_();
      AdamW optimizer({{"a.weight", weight}}, {});
      LearningRate lr(at::kCPU, on_device);
      for (int step = 1; step <= 3; ++step) {
        lr.set(value / step);
        weight.mutable_grad() = at::sin(weight.detach() * step);
        optimizer.step(lr);
      }
      results.push_back(weight.detach());
    }
    EXPECT_TRUE(at::equal(results[0], results[1]));
  }
}

}  // namespace
}  // namespace mgp

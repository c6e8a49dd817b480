// Cutting a model between its layers: the cut, its errors, and parts that together are the whole model.
#include "common/layer_split.hpp"

#include <gtest/gtest.h>

#include "common/data.hpp"
#include "common/error.hpp"
#include "common/stage_model.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

std::string error_of(const std::string& split, int64_t layers, int64_t stages) {
  try {
    split_layers(split, layers, stages, "--devices");
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LayerSplit, WithoutATextTheCutIsAsEqualAsPossible) {
  EXPECT_EQ(to_string(split_layers("", 12, 3, "--devices")), "4,4,4");
  EXPECT_EQ(to_string(split_layers("", 12, 1, "--devices")), "12");
  EXPECT_EQ(to_string(split_layers("", 7, 3, "--devices")), "3,2,2");
  for (int64_t layers = 1; layers <= 9; ++layers) {
    for (int64_t stages = 1; stages <= layers; ++stages) {
      const std::vector<LayerRange> ranges = split_layers("", layers, stages, "--devices");
      ASSERT_EQ(static_cast<int64_t>(ranges.size()), stages);
      EXPECT_EQ(ranges.front().first, 0);
      EXPECT_EQ(ranges.back().last, layers);
      for (size_t i = 0; i < ranges.size(); ++i) {
        EXPECT_GE(ranges[i].count(), layers / stages);
        EXPECT_LE(ranges[i].count(), layers / stages + 1);
        if (i > 0) {
          EXPECT_EQ(ranges[i].first, ranges[i - 1].last);
        }
      }
    }
  }
}

TEST(LayerSplit, ATextIsTakenAsItIs) {
  const std::vector<LayerRange> ranges = split_layers("5,1,6", 12, 3, "--devices");
  ASSERT_EQ(ranges.size(), 3U);
  EXPECT_EQ(ranges[1].first, 5);
  EXPECT_EQ(ranges[1].last, 6);
  EXPECT_EQ(to_string(ranges), "5,1,6");
}

TEST(LayerSplit, WhatDoesNotFitIsSaidInOneLine) {
  EXPECT_TRUE(contains(error_of("", 3, 4), {"4 stages", "3 layers", "--devices"}));
  EXPECT_TRUE(contains(error_of("", 3, 0), {"--devices", "at least 1"}));
  EXPECT_TRUE(contains(error_of("4,4,4", 12, 2), {"--split 4,4,4", "3 stages", "there are 2", "--devices"}));
  EXPECT_TRUE(contains(error_of("6,0,6", 12, 3), {"--split 6,0,6", "stage 1", "at least 1"}));
  EXPECT_TRUE(contains(error_of("6,-1,7", 12, 3), {"stage 1", "at least 1"}));
  EXPECT_TRUE(contains(error_of("4,4,3", 12, 3), {"11 layers", "12"}));
  EXPECT_TRUE(contains(error_of("4,4,5", 12, 3), {"more than the model's 12 layers"}));
  EXPECT_TRUE(contains(error_of("9223372036854775807,9223372036854775807", 12, 2), {"more than"}));
  for (const char* text : {"4,,4", "4,4,", ",", "a", "4 4", "4;4", "4.0,4", "99999999999999999999", " 6,6"}) {
    EXPECT_TRUE(contains(error_of(text, 8, 2), {"--split", "for example"})) << text;
    EXPECT_EQ(error_of(text, 8, 2).find('\n'), std::string::npos);
  }
}

class Parts : public ::testing::TestWithParam<std::tuple<ModelKind, bool>> {
 protected:
  ModelConfig config() const {
    ModelConfig config = preset_config("tiny", std::get<0>(GetParam()));
    config.layers = 4;
    config.checkpoint_activations = std::get<1>(GetParam());
    return config;
  }
};

TEST_P(Parts, HoldTheWholeModelOnceUnderItsNamesAndWithItsValues) {
  const NamedTensors whole = named_parameters(*make_model(config(), 7, at::kCPU, at::kFloat));
  for (int64_t stages = 1; stages <= 4; ++stages) {
    size_t next = 0;
    for (const StagePart& part : stage_parts(split_layers("", config().layers, stages, "--devices"))) {
      const auto stage = make_stage(config(), part, 7, at::kCPU, at::kFloat);
      const std::vector<ParameterShape> shapes = stage_parameter_shapes(config(), part);
      const NamedTensors mine = named_parameters(*stage);
      ASSERT_EQ(mine.size(), shapes.size());
      for (size_t i = 0; i < mine.size(); ++i, ++next) {
        ASSERT_LT(next, whole.size());
        EXPECT_EQ(mine[i].first, whole[next].first);
        EXPECT_EQ(mine[i].first, shapes[i].name);
        EXPECT_EQ(mine[i].second.sizes(), at::IntArrayRef(shapes[i].shape));
        EXPECT_TRUE(at::equal(mine[i].second, whole[next].second)) << mine[i].first;
        EXPECT_TRUE(mine[i].second.is_leaf() && mine[i].second.requires_grad());
      }
    }
    EXPECT_EQ(next, whole.size());
  }
}

TEST_P(Parts, ComputeWhatTheWholeModelComputesBitForBit) {
  const Batch batch =
      SyntheticTokens(config(), 3, 5, SyntheticTokens::Mode::fresh, at::kCPU).rows(1, {0, 5});  // [5, T], [5]
  const Model whole = make_model(config(), 7, at::kCPU, at::kDouble);
  const at::Tensor expected = whole->forward(batch.tokens);  // [5, classes]
  cross_entropy_sum(expected, batch.labels).backward();
  const NamedTensors wanted = named_parameters(*whole);

  for (const char* split : {"4", "1,3", "2,1,1"}) {
    const int64_t stages = split[1] == '\0' ? 1 : split[3] == '\0' ? 2 : 3;
    std::vector<std::shared_ptr<StageModel>> chain;
    at::Tensor x = batch.tokens;  // [5, T], then [5, T, C], at last [5, classes]
    for (const StagePart& part : stage_parts(split_layers(split, 4, stages, "--devices"))) {
      chain.push_back(make_stage(config(), part, 7, at::kCPU, at::kDouble));
      x = chain.back()->forward(x);
    }
    EXPECT_TRUE(at::equal(x, expected)) << split;
    cross_entropy_sum(x, batch.labels).backward();
    size_t next = 0;
    for (const auto& stage : chain) {
      for (const auto& [name, parameter] : named_parameters(*stage)) {
        EXPECT_TRUE(at::equal(parameter.grad(), wanted[next++].second.grad())) << split << " " << name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(BothModels, Parts,
                         ::testing::Combine(::testing::Values(ModelKind::classifier, ModelKind::mlp),
                                            ::testing::Bool()));

TEST(StageModel, OnTheMetaDeviceNothingIsAllocated) {
  const ModelConfig config = preset_config("base", ModelKind::classifier);
  for (const StagePart& part : stage_parts(split_layers("", config.layers, 3, "--devices"))) {
    for (const auto& [name, parameter] : named_parameters(*make_stage(config, part, 1, at::kMeta, at::kFloat))) {
      EXPECT_TRUE(parameter.is_meta()) << name;
    }
  }
}

}  // namespace
}  // namespace mgp

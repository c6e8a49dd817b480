// Sizes, names and counts that follow from the configuration alone.
#include "common/model_config.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "common/error.hpp"

namespace mgp {
namespace {

ModelConfig tiny(ModelKind kind) { return preset_config("tiny", kind); }

std::string error_of(const ModelConfig& config) {
  try {
    check_config(config);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(ModelConfig, BasePresetHasTheSizesOfTheReference) {
  EXPECT_EQ(parameter_count(preset_config("base", ModelKind::classifier)), 109'836'298);
  EXPECT_EQ(parameter_count(preset_config("base", ModelKind::mlp)), 138'129'418);
}

TEST(ModelConfig, EveryPresetIsValidAndDividesWhereThePatternsCut) {
  for (const char* preset : {"tiny", "small", "base"}) {
    for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
      const ModelConfig config = preset_config(preset, kind);
      EXPECT_EQ(error_of(config), "") << preset;
      for (const int64_t parts : {2, 3, 4, 6}) {
        EXPECT_EQ(config.heads % parts, 0) << preset;
        EXPECT_EQ(config.layers % parts, 0) << preset;
        EXPECT_EQ(config.dim % parts, 0) << preset;
        EXPECT_EQ(config.mlp_dim % parts, 0) << preset;
      }
      EXPECT_EQ(config.classes, 10);
      EXPECT_EQ(config.dropout, 0.0);
    }
  }
  const ModelConfig config = tiny(ModelKind::classifier);
  EXPECT_EQ(config.vocab_size, 1008);
  EXPECT_EQ(config.seq_len, 36);
  EXPECT_EQ(config.dim, 96);
  EXPECT_EQ(config.mlp_dim, 384);
  EXPECT_EQ(tiny(ModelKind::mlp).mlp_dim, 768);
}

TEST(ModelConfig, UnknownPresetIsOneLineThatNamesTheChoices) {
  try {
    preset_config("huge", ModelKind::classifier);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "--preset 'huge' is unknown: use tiny, small or base");
  }
}

TEST(ModelConfig, BadSizesNameFlagValueAndLimit) {
  ModelConfig config = tiny(ModelKind::classifier);
  config.heads = 7;
  EXPECT_EQ(error_of(config), "--heads 7 does not divide --dim 96: each head takes dim / heads columns");
  config.kind = ModelKind::mlp;  // has no heads, so they do not matter
  EXPECT_EQ(error_of(config), "");
  config.layers = 0;
  EXPECT_EQ(error_of(config), "--layers 0 is out of range: 1 to 16384");
  config = tiny(ModelKind::classifier);
  config.vocab_size = -5;
  EXPECT_EQ(error_of(config), "--vocab-size -5 is out of range: 1 to 4194304");
  config = tiny(ModelKind::classifier);
  config.dim = std::numeric_limits<int64_t>::max();
  EXPECT_NE(error_of(config).find("--dim"), std::string::npos);
  for (const double dropout : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    config = tiny(ModelKind::classifier);
    config.dropout = dropout;
    EXPECT_NE(error_of(config).find("--dropout"), std::string::npos) << dropout;
  }
}

TEST(ModelConfig, TheLargestAllowedSizesDoNotOverflow) {
  ModelConfig config;
  config.vocab_size = config.seq_len = config.dim = config.heads = config.mlp_dim = config.classes = int64_t{1} << 22;
  config.layers = 1;
  EXPECT_EQ(error_of(config), "");
  int64_t layer = 0, frame = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    EXPECT_GT(parameter.numel(), 0) << parameter.name;
    (parameter.name.starts_with("encoder") ? layer : frame) += parameter.numel();
  }
  const double most = static_cast<double>(layer) * 16384 + static_cast<double>(frame);
  EXPECT_LT(most, 9.2e18);
}

TEST(ModelConfig, NamesAreThoseOfPyTorchsModules) {
  ModelConfig config = tiny(ModelKind::classifier);
  config.layers = 1;
  std::vector<std::string> names;
  for (const ParameterShape& parameter : parameter_shapes(config)) names.push_back(parameter.name);
  const std::string layer = "encoder.layers.0.";
  const std::vector<std::string> expected = {"embedding.weight",
                                             "position.weight",
                                             layer + "self_attn.in_proj_weight",
                                             layer + "self_attn.in_proj_bias",
                                             layer + "self_attn.out_proj.weight",
                                             layer + "self_attn.out_proj.bias",
                                             layer + "linear1.weight",
                                             layer + "linear1.bias",
                                             layer + "linear2.weight",
                                             layer + "linear2.bias",
                                             layer + "norm1.weight",
                                             layer + "norm1.bias",
                                             layer + "norm2.weight",
                                             layer + "norm2.bias",
                                             "norm.weight",
                                             "norm.bias",
                                             "head.weight",
                                             "head.bias"};
  EXPECT_EQ(names, expected);

  config = tiny(ModelKind::mlp);
  config.layers = 1;
  names.clear();
  for (const ParameterShape& parameter : parameter_shapes(config)) names.push_back(parameter.name);
  const std::vector<std::string> expected_mlp = {"embedding.weight",    "position.weight",     "layers.0.norm.weight",
                                                 "layers.0.norm.bias",  "layers.0.fc1.weight", "layers.0.fc1.bias",
                                                 "layers.0.fc2.weight", "layers.0.fc2.bias",   "norm.weight",
                                                 "norm.bias",           "head.weight",         "head.bias"};
  EXPECT_EQ(names, expected_mlp);
}

TEST(ModelConfig, ArrivalOrderHoldsEveryNameOnce) {
  for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
    std::multiset<std::string> names, arrivals;
    for (const ParameterShape& parameter : parameter_shapes(tiny(kind))) names.insert(parameter.name);
    for (const std::string& name : gradient_arrival_order(tiny(kind))) arrivals.insert(name);
    EXPECT_EQ(names, arrivals);
  }
}

TEST(ModelConfig, WeightDecayActsOnMatricesAlone) {
  EXPECT_TRUE(has_weight_decay("embedding.weight", 2));
  EXPECT_TRUE(has_weight_decay("encoder.layers.0.self_attn.in_proj_weight", 2));
  EXPECT_TRUE(has_weight_decay("head.weight", 2));
  EXPECT_FALSE(has_weight_decay("position.weight", 2));
  EXPECT_FALSE(has_weight_decay("module.position.weight", 2));  // under a wrapper's prefix too
  EXPECT_FALSE(has_weight_decay("norm.weight", 1));
  EXPECT_FALSE(has_weight_decay("encoder.layers.0.self_attn.in_proj_bias", 1));
}

TEST(ModelConfig, FlopsOfTheReferenceStep) {
  // 6 x 84,934,656 multiplying parameters x 8,192 tokens + 12 x 12 layers x 256^2 x 768 x 32 rows, and the head.
  const double expected = 6.0 * 84934656.0 * 8192.0 + 12.0 * 12.0 * 65536.0 * 768.0 * 32.0 + 6.0 * 7680.0 * 32.0;
  const double classifier = flops_per_step(preset_config("base", ModelKind::classifier), 32);
  EXPECT_DOUBLE_EQ(classifier, expected);
  EXPECT_NEAR(classifier, 4.41e12, 0.005e12);
  EXPECT_NEAR(flops_per_step(preset_config("base", ModelKind::mlp), 32), 5.57e12, 0.005e12);
  EXPECT_EQ(flops_per_step(preset_config("base", ModelKind::mlp), 0), 0.0);
}

}  // namespace
}  // namespace mgp

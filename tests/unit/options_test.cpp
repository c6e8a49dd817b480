// The command line: defaults, overrides, what settle() decides, help. Refusals are tried on the executables (tests/trainers).
#include "common/options.hpp"

#include <gtest/gtest.h>

#include "common/error.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

const TrainerInfo kInfo{"train_x", "x", "train_x: for tests", true};

Options parse(std::vector<std::string> arguments, const Launch& launch = {}) {
  arguments.insert(arguments.begin(), "train_x");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  Options options;
  parse_options(static_cast<int>(argv.size()), argv.data(), kInfo, options);
  settle(options, launch);
  return options;
}

TEST(Options, DefaultsOnACpu) {
  const Options o = parse({"--device", "cpu"});
  EXPECT_EQ(o.preset, "tiny");
  EXPECT_EQ(o.model.dim, 96);
  EXPECT_EQ(o.batch_size, 8);
  EXPECT_EQ(o.global_batch_size, 8);
  EXPECT_FALSE(o.save.has_value());
}

TEST(Options, BatchGrowsWithTheRanksUnlessTheGlobalOneIsGiven) {
  Launch launch;
  launch.world_size = 3;
  EXPECT_EQ(parse({"--device", "cpu", "--batch-size", "5"}, launch).global_batch_size, 15);
  const Options o = parse({"--device", "cpu", "--global-batch-size", "7"}, launch);
  EXPECT_EQ(o.global_batch_size, 7);
  EXPECT_EQ(o.batch_size, 3);  // the largest rank's
}

TEST(Options, SizesOverrideThePreset) {
  const Options o =
      parse({"--device", "cpu", "--preset", "small", "--layers", "2", "--mlp-dim", "64", "--model", "mlp"});
  EXPECT_EQ(o.model.layers, 2);
  EXPECT_EQ(o.model.mlp_dim, 64);
  EXPECT_EQ(o.model.kind, ModelKind::mlp);
  EXPECT_EQ(o.model.dim, preset_config("small", ModelKind::mlp).dim);
}

TEST(Options, SaveWithoutAValueTakesTheArtifactName) {
  EXPECT_EQ(parse({"--device", "cpu", "--save"}).save, "x_tiny_transformer_full_state.pt");
  EXPECT_EQ(parse({"--device", "cpu", "--save", "--steps", "3"}).save, "x_tiny_transformer_full_state.pt");
  EXPECT_EQ(parse({"--device", "cpu", "--save", "a.pt"}).save, "a.pt");
}

TEST(Options, PredictionIsAboutGpusAndTheWorldAskedFor) {
  const Options o = parse({"--predict", "--world", "6"});
  EXPECT_TRUE(o.cuda);
  EXPECT_EQ(o.preset, "base");
  EXPECT_EQ(o.global_batch_size, 6 * 32);
}

TEST(Options, ShortHelpIsShortAndTheLongOneHasEverything) {
  const std::string brief = help_text(kInfo, false), all = help_text(kInfo, true);
  EXPECT_EQ(brief.find("--comm-timeout"), std::string::npos);
  for (const char* flag : {"--comm-timeout", "--inject", "--dump-batches", "--seed", "--preset", "--verify"}) {
    EXPECT_NE(all.find(flag), std::string::npos) << flag;
  }
}

TEST(Options, EverySettingIsInTheTable) {
  std::string text;
  for (const auto& [name, value] : settings(parse({"--device", "cpu", "--seed", "77", "--accumulate", "2"}))) {
    text += name + " " + value + "\n";
  }
  for (const char* part : {"seed 77", "2 backward passes", "fp32", "clip norm 1", "tiny classifier"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(Text, Numbers) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
  EXPECT_EQ(with_commas(-123456), "-123,456");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(12), "12 B");
  EXPECT_EQ(human_seconds(75), "1m15s");
  EXPECT_EQ(human_seconds(3.2), "3s");
  EXPECT_EQ(edit_distance("--stepz", "--steps"), 1u);
}

TEST(Text, TableAligns) {
  EXPECT_EQ(table("t", {{"a", "n"}, {"bb", "10"}, {"c", "5"}}, true), "t\n  a    n\n  bb  10\n  c    5\n");
}

TEST(Text, AFileNameOfItsOwnForEachPart) {
  EXPECT_EQ(with_part("m.jsonl", "bf16"), "m.bf16.jsonl");
  EXPECT_EQ(with_part("runs.d/m", "rank1"), "runs.d/m.rank1");
  EXPECT_EQ(with_part("runs.d/a.b.json", "fp32"), "runs.d/a.b.fp32.json");
  EXPECT_EQ(with_part("runs/.hidden", "fp32"), "runs/.hidden.fp32");
  EXPECT_EQ(with_part("", "fp32"), "");
}

TEST(Options, Pace) {
  const Pace both = parse({"--device", "cpu", "--pace", "init,forward=0.5"}).pace;
  EXPECT_EQ(both.phases, (std::vector<std::string>{"init", "forward"}));
  EXPECT_EQ(both.seconds, 0.5);
  EXPECT_FALSE(both.key);
  EXPECT_TRUE(parse({"--device", "cpu", "--pace", "step=key"}).pace.key);
  EXPECT_EQ(parse({"--device", "cpu", "--pace", "step"}).pace.seconds, 5.0);
}

TEST(Options, FastTakesWhatPrecisionAndDeviceAllow) {
  // --predict is about GPUs on every machine.
  const Options bf16 = parse({"--predict", "--fast", "--precision", "bf16"});
  EXPECT_TRUE(bf16.cuda_graph);
  EXPECT_TRUE(bf16.low_weights());
  const Options fp32 = parse({"--predict", "--fast"});
  EXPECT_TRUE(fp32.cuda_graph);
  EXPECT_FALSE(fp32.low_weights());
  EXPECT_FALSE(parse({"--predict", "--fast", "--precision", "fp64"}).cuda_graph);
  const Options mine =
      parse({"--predict", "--fast", "--precision", "bf16", "--weights", "autocast", "--cuda-graph", "off"});
  EXPECT_FALSE(mine.cuda_graph);
  EXPECT_FALSE(mine.low_weights());
  EXPECT_FALSE(parse({"--device", "cpu", "--fast"}).cuda_graph);
}

TEST(Options, WhatAGraphCannotDoIsRefusedWithTheReason) {
  const auto reason = [](std::vector<std::string> arguments) -> std::string {
    arguments.insert(arguments.begin(), "--predict");
    try {
      parse(arguments);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(reason({"--cuda-graph", "on", "--debug", "detail"}), "--cuda-graph on: --debug detail"));
  EXPECT_TRUE(has(reason({"--fast", "--debug", "detail"}), "--fast, which means --cuda-graph on: --debug detail"));
  EXPECT_EQ(reason({"--fast", "--debug", "detail", "--cuda-graph", "off"}), "");
  EXPECT_TRUE(has(reason({"--cuda-graph", "on", "--pace", "step"}), "--pace"));
  EXPECT_TRUE(has(reason({"--cuda-graph", "on", "--precision", "fp64"}), "fp64"));
  EXPECT_TRUE(has(reason({"--cuda-graph", "on", "--inject", "inf@0,2"}), "--inject inf"));
  EXPECT_EQ(reason({"--cuda-graph", "on", "--inject", "stall@0,2"}), "");
  EXPECT_TRUE(has(reason({"--cuda-graph", "on", "--checkpoint-activations", "--dropout", "0.1"}), "--dropout"));
  EXPECT_EQ(reason({"--cuda-graph", "on", "--checkpoint-activations"}), "");
}

}  // namespace
}  // namespace mgp

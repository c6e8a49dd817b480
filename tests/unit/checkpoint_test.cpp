// The full state: an interrupted run continues as if it had not been, and what does not fit is refused whole.
#include "common/checkpoint.hpp"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/unit/files.hpp"

namespace mgp {
namespace {

using Dict = PtValue::Dict;

ModelConfig small_config(int64_t layers = 2) {
  ModelConfig config;
  config.vocab_size = 11;
  config.seq_len = 5;
  config.dim = 8;
  config.heads = 2;
  config.layers = layers;
  config.mlp_dim = 16;
  config.classes = 3;
  return config;
}

NamedTensors random_parameters(const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
  NamedTensors parameters;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    parameters.emplace_back(parameter.name, at::rand(parameter.shape, dtype).requires_grad_(true));
  }
  return parameters;
}

void train(AdamW& optimizer, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) {
    int64_t place = 0;
    for (const auto& [name, parameter] : optimizer.parameters()) {
      const at::Tensor gradient =
          at::arange(parameter.numel(), parameter.options().requires_grad(false)).add(++place).mul(step).sin();
      const_cast<at::Tensor&>(parameter).mutable_grad() = gradient.view(parameter.sizes());
    }
    optimizer.step(1e-2 / static_cast<double>(step));
  }
}

void expect_equal(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(at::equal(a[i].second, b[i].second)) << a[i].first;
  }
}

TrainingState some_training() {
  TrainingState training;
  training.step = 5;
  training.seed = std::numeric_limits<uint64_t>::max() - 1;
  training.global_batch_size = 12;
  training.next_sample = 60;
  training.data = "repeat";
  training.precision = "bf16";
  training.bucket_order = {"head.bias", "head.weight"};
  training.loss_scale = 4096.0;
  training.good_steps = 17;
  capture_rng(training, at::kCPU);
  return training;
}

std::string load_error(const std::string& path) {
  return error_of<UsageError>([&] { load_full_state(path); });
}

// Trials B18 and B36.
TEST(Checkpoint, AResumedRunEqualsAnUninterruptedOne) {
  const ScratchFolder folder;
  const ModelConfig config = small_config();
  AdamW whole(random_parameters(config), {});
  train(whole, 1, 5);
  const TrainingState training = some_training();
  save_full_state(folder / "a.pt", config, whole, training);
  train(whole, 6, 10);

  AdamW resumed(random_parameters(config), {});
  const void* const place = resumed.parameters()[0].second.data_ptr();
  const FullState state = load_full_state(folder / "a.pt");
  check_full_state(state, config, at::kFloat, folder / "a.pt");
  restore(state, resumed);
  EXPECT_EQ(resumed.parameters()[0].second.data_ptr(), place);  // in place: buckets and graphs hold these tensors
  EXPECT_TRUE(resumed.parameters()[0].second.requires_grad());
  train(resumed, state.training.step + 1, 10);
  expect_equal(resumed.parameters(), whole.parameters());
  expect_equal(resumed.exp_avg(), whole.exp_avg());
  expect_equal(resumed.exp_avg_sq(), whole.exp_avg_sq());
  expect_equal(resumed.steps(), whole.steps());

  EXPECT_EQ(state.config.layers, 2);
  EXPECT_EQ(state.training.step, 5);
  EXPECT_EQ(state.training.seed, training.seed);
  EXPECT_EQ(state.training.global_batch_size, 12);
  EXPECT_EQ(state.training.next_sample, 60);
  EXPECT_EQ(state.training.data, "repeat");
  EXPECT_EQ(state.training.precision, "bf16");
  EXPECT_EQ(state.training.bucket_order, training.bucket_order);
  EXPECT_EQ(state.training.loss_scale, 4096.0);
  EXPECT_EQ(state.training.good_steps, 17);
  EXPECT_TRUE(at::equal(state.training.rng_cpu, training.rng_cpu));
  EXPECT_FALSE(state.training.rng_cuda.defined());
}

// Trial B90: no hidden copies.
TEST(Checkpoint, TheFileIsNoLargerThanItsTensors) {
  const ScratchFolder folder;
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  const AdamW optimizer(random_parameters(config), {});
  save_full_state(folder / "a.pt", config, optimizer, {});
  const double bytes = 3.0 * 4.0 * static_cast<double>(parameter_count(config));
  EXPECT_NEAR(static_cast<double>(size_of_file(folder / "a.pt")) / bytes, 1.0, 0.02);
}

TEST(Checkpoint, PlainStateDictsAreWeightsOnly) {
  const ScratchFolder folder;
  const ModelConfig config = small_config();
  const NamedTensors weights = random_parameters(config);
  Dict dict;
  for (const auto& [name, tensor] : weights) dict.emplace_back(name, PtValue{tensor});
  write_pt(folder / "plain.pt", {dict});
  write_pt(folder / "in a model.pt", {Dict{{"epoch", {int64_t{3}}}, {"model", {dict}}, {"optimizer", {Dict{}}}}});
  for (const char* name : {"plain.pt", "in a model.pt"}) {
    AdamW optimizer(random_parameters(config), {});
    const FullState state = load_full_state(folder / name);
    EXPECT_EQ(state.training.step, 0);
    check_full_state(state, config, at::kFloat, folder / name);
    restore(state, optimizer);
    expect_equal(optimizer.parameters(), weights);
    EXPECT_TRUE(state.exp_avg.empty());
  }
}

TEST(Checkpoint, EverythingThatDiffersIsListedAtOnce) {
  const ScratchFolder folder;
  const std::string path = folder / "a.pt";
  save_full_state(path, small_config(), AdamW(random_parameters(small_config()), {}), {});
  const FullState state = load_full_state(path);
  const auto complaint = [&](const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
    return error_of<UsageError>([&] { check_full_state(state, config, dtype, path); });
  };
  EXPECT_EQ(complaint(small_config()), "");
  ModelConfig config = small_config(3);
  config.heads = 4;
  config.classes = 5;
  const std::string text = complaint(config);
  EXPECT_TRUE(says(text, "--load " + path + ": does not fit this run: "));
  EXPECT_TRUE(says(text, "heads is 2 in the file, 4 here"));
  EXPECT_TRUE(says(text, "layers is 2 in the file, 3 here"));
  EXPECT_TRUE(says(text, "classes is 3 in the file, 5 here"));
  EXPECT_TRUE(says(text, " missing: "));
  EXPECT_TRUE(says(text, " of another shape: "));
  EXPECT_TRUE(says(text, "[3] in the file, [5] here"));
  EXPECT_FALSE(says(text, "not in this model"));
  EXPECT_TRUE(says(complaint(small_config(1)), " not in this model: "));
  config = small_config();
  config.kind = ModelKind::mlp;
  EXPECT_TRUE(says(complaint(config), "model is classifier in the file, mlp here"));
  config = small_config();
  config.dropout = 0.1;  // no size: may be changed
  EXPECT_EQ(complaint(config), "");
}

TEST(Checkpoint, OnlyExactConversions) {
  const ScratchFolder folder;
  const ModelConfig config = small_config();
  const auto save = [&](const char* name, at::ScalarType dtype) {
    save_full_state(folder / name, config, AdamW(random_parameters(config, dtype), {}), {});
    return load_full_state(folder / name);
  };
  const FullState single = save("single.pt", at::kFloat), twice = save("double.pt", at::kDouble);
  check_full_state(single, config, at::kDouble, "x");
  check_full_state(twice, config, at::kDouble, "x");
  const std::string text = error_of<UsageError>([&] { check_full_state(twice, config, at::kFloat, "x"); });
  EXPECT_TRUE(says(text, "is Double in the file, Float here"));
  EXPECT_TRUE(says(text, "exp_avg of "));
  AdamW wide(random_parameters(config, at::kDouble), {});
  restore(single, wide);
  for (size_t i = 0; i < single.model.size(); ++i) {
    EXPECT_TRUE(at::equal(wide.parameters()[i].second, single.model[i].second.to(at::kDouble)));
  }
  FullState whole = single;
  whole.model[0].second = whole.model[0].second.to(at::kInt);
  EXPECT_TRUE(
      says(error_of<UsageError>([&] { check_full_state(whole, config, at::kFloat, "x"); }), "is Int in the file"));
}

TEST(Checkpoint, RestoreChangesNothingUnlessAllOfItFits) {
  const ModelConfig config = small_config();
  AdamW optimizer(random_parameters(config), {});
  FullState state;
  state.model = random_parameters(config);
  state.model.pop_back();
  const at::Tensor before = optimizer.parameters()[0].second.detach().clone();
  EXPECT_TRUE(says(error_of<RunError>([&] { restore(state, optimizer); }), "was not checked"));
  EXPECT_TRUE(at::equal(optimizer.parameters()[0].second, before));
}

TEST(Checkpoint, ForeignAndDamagedContents) {
  const ScratchFolder folder;
  const std::string path = folder / "a.pt";
  const ModelConfig config = small_config(1);
  const AdamW optimizer(random_parameters(config), {});
  const FullState good{
      config, optimizer.parameters(), optimizer.exp_avg(), optimizer.exp_avg_sq(), optimizer.steps(), some_training()};
  const auto entry = [](PtValue& value, const std::string& key) -> PtValue& {
    return *const_cast<PtValue*>(value.find(key));
  };
  const auto complaint = [&](const PtValue& value) {
    write_pt(path, value);
    return load_error(path);
  };
  const auto with_training = [&](const std::string& key, const PtValue& value) {
    PtValue root = full_state_value(good);
    entry(entry(root, "training"), key) = value;
    return complaint(root);
  };
  EXPECT_EQ(complaint(full_state_value(good)), "");
  EXPECT_TRUE(says(with_training("step", {int64_t{-1}}), "--load " + path + ": damaged: step is -1"));
  EXPECT_TRUE(says(with_training("step", {std::string("1")}), "step is a text, not an integer"));
  EXPECT_TRUE(says(with_training("data", {std::string("other")}), "damaged: data is other"));
  EXPECT_TRUE(says(with_training("rng_cpu", {at::ones({3})}), "rng_cpu is no random state"));
  EXPECT_TRUE(says(with_training("loss_scale", {0.0}), "loss_scale is 0"));
  EXPECT_TRUE(says(with_training("loss_scale", {std::numeric_limits<double>::infinity()}), "loss_scale is inf"));
  EXPECT_TRUE(says(with_training("good_steps", {int64_t{-1}}), "good_steps is -1"));
  PtValue root = full_state_value(good);
  entry(root, "format") = {std::string("multi-gpu-playground full state 2")};
  EXPECT_TRUE(says(complaint(root), "was written by another version"));
  entry(root, "format") = {std::string("somebody else's")};
  EXPECT_TRUE(says(complaint(root), "is of the foreign format \"somebody else's\""));
  root = full_state_value(good);
  std::get<Dict>(root.value).erase(std::get<Dict>(root.value).begin());
  EXPECT_TRUE(says(complaint(root), "the file has no entry model"));
  root = full_state_value(good);
  std::get<Dict>(entry(entry(root, "optimizer"), "exp_avg").value).pop_back();
  EXPECT_TRUE(says(complaint(root), "damaged: optimizer/exp_avg has "));
  root = full_state_value(good);
  std::get<Dict>(entry(entry(root, "optimizer"), "step").value)[0].second = {at::ones({2})};
  EXPECT_TRUE(says(complaint(root), "has the shape [2]"));

  EXPECT_TRUE(says(complaint({Dict{}}), "holds no weights"));
  EXPECT_TRUE(says(complaint({at::ones({2})}), "its state dict is a tensor, not a dictionary"));
  EXPECT_TRUE(says(complaint({Dict{{"weight", {at::ones({2})}}, {"epoch", {int64_t{3}}}}}),
                   "entry epoch of its state dict is an integer"));
  EXPECT_TRUE(says(load_error(folder / "none.pt"), "--load " + folder.path() + "/none.pt: No such file or directory"));
}

TEST(Checkpoint, RandomStateContinues) {
  TrainingState training;
  capture_rng(training, at::kCPU);
  const at::Tensor expected = at::rand({8});
  restore_rng(training, at::kCPU);
  EXPECT_TRUE(at::equal(at::rand({8}), expected));
  training.rng_cpu = at::zeros({7}, at::kByte);
  EXPECT_TRUE(
      says(error_of<UsageError>([&] { restore_rng(training, at::kCPU); }), "does not fit this version of LibTorch"));
  restore_rng({}, at::kCPU);  // weights only: nothing to restore
}

// For tests/pytorch/test_files.py, see pt_file_test.cpp.
TEST(Checkpoint, WritesForPython) {
  const std::string out = environment("MGP_CHECKPOINT_OUT");
  if (out.empty()) GTEST_SKIP() << "for tests/pytorch/test_files.py";
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  AdamW optimizer(random_parameters(config), {});
  train(optimizer, 1, 2);
  save_full_state(out, config, optimizer, some_training());
}

TEST(Checkpoint, LoadsFromPython) {
  const std::string in = environment("MGP_CHECKPOINT_IN");
  if (in.empty()) GTEST_SKIP() << "for tests/pytorch/test_files.py";
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  const FullState state = load_full_state(in);
  check_full_state(state, config, at::kFloat, in);
  AdamW optimizer(random_parameters(config), {});
  restore(state, optimizer);
  std::printf("loaded %zu weights, step %ld, sum %.10g\n", state.model.size(), static_cast<long>(state.training.step),
              [&] {
                double sum = 0.0;
                const at::NoGradGuard no_grad;
                for (const auto& [name, tensor] : optimizer.parameters())
                  sum += tensor.to(at::kDouble).sum().item<double>();
                return sum;
              }());
}

}  // namespace
}  // namespace mgp

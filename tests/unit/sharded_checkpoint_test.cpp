// The sharded checkpoint as a reader meets it: whole, and mangled in every way.
#include "common/sharded_checkpoint.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/unit/files.hpp"
#include "tests/unit/fuzz.hpp"
#include "tests/unit/shard_folder.hpp"

namespace mgp {
namespace {

TEST(ShardedCheckpoint, BlocksComeTogether) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "step-5";
  write_to(folder, good_folder());
  EXPECT_TRUE(is_sharded_checkpoint(folder));
  EXPECT_FALSE(is_sharded_checkpoint(scratch / "none"));
  EXPECT_FALSE(is_sharded_checkpoint(folder + "/" + kIndexName));
  const FullState state = load_sharded(folder + "/");
  expect_good(state);
  EXPECT_EQ(state.config.layers, tiny().layers);
  EXPECT_EQ(state.config.kind, ModelKind::mlp);
  EXPECT_EQ(state.training.step, 5);
  EXPECT_EQ(state.training.seed, ~uint64_t{0});
  EXPECT_EQ(state.training.loss_scale, 1024.0);
  EXPECT_EQ(state.training.bucket_order, (std::vector<std::string>{"bias", "weight"}));
  EXPECT_TRUE(at::equal(state.training.rng_cpu, at::arange(200, at::kByte)));
  EXPECT_FALSE(state.training.rng_cuda.defined());
}

TEST(ShardedCheckpoint, EachElementMustBeThereOnce) {
  const ScratchFolder scratch;
  int number = 0;
  const auto complaint = [&](const std::function<void(Written&)>& change, const std::vector<Part>& parts) {
    Written written = good_folder(parts);
    change(written);
    const std::string folder = scratch / std::to_string(++number);
    write_to(folder, written);
    return load_error(folder);
  };
  const std::vector<Part> good = {{0, 2, 1, 2}, {2, 3, 0, 1}};
  const auto as_it_is = [](Written&) {};
  EXPECT_EQ(complaint(as_it_is, good), "");
  EXPECT_TRUE(says(complaint(as_it_is, {{0, 2, 1, 2}, {3, 2, 0, 1}}), "row 2 of model.weight is missing"));
  EXPECT_TRUE(says(complaint(as_it_is, {{0, 2, 1, 2}, {2, 2, 0, 1}}), "row 4 of model.weight is missing"));
  EXPECT_TRUE(says(complaint(as_it_is, {{1, 1, 1, 2}, {2, 3, 0, 1}}), "row 0 of model.weight is missing"));
  EXPECT_TRUE(says(complaint(as_it_is, {{0, 3, 1, 2}, {2, 3, 0, 1}}), "row 2 of model.weight is there twice"));
  EXPECT_TRUE(says(complaint(
                       [](Written& w) {
                         w.index.parameters.push_back({"more", {2}});
                       },
                       good),
                   "row 0 of model.more is missing"));
  EXPECT_TRUE(
      says(complaint([](Written& w) { w.index.parameters.pop_back(); }, good), "which index.json does not name"));
  EXPECT_TRUE(says(complaint(
                       [](Written& w) {
                         w.index.parameters[0].shape = {5, 3};
                       },
                       good),
                   "has the shape [2, 2], which is no part of [5, 3]"));
  EXPECT_TRUE(
      says(complaint([](Written& w) { w.index.parameters[0].shape = {10}; }, good), "which is no part of [10]"));
  EXPECT_TRUE(says(complaint(
                       [](Written& w) {
                         w.index.parameters[0].shape = {1 << 30, 2};
                       },
                       good),
                   "has more elements than the files"));
  EXPECT_TRUE(says(complaint([](Written& w) { w.tensors[1][0].second = w.tensors[1][0].second.to(at::kDouble); }, good),
                   "model.weight has two dtypes"));
  const auto with_offsets = [&](const std::string& from, const std::string& to) {
    const auto change = [&](Written& w) { w.offsets[1].replace(w.offsets[1].find(from), from.size(), to); };
    return complaint(change, good);
  };
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[3, 0]"), "model.weight has 3 rows at the offset [3, 0], of [5, 2]"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[2, 1]"), "at the offset [2, 1]"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[2]"), "has no offset for each dimension"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[-1, 0]"), "saved_offsets that are no offsets"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[1152921504606846976, 0]"), "at the offset [1152921504606846976, 0]"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[1e300, 0]"), "saved_offsets that are no offsets"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "\"2, 0\""), "has no saved_offsets"));
  EXPECT_TRUE(says(with_offsets("[2, 0]", "[2, 0"), "DCP_SHARDING_INFO is no JSON object"));
  EXPECT_TRUE(says(with_offsets("model.weight", "model.other"), "model.weight has no offset"));
}

TEST(ShardedCheckpoint, MangledFoldersGiveOneLine) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "a", index_path = folder + "/" + kIndexName;
  const std::string second = folder + "/" + shard_file_name(1);
  const auto fresh = [&] { write_to(folder, good_folder()); };
  const auto with_index = [&](const std::string& from, const std::string& to) {
    fresh();
    std::string text = read_file(index_path);
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    write_file(index_path, text.replace(at, from.size(), to));
    return load_error(folder);
  };
  EXPECT_TRUE(says(load_error(folder), "--load " + folder + ": no such folder"));
  mkdir(folder.c_str(), 0777);
  EXPECT_TRUE(says(load_error(folder), "--load " + folder + ": has no index.json"));
  fresh();
  unlink(second.c_str());
  EXPECT_TRUE(says(load_error(folder), "--load " + second + ": No such file or directory"));
  fresh();
  const std::string bytes = read_file(second);
  write_file(second, bytes.substr(0, bytes.size() - 4));
  EXPECT_TRUE(says(load_error(folder), "--load " + second + ": damaged: it has "));
  EXPECT_TRUE(says(with_index("\"bytes\": " + std::to_string(bytes.size()), "\"bytes\": 17"), ", index.json says 17"));
  write_file(second, bytes.substr(0, bytes.size() - 4));  // both lie alike
  const std::string cut = std::to_string(bytes.size() - 4);
  write_to(scratch / "b", good_folder());
  write_file(scratch / ("b/" + shard_file_name(1)), bytes.substr(0, bytes.size() - 4));
  std::string text = read_file(scratch / "b/index.json");
  text.replace(text.rfind("\"bytes\": "), 9 + cut.size(), "\"bytes\": " + cut);
  write_file(scratch / "b/index.json", text);
  EXPECT_TRUE(says(load_error(scratch / "b"), "ends after the end of the file"));

  const std::string name = shard_file_name(1);
  for (const char* bad : {"../a/shard-00002-model-00001-of-00001.safetensors", "/etc/passwd", "shard-/x.safetensors",
                          "shard-...safetensors", "other.safetensors", "", "shard-\\u0000.safetensors"}) {
    EXPECT_TRUE(says(with_index(name, bad), "is no name of a shard")) << bad;
  }
  EXPECT_TRUE(says(with_index(name, shard_file_name(0)), "stands there twice"));
  EXPECT_TRUE(
      says(with_index("sharded state 1", "sharded state 2"), "is of the format \"multi-gpu-playground sharded"));
  EXPECT_TRUE(says(with_index("\"files\"", "\"file\""), "it has no entry files"));
  EXPECT_TRUE(says(with_index("\"training\"", "\"trainings\""), "it has no entry training"));
  EXPECT_TRUE(says(with_index("\"step\": 5", "\"step\": -5"), "damaged: step is -5"));
  EXPECT_TRUE(says(with_index("\"step\": 5", "\"step\": \"5\""), "step is a text"));
  EXPECT_TRUE(says(with_index("\"step_count\": 4.0", "\"step_count\": -1"), "step_count is no number of steps"));
  EXPECT_TRUE(says(with_index("\"kind\": \"mlp\"", "\"kind\": \"cnn\""), "is of the unknown model cnn"));
  EXPECT_TRUE(says(with_index("\"hex\": \"00", "\"hex\": \"0g"), "a random state is not written as bytes"));
  EXPECT_TRUE(says(with_index("\"bias\",\n   \"shape", "\"weight\",\n   \"shape"), "weight stands there twice"));
  EXPECT_TRUE(says(with_index("    5,\n", "    4611686018427387904,\n"), "weight has an impossible shape"));
  EXPECT_TRUE(says(with_index("    5,\n", "    -5,\n"), "the shape of weight is not a whole number"));
  fresh();
  for (const std::string& wrong : {std::string(), std::string("{"), std::string("[]"), std::string("\xff{}"),
                                   std::string(100000, '['), std::string("{\"format\": 1}")}) {
    write_file(index_path, wrong);
    EXPECT_TRUE(says(load_error(folder), "--load " + index_path + ": ")) << wrong.substr(0, 10);
  }
  unlink(index_path.c_str());
  mkdir(index_path.c_str(), 0777);
  EXPECT_TRUE(says(load_error(folder), "is a folder, not a file"));
}

TEST(ShardedCheckpoint, DamagedBytesNeverCrashTheReader) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "a";
  write_to(folder, good_folder());
  for (const std::string& name : {std::string(kIndexName), shard_file_name(0)}) {
    const std::string path = folder + "/" + name, bytes = read_file(path);
    fuzz(bytes, 2000, [&](const std::string& damaged) {
      write_file(path, damaged);
      load_sharded(folder);
    });
    write_file(path, bytes);
  }
  expect_good(load_sharded(folder));
}

}  // namespace
}  // namespace mgp

// A small sharded checkpoint that is written by hand, so that the format itself is tested. What ranks write is tested
// in tests/multi_rank.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/checkpoint.hpp"
#include "common/model_config.hpp"
#include "common/published_folder.hpp"
#include "common/safetensors.hpp"
#include "common/shard_index.hpp"
#include "common/sharded_checkpoint.hpp"
#include "tests/unit/files.hpp"

namespace mgp {

inline const char* const kGroups[] = {"model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."};

inline ModelConfig tiny() { return preset_config("tiny", ModelKind::mlp); }

/// Rows [first, first + count) of "weight" [5, 2] and elements of "bias" [3] in the file of a rank.
struct Part {
  int64_t weight_first, weight_rows, bias_first, bias_rows;
};

inline at::Tensor weight(int64_t group) {
  return at::arange(10, at::kFloat).add(100.0 * static_cast<double>(group)).view({5, 2});
}
inline at::Tensor bias(int64_t group) { return at::arange(3, at::kFloat).sub(100.0 * static_cast<double>(group)); }

/// What a test may change before it is written.
struct Written {
  std::vector<NamedTensors> tensors;
  std::vector<std::string> offsets;  // DCP_SHARDING_INFO
  ShardIndex index;
};

inline Written good_folder(const std::vector<Part>& parts = {{0, 2, 1, 2}, {2, 3, 0, 1}}) {
  Written written;
  for (const Part& part : parts) {
    written.tensors.emplace_back();
    std::string offsets;
    for (int64_t group = 0; group < 3; ++group) {
      const std::string kind = kGroups[group];
      const auto add = [&](const std::string& name, const at::Tensor& rows, const std::string& offset) {
        written.tensors.back().emplace_back(kind + name, rows);
        offsets += (offsets.empty() ? "{\"" : ", \"") + kind + name + "\": {\"saved_offsets\": " + offset + "}";
      };
      add("weight", weight(group).narrow(0, part.weight_first, part.weight_rows),
          "[" + std::to_string(part.weight_first) + ", 0]");
      add("bias", bias(group).narrow(0, part.bias_first, part.bias_rows), "[" + std::to_string(part.bias_first) + "]");
    }
    written.offsets.push_back(offsets + "}");
  }
  written.index.ranks = static_cast<int64_t>(parts.size());
  written.index.parameters = {{"weight", {5, 2}}, {"bias", {3}}};
  written.index.step_count = 4.0;
  TrainingState training;
  training.step = 5;
  training.seed = ~uint64_t{0};
  training.loss_scale = 1024.0;
  training.bucket_order = {"bias", "weight"};
  training.rng_cpu = at::arange(200, at::kByte);
  const PtValue value = full_state_value({tiny(), {}, {}, {}, {}, training});
  written.index.config = *value.find("config");
  written.index.training = *value.find("training");
  return written;
}

inline void write_to(const std::string& folder, Written written) {
  mkdir(folder.c_str(), 0777);
  for (size_t rank = 0; rank < written.tensors.size(); ++rank) {
    const std::string name = shard_file_name(static_cast<int>(rank)), path = folder + "/" + name;
    write_safetensors(path, written.tensors[rank],
                      {{"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", written.offsets[rank]}});
    written.index.files.push_back({name, size_of_file(path)});
  }
  write_shard_index(folder + "/" + kIndexName, written.index);
}

inline std::string load_error(const std::string& folder) {
  return error_of<UsageError>([&] { load_sharded(folder); });
}

inline void expect_good(const FullState& state) {
  const NamedTensors* const groups[] = {&state.model, &state.exp_avg, &state.exp_avg_sq};
  for (int64_t group = 0; group < 3; ++group) {
    ASSERT_EQ(groups[group]->size(), 2u);
    EXPECT_EQ((*groups[group])[0].first, "weight");
    EXPECT_TRUE(at::equal((*groups[group])[0].second, weight(group)));
    EXPECT_EQ((*groups[group])[1].first, "bias");
    EXPECT_TRUE(at::equal((*groups[group])[1].second, bias(group)));
  }
  ASSERT_EQ(state.steps.size(), 2u);
  EXPECT_EQ(state.steps[1].first, "bias");
  EXPECT_EQ(state.steps[1].second.dim(), 0);
  EXPECT_EQ(state.steps[1].second.item<float>(), 4.0f);
}

}  // namespace mgp

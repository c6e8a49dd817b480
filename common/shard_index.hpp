// index.json of a sharded checkpoint: everything that is not cut over the ranks.
//
//   {"format": "multi-gpu-playground sharded state 1", "ranks": 3, "step_count": 5.0,
//    "files": [{"name": "shard-00001-model-00001-of-00001.safetensors", "bytes": 1234}, ...],
//    "parameters": [{"name": "embedding.weight", "shape": [32000, 768]}, ...],      in registration order
//    "config": {...}, "training": {...}}                                            as in checkpoint.hpp
//
// States of random generators, the only tensors among them, stand there as {"hex": "00ff.."}.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model_config.hpp"
#include "common/pt_file.hpp"

namespace mgp {

struct ShardIndex {
  struct File {
    std::string name;  ///< in the folder of the index
    uint64_t bytes = 0;
  };
  int64_t ranks = 0;  ///< that saved
  std::vector<File> files;
  std::vector<ParameterShape> parameters;
  double step_count = 0.0;   ///< AdamW's own count of steps: without those that overflowed
  PtValue config, training;  ///< the entries of full_state_value()
};

/// Writes the file (atomic_file.hpp). Throws RunError.
void write_shard_index(const std::string& path, const ShardIndex& index);

/// Reads it without trusting it: names of files are plain names, shapes are bounded. `config` and `training` are for
/// full_state_from() to check. Throws UsageError naming `flag`, in one line.
ShardIndex read_shard_index(const std::string& path, const std::string& flag);

}  // namespace mgp

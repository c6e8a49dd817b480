// The full-state checkpoint: one .pt file with everything that an uninterrupted run would have in memory.
//
//   {"model": {name: tensor}, "optimizer": {"exp_avg": {name: tensor}, "exp_avg_sq": {...}, "step": {...}},
//    "training": {"step", "seed", "global_batch_size", "next_sample", "data", "precision", "bucket_order": [names],
//                 "loss_scale", "good_steps", "rng_cpu", "rng_cuda"}, "config": {sizes}, "format": "multi-gpu-playground full state 1"}
//
// In Python: model.load_state_dict(torch.load(path, weights_only=True)["model"]).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/model_config.hpp"
#include "common/named_tensors.hpp"
#include "common/optimizer.hpp"
#include "common/pt_file.hpp"
#include "common/shards.hpp"

namespace mgp {

/// What travels beside the tensors.
struct TrainingState {
  int64_t step = 0;  ///< optimizer steps taken
  uint64_t seed = 0;
  int64_t global_batch_size = 0;
  int64_t next_sample = 0;  ///< first sample that has not been trained on: step * global_batch_size (0 for repeat)
  std::string data = "fresh";
  std::string precision = "fp32";
  std::vector<std::string> bucket_order;  ///< DDP: parameter names in the order in which gradients came; else empty
  std::optional<double> loss_scale;       ///< of the next step (loss_scaler.hpp); absent without one
  int64_t good_steps = 0;                 ///< steps without overflow since the scale last changed
  at::Tensor rng_cpu;                     ///< state of the default generators, so that dropout continues
  at::Tensor rng_cuda;                    ///< undefined on CPU
};

/// A loaded file: tensors on the CPU.
struct FullState {
  ModelConfig config;                              ///< all sizes 0 when the file does not say (a plain state dict)
  NamedTensors model, exp_avg, exp_avg_sq, steps;  ///< moments empty when the file holds only weights
  TrainingState training;
};

/// Writes the file (rank 0 alone calls this; atomic, see atomic_file.hpp).
void save_full_state(const std::string& path, const ModelConfig& config, const AdamW& optimizer,
                     const TrainingState& training);

/// The same from pieces, of which `layout` tells where they belong: collective, all ranks call it, rank 0 alone needs path and
/// training. Gathered one parameter at a time while the file is written. When rank 0 cannot write it still takes part in
/// the rest, and throws RunError then.
void save_full_state_of_pieces(const std::string& path, const ModelConfig& config, const AdamW& optimizer,
                               const TrainingState& training, ShardLayout& layout);

/// What the two above write, as copies in host memory, for a thread that writes them with write_full_state(). Complete
/// once the device has passed this point of the current stream. Rank 0 alone calls the first; the second is collective,
/// and empty on ranks other than 0.
FullState host_copy_of(const ModelConfig& config, const AdamW& optimizer, const TrainingState& training);
FullState host_copy_of_pieces(const ModelConfig& config, const AdamW& optimizer, const TrainingState& training,
                              ShardLayout& layout);
void write_full_state(const std::string& path, const FullState& state);

/// What save_full_state writes, for trainers that hold only shards: with meta tensors in `state` as placeholders,
/// write_pt asks for the values unit by unit (pt_file.hpp).
PtValue full_state_value(const FullState& state);
/// And back, every entry checked; throws RunError that says what is wrong.
FullState full_state_from(const PtValue& value);

/// Reads and checks a file. A plain state dict {name: tensor} that Python saved, alone or as {"model": {...}}, is
/// accepted as weights only (step 0). No device is needed. Throws UsageError naming --load: missing, unreadable,
/// foreign, damaged.
FullState load_full_state(const std::string& path);

/// Throws ONE UsageError that lists every missing, extra and misshapen name and every size that differs, before
/// anything is changed. `dtype` is that of the run's weights (precision.hpp): a file in another dtype is accepted only
/// if every value of it fits exactly (fp32 into fp64, not the other way round).
void check_full_state(const FullState& state, const ModelConfig& config, at::ScalarType dtype, const std::string& path);

/// Copies weights, moments and step counts into the live optimizer and its parameters, on their device and in place, so
/// that whoever holds these tensors (gradient buckets, graphs) sees them. Weights alone leave the moments as they are.
void restore(const FullState& state, AdamW& optimizer, const ShardLayout* layout = nullptr);

/// State of the default generators of this process (CPU, and CUDA if `device` is one), and back.
void capture_rng(TrainingState& training, at::Device device);
void restore_rng(const TrainingState& training, at::Device device);

}  // namespace mgp

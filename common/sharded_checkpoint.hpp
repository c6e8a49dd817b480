// The sharded checkpoint: a folder into which each rank writes what it holds, so that no rank ever sees a whole tensor.
// It loads at any other number of ranks, in C++ and in Python.
//
//   <folder>/shard-00001-model-00001-of-00001.safetensors   one file a rank (00001 is rank 0), if it has rows
//   <folder>/shard-00002-model-00001-of-00001.safetensors
//   <folder>/index.json                                     all that is not cut (shard_index.hpp), written last
//
// The files are what PyTorch's distributed checkpoint writes as safetensors: each tensor is one block of rows
// (dimension 0) with its local shape, and the header says at which row it begins:
//   "__metadata__": {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": "{\"model.head.weight\": {\"saved_offsets\": [4, 0]}}"}
// Names are "model.NAME", "optimizer.exp_avg.NAME" and "optimizer.exp_avg_sq.NAME": what dcp.load makes of the nested
// dictionary of the full state (checkpoint.hpp), so that one line reads it in Python:
//   dcp.load({"model": model.state_dict()}, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
#pragma once

#include <string>
#include <vector>

#include "common/checkpoint.hpp"
#include "common/communicator.hpp"
#include "common/published_folder.hpp"
#include "common/sharded_rows.hpp"
#include "common/shards.hpp"
#include "common/timing.hpp"

namespace mgp {

/// One save to `folder`, in three steps, so that the long one in the middle can run beside training:
///
///   ShardedSave save(...);   collective: the temporary folder is there, and what this rank will write is known
///   save.write();            this rank's file; not collective, on any thread
///   save.publish();          collective: the index, the folder's name
///
/// What several ranks hold is written once. A row that is torn between ranks goes whole into the file of the rank that
/// holds its first element; one all_gather brings the fragments there.
///
/// The folder appears whole or not at all (published_folder.hpp), and a checkpoint that was there before stays loadable
/// until then. If a rank cannot write, all ranks throw the same RunError with that rank, path and errno text, and what
/// was written is removed.
class ShardedSave {
 public:
  /// Collective over `world`, the communicator of `layout`; `world` must outlive publish(). `masters`, `exp_avg`,
  /// `exp_avg_sq`: one tensor of each piece of layout.mine() in that order, of piece.count elements and any shape, on any
  /// device. `step_count`: AdamW's, one element. Of `training` and `step_count` those of rank 0 are written.
  /// `snapshot`: copies to host memory are written, so that the tensors may change from here on; else they
  /// themselves, which must not.
  ShardedSave(const std::string& folder, const ModelConfig& config, const ShardLayout& layout,
              const NamedTensors& masters, const NamedTensors& exp_avg, const NamedTensors& exp_avg_sq,
              const at::Tensor& step_count, const TrainingState& training, Communicator& world, bool snapshot);

  /// Writes this rank's file and syncs it. Does not throw: publish() tells everybody what went wrong.
  void write() noexcept;

  /// Collective, after write(). A return means that the checkpoint is there and on disk. The slowest rank must come
  /// within the deadline of a collective (CommOptions::timeout) after the fastest.
  void publish();

 private:
  PublishedFolder place_;
  const ModelConfig config_;
  const std::vector<ParameterShape> parameters_;
  const TrainingState training_;
  Communicator& world_;
  std::vector<RowBlock> blocks_;
  at::Tensor step_count_;
  Moment copied_;        // the snapshot is in host memory
  std::string written_;  // size of this rank's file, "" for none
  std::string error_;    // of write()
};

/// All of it at once: collective, nothing is copied, and the tensors must not change meanwhile.
void save_sharded(const std::string& folder, const ModelConfig& config, const ShardLayout& layout,
                  const NamedTensors& masters, const NamedTensors& exp_avg, const NamedTensors& exp_avg_sq,
                  const at::Tensor& step_count, const TrainingState& training, Communicator& world);

/// Reads such a folder, put together to whole CPU tensors in registration order. Not collective: any process may call
/// it. Sizes, names and offsets are checked before they are believed; each element must be there exactly once. Where a
/// kill left only `<folder>.old`, that is read. Throws UsageError naming --load, in one line.
FullState load_sharded(const std::string& folder);

/// Whether `path` is for load_sharded() and not for load_full_state(): a folder, or a name that has only its `.old`.
/// Says nothing about what is in the folder; load_sharded() does.
bool is_sharded_checkpoint(const std::string& path);

/// A checkpoint in either form: load_sharded() or load_full_state(), whichever `path` is.
FullState load_checkpoint(const std::string& path);

}  // namespace mgp

// Synthetic token sequences. Sample i is a function of (seed, i) and nothing else; the global batch of step s is a
// function of (seed, global batch size). The number of ranks cuts a batch, it never changes it.
#pragma once

#include <ATen/ATen.h>

#include "common/model_config.hpp"

namespace mgp {

/// Rows [begin, end) of the global batch of one step.
struct RowSlice {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }

  /// Part `index` of `parts` of this slice, cut like slice_rows; may be empty.
  RowSlice part(int64_t index, int64_t parts) const;
};

/// The rows of `rank` when `rows` are cut over `ranks`: the first `rows % ranks` ranks get one row more.
RowSlice slice_rows(int64_t rows, int64_t rank, int64_t ranks);

struct Batch {
  at::Tensor tokens;  ///< [b, T] int64
  at::Tensor labels;  ///< [b] int64
};

class SyntheticTokens {
 public:
  /// `fresh`: step s (counted from 1) trains on samples [(s-1)*G, s*G) of the stream, G = global batch size. `repeat`:
  /// on samples [0, G) in every step, so that the loss must fall.
  enum class Mode { fresh, repeat };

  SyntheticTokens(const ModelConfig& config, uint64_t seed, int64_t global_batch_size, Mode mode, at::Device device);

  /// Rows `rows` of the global batch of `step` (counted from 1), on the device. On CUDA the copy leaves pinned memory
  /// and does not stall the host. An empty slice gives tensors with 0 rows. Token t of sample i is hash(seed,
  /// "data.tokens", i*T + t) mod V, its label hash(seed, "data.labels", i) mod classes.
  Batch rows(int64_t step, RowSlice rows) const;

 private:
  ModelConfig config_;
  uint64_t token_key_;
  uint64_t label_key_;
  int64_t global_batch_size_;
  Mode mode_;
  at::Device device_;
};

}  // namespace mgp

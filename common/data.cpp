#include "common/data.hpp"

#include <algorithm>

#include "common/counter_random.hpp"

namespace mgp {

RowSlice slice_rows(int64_t rows, int64_t rank, int64_t ranks) {
  TORCH_CHECK(rows >= 0 && ranks >= 1 && rank >= 0 && rank < ranks, "slice_rows: rank ", rank, " of ", ranks, ", ",
              rows, " rows");
  const int64_t share = rows / ranks;
  const int64_t extra = rows % ranks;  // the first `extra` ranks take one row more
  const int64_t begin = rank * share + std::min(rank, extra);
  return {begin, begin + share + (rank < extra ? 1 : 0)};
}

RowSlice RowSlice::part(int64_t index, int64_t parts) const {
  const RowSlice inner = slice_rows(size(), index, parts);
  return {begin + inner.begin, begin + inner.end};
}

SyntheticTokens::SyntheticTokens(const ModelConfig& config, uint64_t seed, int64_t global_batch_size, Mode mode,
                                 at::Device device)
    : config_(config),
      token_key_(stream_key(seed, "data.tokens")),
      label_key_(stream_key(seed, "data.labels")),
      global_batch_size_(global_batch_size),
      mode_(mode),
      device_(device) {}

Batch SyntheticTokens::rows(int64_t step, RowSlice rows) const {
  TORCH_CHECK(step >= 1, "steps count from 1, not ", step);
  TORCH_CHECK(rows.begin >= 0 && rows.begin <= rows.end && rows.end <= global_batch_size_, "rows [", rows.begin, ", ",
              rows.end, ") are not inside a global batch of ", global_batch_size_);
  const int64_t first_sample = (mode_ == Mode::fresh ? (step - 1) * global_batch_size_ : 0) + rows.begin;
  const int64_t T = config_.seq_len;
  const auto vocabulary = static_cast<uint64_t>(config_.vocab_size);
  const auto classes = static_cast<uint64_t>(config_.classes);

  // Pinned memory lets the copy to the GPU run beside the host. LibTorch's pinned pool hands a block out again only
  // when the copy has passed, so the tensors below may go out of scope at once.
  const auto options = at::TensorOptions().dtype(at::kLong).pinned_memory(device_.is_cuda());
  at::Tensor tokens = at::empty({rows.size(), T}, options);  // [b, T]
  at::Tensor labels = at::empty({rows.size()}, options);     // [b]
  int64_t* const token = tokens.data_ptr<int64_t>();
  int64_t* const label = labels.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows.size(); ++row) {
    const auto sample = static_cast<uint64_t>(first_sample + row);
    for (int64_t t = 0; t < T; ++t) {
      const uint64_t hash = counter_hash(token_key_, sample * static_cast<uint64_t>(T) + static_cast<uint64_t>(t));
      token[row * T + t] = static_cast<int64_t>(hash % vocabulary);  // the bias of % is below V / 2^64: nothing
    }
    label[row] = static_cast<int64_t>(counter_hash(label_key_, sample) % classes);
  }
  if (!device_.is_cuda()) return {tokens, labels};
  return {tokens.to(device_, /*non_blocking=*/true), labels.to(device_, /*non_blocking=*/true)};
}

}  // namespace mgp

// hash_tensors: equal on two ranks only if the bits are equal, computed where the tensors are.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "common/communicator.hpp"
#include "common/counter_random.hpp"

namespace mgp {

namespace {

// A chunk of 64-bit words at a time, so that hashing a large model takes 40 MB of scratch, not five times the model.
constexpr int64_t kChunkWords = int64_t{1} << 20;

// Odd, so that multiplication is a bijection; the finaliser constants of SplitMix64 as signed numbers.
constexpr int64_t kPosition = static_cast<int64_t>(0x9E3779B97F4A7C15ULL);
constexpr int64_t kMix = static_cast<int64_t>(0xBF58476D1CE4E5B9ULL);

/// Wrapping sum of mixed words. Integer addition is exact in any order, so a GPU gives the same sum each time. The
/// position goes into the mix, so that swapped words show; the shift spreads the high bits, so that flipping the signs
/// of two numbers does not cancel.
at::Tensor hash_words(const at::Tensor& words, const at::Tensor& positions, int64_t first) {
  at::Tensor mixed = words + positions.narrow(0, 0, words.numel());
  mixed.add_(at::Scalar(static_cast<int64_t>(static_cast<uint64_t>(kPosition) * static_cast<uint64_t>(first))));
  mixed.bitwise_xor_(at::bitwise_right_shift(mixed, at::Scalar(int64_t{32})));
  mixed.mul_(at::Scalar(kMix));
  mixed.bitwise_xor_(at::bitwise_right_shift(mixed, at::Scalar(int64_t{29})));
  return mixed.sum();
}

/// 0-dim int64 tensor on the tensor's device.
at::Tensor hash_one(const at::Tensor& tensor, const at::Tensor& positions) {
  const at::Tensor bytes = tensor.detach().contiguous().reshape({-1}).view(at::kByte);
  at::Tensor sum = at::zeros({}, bytes.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < bytes.numel(); begin += 8 * kChunkWords) {
    const int64_t count = std::min(8 * kChunkWords, bytes.numel() - begin);
    at::Tensor chunk = bytes.narrow(0, begin, count);
    if (count % 8 != 0 || chunk.storage_offset() % 8 != 0) {
      // A tail, or a slice of a bucket that does not start at a whole word: hash a padded copy.
      at::Tensor padded = at::zeros({(count + 7) / 8 * 8}, bytes.options());
      padded.narrow(0, 0, count).copy_(chunk);
      chunk = padded;
    }
    sum.add_(hash_words(chunk.view(at::kLong), positions, begin / 8));
  }
  return sum;
}

}  // namespace

uint64_t hash_tensors(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  int64_t longest = 0;  // in words
  for (const at::Tensor& tensor : tensors) longest = std::max(longest, static_cast<int64_t>(tensor.nbytes()) / 8 + 1);
  at::Tensor positions;  // kPosition * i, made once for each device
  for (const at::Tensor& tensor : tensors) {
    if (!positions.defined() || positions.device() != tensor.device()) {
      positions = at::arange(std::min(kChunkWords, longest), tensor.options().dtype(at::kLong).requires_grad(false))
                      .mul_(at::Scalar(kPosition));
    }
    sums.push_back(hash_one(tensor, positions));
  }
  // One wait for the device, at the end. Tensors of several devices are rare: they cost one wait each.
  uint64_t hash = counter_hash(0x6d67705f68617368ULL, tensors.size());
  const bool one_device = std::all_of(sums.begin(), sums.end(),
                                      [&](const at::Tensor& sum) { return sum.device() == sums.front().device(); });
  const at::Tensor on_host = !sums.empty() && one_device ? at::stack(sums).cpu() : at::Tensor();
  for (size_t i = 0; i < sums.size(); ++i) {
    const int64_t sum = on_host.defined() ? on_host.data_ptr<int64_t>()[i] : sums[i].item<int64_t>();
    hash = counter_hash(hash ^ static_cast<uint64_t>(sum), static_cast<uint64_t>(tensors[i].nbytes()));
  }
  return hash;
}

}  // namespace mgp

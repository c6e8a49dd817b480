#include "common/counter_random.hpp"

#include <ATen/Parallel.h>

#include <cmath>

namespace mgp {

namespace {

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15ULL;  // 2^64 / golden ratio, odd: SplitMix64 counts in steps of it

/// The four 16-bit pieces of a hash, summed and centred: an integer in [-131070, 131070] with mean 0.
int64_t centred_sum(uint64_t hash) {
  const uint64_t sum = (hash & 0xFFFF) + ((hash >> 16) & 0xFFFF) + ((hash >> 32) & 0xFFFF) + (hash >> 48);
  return static_cast<int64_t>(sum) - 4 * 0xFFFF / 2;
}

template <typename Value>
void fill(at::Tensor& out, uint64_t key, double scale, int64_t first) {
  Value* const values = out.data_ptr<Value>();
  // Each element depends on its index alone, so the threads may cut the range as they like.
  at::parallel_for(0, out.numel(), /*grain_size=*/1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t hash = counter_hash(key, static_cast<uint64_t>(first + i));
      values[i] = static_cast<Value>(static_cast<double>(centred_sum(hash)) * scale);
    }
  });
}

}  // namespace

uint64_t counter_hash(uint64_t key, uint64_t index) {
  // Element `index` of SplitMix64 started at `key`, without the elements before it.
  uint64_t z = key + (index + 1) * kGoldenGamma;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

uint64_t stream_key(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a, 64 bits
  for (const char character : name) {
    hash ^= static_cast<unsigned char>(character);
    hash *= 0x100000001B3ULL;
  }
  return counter_hash(hash, seed);
}

void fill_normal(at::Tensor& out, uint64_t key, double stddev, int64_t first) {
  TORCH_CHECK(out.device().is_cpu() && out.is_contiguous(), "fill_normal needs contiguous CPU memory");
  TORCH_CHECK(first >= 0, "fill_normal: first is ", first);
  // The sum of four integers, uniform in 0..65535 each, has the variance 4 * (65536^2 - 1) / 12. Square root and
  // division are rounded the same way on every machine (IEEE 754), and so is the one multiplication an element.
  const double scale = stddev / std::sqrt((65536.0 * 65536.0 - 1.0) / 3.0);
  if (out.scalar_type() == at::kFloat) {
    fill<float>(out, key, scale, first);
  } else {
    TORCH_CHECK(out.scalar_type() == at::kDouble, "fill_normal writes fp32 or fp64, not ", out.scalar_type());
    fill<double>(out, key, scale, first);
  }
}

}  // namespace mgp

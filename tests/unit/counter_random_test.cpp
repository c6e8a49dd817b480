// The numbers below are part of the contract: checkpoints, twins and shards rely on them.
#include "common/counter_random.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

namespace mgp {
namespace {

TEST(CounterRandom, HashIsSplitMix64) {
  // The published first outputs of SplitMix64 for the seed 1234567.
  EXPECT_EQ(counter_hash(1234567, 0), 6457827717110365317ULL);
  EXPECT_EQ(counter_hash(1234567, 1), 3203168211198807973ULL);
  EXPECT_EQ(counter_hash(1234567, 2), 9817491932198370423ULL);
  EXPECT_EQ(counter_hash(1234567, 3), 4593380528125082431ULL);
  EXPECT_EQ(counter_hash(1234567, 4), 16408922859458223821ULL);
}

TEST(CounterRandom, KeysDependOnSeedAndName) {
  EXPECT_EQ(stream_key(42, "embedding.weight"), 0x636b549c28c4c97aULL);
  EXPECT_EQ(stream_key(42, ""), 0x6462cb97956166caULL);
  EXPECT_EQ(stream_key(7, "data.tokens"), 0x426640f3b6736e05ULL);
  std::set<uint64_t> keys;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    for (const char* name : {"a", "b", "ab", "ba", "layers.0", "layers.1"}) keys.insert(stream_key(seed, name));
  }
  EXPECT_EQ(keys.size(), 600u);
}

TEST(CounterRandom, NormalHasKnownBits) {
  const uint64_t key = stream_key(42, "encoder.layers.3.linear1.weight");
  const double stddev = 0.5 / std::sqrt(96.0);
  at::Tensor wide = at::empty({384 * 96}, at::kDouble);
  at::Tensor narrow = at::empty({384 * 96}, at::kFloat);
  fill_normal(wide, key, stddev);
  fill_normal(narrow, key, stddev);
  const double* const w = wide.data_ptr<double>();
  EXPECT_EQ(w[0], 0x1.e507f36706d65p-7);
  EXPECT_EQ(w[1], -0x1.eb37deb710b8ap-6);
  EXPECT_EQ(w[2], 0x1.82aa76cf034c8p-4);
  EXPECT_EQ(w[1000], 0x1.c067b701cc53dp-5);
  EXPECT_EQ(w[36863], -0x1.4a4ea846dc774p-6);
  const float* const n = narrow.data_ptr<float>();
  EXPECT_EQ(std::bit_cast<uint32_t>(n[0]), 0x3c7283fau);
  EXPECT_EQ(std::bit_cast<uint32_t>(n[1]), 0xbcf59befu);
  EXPECT_EQ(std::bit_cast<uint32_t>(n[36863]), 0xbca52754u);
  EXPECT_TRUE(at::equal(wide.to(at::kFloat), narrow));  // fp32 is fp64 rounded once
}

TEST(CounterRandom, AnySliceIsThatSliceOfTheWhole) {
  const uint64_t key = stream_key(3, "head.weight");
  at::Tensor whole = at::empty({100'003}, at::kFloat);
  fill_normal(whole, key, 1.0);
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{0, 1}, {1, 7}, {33'334, 33'335}, {100'002, 1}, {50, 0}}) {
    at::Tensor slice = at::empty({count}, at::kFloat);
    fill_normal(slice, key, 1.0, first);
    EXPECT_TRUE(at::equal(slice, whole.slice(0, first, first + count))) << first;
  }
}

TEST(CounterRandom, ThreadsDoNotMatter) {
  const int threads = at::get_num_threads();
  at::Tensor with_one = at::empty({1 << 18}, at::kFloat), with_all = at::empty_like(with_one);
  at::set_num_threads(1);
  fill_normal(with_one, 99, 0.02);
  at::set_num_threads(threads);
  fill_normal(with_all, 99, 0.02);
  EXPECT_TRUE(at::equal(with_one, with_all));
}

TEST(CounterRandom, MomentsAreThoseOfANormalDistribution) {
  at::Tensor values = at::empty({1 << 20}, at::kDouble);
  fill_normal(values, stream_key(1, "moments"), 2.0);
  EXPECT_NEAR(values.mean().item<double>(), 0.0, 4 * 2.0 / 1024.0);  // 4 standard errors
  EXPECT_NEAR(values.std().item<double>(), 2.0, 0.01);
  // Neighbours and other streams are not correlated.
  const at::Tensor shifted = (values.slice(0, 1) * values.slice(0, 0, -1)).mean() / 4.0;
  EXPECT_NEAR(shifted.item<double>(), 0.0, 4.0 / 1024.0);
  at::Tensor other = at::empty_like(values);
  fill_normal(other, stream_key(2, "moments"), 2.0);
  EXPECT_NEAR(((values * other).mean() / 4.0).item<double>(), 0.0, 4.0 / 1024.0);
}

TEST(CounterRandom, RefusesWhatItCannotFill) {
  at::Tensor half = at::empty({4}, at::kHalf);
  EXPECT_THROW(fill_normal(half, 1, 1.0), c10::Error);
  at::Tensor strided = at::empty({4, 4}, at::kFloat).t();
  EXPECT_THROW(fill_normal(strided, 1, 1.0), c10::Error);
}

}  // namespace
}  // namespace mgp

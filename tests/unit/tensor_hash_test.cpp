#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "common/communicator.hpp"

namespace {

using mgp::hash_tensors;

TEST(TensorHash, EqualBitsEqualHash) {
  const at::Tensor a = at::arange(1000, at::kFloat);
  EXPECT_EQ(hash_tensors({a}), hash_tensors({a.clone()}));
  EXPECT_EQ(hash_tensors({a.view({10, 100}).t()}), hash_tensors({a.view({10, 100}).t().contiguous()}));
  EXPECT_EQ(hash_tensors({}), hash_tensors({}));
  // A slice at an odd offset is the same as a copy of it.
  EXPECT_EQ(hash_tensors({a.narrow(0, 3, 501)}), hash_tensors({a.narrow(0, 3, 501).clone()}));
}

TEST(TensorHash, EveryByteCounts) {
  for (const at::ScalarType type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte}) {
    for (const int64_t numel : {1, 3, 8, 17}) {
      std::set<uint64_t> hashes;
      const at::Tensor tensor = at::arange(numel, at::kDouble).to(type);
      hashes.insert(hash_tensors({tensor}));
      auto* const bytes = static_cast<uint8_t*>(tensor.data_ptr());
      for (size_t i = 0; i < tensor.nbytes(); ++i) {
        bytes[i] ^= 0x80;
        hashes.insert(hash_tensors({tensor}));
        bytes[i] ^= 0x80;
      }
      EXPECT_EQ(hashes.size(), tensor.nbytes() + 1) << at::toString(type) << " x " << numel;
    }
  }
}

TEST(TensorHash, OrderAndSignsCount) {
  const at::Tensor a = at::arange(1, 1001, at::kFloat);
  EXPECT_NE(hash_tensors({a}), hash_tensors({a.flip(0)}));
  EXPECT_NE(hash_tensors({a}), hash_tensors({-a}));
  at::Tensor two_signs = a.clone();
  two_signs[1].neg_();
  two_signs[5].neg_();
  EXPECT_NE(hash_tensors({a}), hash_tensors({two_signs}));
  const at::Tensor b = a + 1;
  EXPECT_NE(hash_tensors({a, b}), hash_tensors({b, a}));
  EXPECT_NE(hash_tensors({a, b}), hash_tensors({at::cat({a, b})}));
  EXPECT_NE(hash_tensors({a}), hash_tensors({a, at::empty({0})}));
  EXPECT_NE(hash_tensors({at::zeros({3})}), hash_tensors({at::zeros({4})}));
}

TEST(TensorHash, LongTensorsAreHashedInPieces) {
  const at::Tensor a = at::arange((int64_t{1} << 21) + 12345, at::kInt);
  const uint64_t hash = hash_tensors({a});
  at::Tensor swapped = a.clone();
  swapped[5].fill_(a[(1 << 21) + 5].item<int>());
  swapped[(1 << 21) + 5].fill_(5);
  EXPECT_NE(hash, hash_tensors({swapped}));
  EXPECT_EQ(hash, hash_tensors({a.clone()}));
}

}  // namespace

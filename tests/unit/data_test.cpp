// The global batch of a step does not depend on who asks for which rows of it.
#include "common/data.hpp"

#include <gtest/gtest.h>

namespace mgp {
namespace {

SyntheticTokens tokens(int64_t global_batch, SyntheticTokens::Mode mode = SyntheticTokens::Mode::fresh) {
  return {preset_config("tiny", ModelKind::classifier), /*seed=*/42, global_batch, mode, at::kCPU};
}

TEST(Data, KnownTokensAndLabels) {
  const Batch batch = tokens(8).rows(/*step=*/1, {0, 8});
  ASSERT_EQ(batch.tokens.sizes(), at::IntArrayRef({8, 36}));
  ASSERT_EQ(batch.labels.sizes(), at::IntArrayRef({8}));
  const auto token = batch.tokens.accessor<int64_t, 2>();
  const auto label = batch.labels.accessor<int64_t, 1>();
  EXPECT_EQ(token[0][0], 721);
  EXPECT_EQ(token[0][1], 504);
  EXPECT_EQ(token[0][35], 421);
  EXPECT_EQ(label[0], 4);
  EXPECT_EQ(token[1][0], 1003);
  EXPECT_EQ(label[1], 5);
  EXPECT_EQ(token[7][35], 251);
  EXPECT_EQ(label[7], 3);
  // Sample 1000 is row 0 of step 126, for every global batch that puts it there.
  const Batch later = tokens(8).rows(126, {0, 1});
  EXPECT_EQ(later.tokens[0][0].item<int64_t>(), 189);
  EXPECT_EQ(later.tokens[0][35].item<int64_t>(), 225);
  EXPECT_EQ(later.labels[0].item<int64_t>(), 9);
  EXPECT_TRUE(at::equal(later.tokens[0], tokens(500).rows(3, {0, 1}).tokens[0]));
}

TEST(Data, RanksCutABatchAndNeverChangeIt) {
  for (const int64_t rows : {1, 7, 12, 13}) {
    const SyntheticTokens data = tokens(rows);
    const Batch whole = data.rows(5, {0, rows});
    for (int64_t ranks = 1; ranks <= 8; ++ranks) {
      std::vector<at::Tensor> token_parts, label_parts;
      int64_t begin = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const RowSlice mine = slice_rows(rows, rank, ranks);
        EXPECT_EQ(mine.begin, begin);
        EXPECT_LE(mine.size() - rows / ranks, 1);
        begin = mine.end;
        // And again into three microbatches, some of them empty.
        int64_t micro_begin = mine.begin;
        for (int64_t micro = 0; micro < 3; ++micro) {
          const RowSlice part = mine.part(micro, 3);
          EXPECT_EQ(part.begin, micro_begin);
          micro_begin = part.end;
          const Batch batch = data.rows(5, part);
          EXPECT_EQ(batch.tokens.size(0), part.size());
          token_parts.push_back(batch.tokens);
          label_parts.push_back(batch.labels);
        }
        EXPECT_EQ(micro_begin, mine.end);
      }
      EXPECT_EQ(begin, rows);
      EXPECT_TRUE(at::equal(at::cat(token_parts), whole.tokens)) << rows << " rows, " << ranks << " ranks";
      EXPECT_TRUE(at::equal(at::cat(label_parts), whole.labels));
    }
  }
}

TEST(Data, FirstRanksTakeTheExtraRows) {
  EXPECT_EQ(slice_rows(11, 0, 3).size(), 4);
  EXPECT_EQ(slice_rows(11, 1, 3).size(), 4);
  EXPECT_EQ(slice_rows(11, 2, 3).size(), 3);
  EXPECT_EQ(slice_rows(2, 2, 3).size(), 0);
  EXPECT_THROW(slice_rows(4, 3, 3), c10::Error);
}

TEST(Data, RepeatGivesTheSameRowsFreshNever) {
  const SyntheticTokens repeat = tokens(4, SyntheticTokens::Mode::repeat);
  const SyntheticTokens fresh = tokens(4);
  const Batch first = fresh.rows(1, {0, 4});
  EXPECT_TRUE(at::equal(repeat.rows(1, {0, 4}).tokens, first.tokens));
  EXPECT_TRUE(at::equal(repeat.rows(9, {0, 4}).tokens, first.tokens));
  EXPECT_TRUE(at::equal(repeat.rows(9, {0, 4}).labels, first.labels));
  EXPECT_FALSE(at::equal(fresh.rows(2, {0, 4}).tokens, first.tokens));
}

TEST(Data, LabelsAndTokensAreUniform) {
  const Batch batch = tokens(10'000).rows(1, {0, 10'000});
  const at::Tensor labels = at::bincount(batch.labels, {}, 10).to(at::kDouble);
  EXPECT_EQ(labels.size(0), 10);
  EXPECT_LT(((labels - 1000) / 30.0).abs().max().item<double>(), 4.5);  // a standard deviation is 30
  const at::Tensor counts = at::bincount(batch.tokens.flatten(), {}, 1008).to(at::kDouble);
  EXPECT_EQ(counts.size(0), 1008);
  EXPECT_LT(((counts - 357.1) / 18.9).abs().max().item<double>(), 5.0);
}

TEST(Data, RowsOutsideTheBatchAreRefused) {
  const SyntheticTokens data = tokens(4);
  EXPECT_THROW(data.rows(1, {0, 5}), c10::Error);
  EXPECT_THROW(data.rows(1, {-1, 2}), c10::Error);
  EXPECT_THROW(data.rows(0, {0, 4}), c10::Error);
}

}  // namespace
}  // namespace mgp

#include "common/ledger.hpp"

#include <gtest/gtest.h>

#include <thread>

namespace {

using mgp::Ledger;
using mgp::LedgerRow;
using mgp::Purpose;

TEST(Ledger, CountsByGroupCallAndPurpose) {
  Ledger ledger;
  ledger.count("world", "all_reduce", Purpose::training, 100);
  ledger.count("world", "all_reduce", Purpose::training, 50);
  ledger.count("world", "all_reduce", Purpose::bookkeeping, 4);
  ledger.count("tp", "all_reduce", Purpose::training, 7);
  ledger.add_time("world", "all_reduce", Purpose::training, 0.5);
  ledger.add_time("world", "all_reduce", Purpose::training, 0.25);
  const std::vector<LedgerRow> rows = ledger.rows();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0].group, "tp");
  EXPECT_EQ(rows[0].payload_bytes, 7);
  EXPECT_EQ(rows[1].group, "world");
  EXPECT_EQ(rows[1].purpose, Purpose::training);
  EXPECT_EQ(rows[1].calls, 2);
  EXPECT_EQ(rows[1].payload_bytes, 150);
  EXPECT_DOUBLE_EQ(rows[1].seconds, 0.75);
  EXPECT_EQ(rows[2].purpose, Purpose::bookkeeping);
  EXPECT_EQ(rows[2].calls, 1);
}

TEST(Ledger, TotalAddsUpTheGroups) {
  Ledger ledger;
  ledger.count("world", "all_gather", Purpose::training, 10);
  ledger.count("tp", "all_gather", Purpose::training, 20);
  ledger.count("tp", "all_gather", Purpose::bookkeeping, 40);
  ledger.count("tp", "broadcast", Purpose::training, 80);
  const LedgerRow total = ledger.total("all_gather", Purpose::training);
  EXPECT_EQ(total.calls, 2);
  EXPECT_EQ(total.payload_bytes, 30);
  EXPECT_EQ(ledger.total("reduce", Purpose::training).calls, 0);
  ledger.clear();
  EXPECT_TRUE(ledger.rows().empty());
}

TEST(Ledger, ThreadsMayCountAtOnce) {
  Ledger ledger;
  const auto count = [&] {
    for (int i = 0; i < 1000; ++i) ledger.count("world", "send", Purpose::training, 2);
  };
  std::thread other(count);
  count();
  other.join();
  EXPECT_EQ(ledger.total("send", Purpose::training).payload_bytes, 4000);
}

TEST(Ledger, AReplayCountsWhatWasCapturedOnceMore) {
  Ledger ledger;
  ledger.count("world", "all_reduce", Purpose::training, 100);
  ledger.add_time("world", "all_reduce", Purpose::training, 0.5);
  const std::vector<LedgerRow> before = ledger.rows();
  EXPECT_TRUE(difference(ledger.rows(), before).empty());
  ledger.count("world", "all_reduce", Purpose::training, 40);
  ledger.count("world", "all_reduce", Purpose::training, 2);
  ledger.count("dp", "all_reduce", Purpose::bookkeeping, 4);
  const std::vector<LedgerRow> captured = difference(ledger.rows(), before);
  ASSERT_EQ(captured.size(), 2U);
  EXPECT_EQ(captured[0].group, "dp");
  EXPECT_EQ(captured[1].calls, 2);
  EXPECT_EQ(captured[1].payload_bytes, 42);
  EXPECT_EQ(captured[1].seconds, 0.0);
  ledger.count_again(captured);
  ledger.count_again(captured);
  EXPECT_EQ(ledger.total("all_reduce", Purpose::training).calls, 1 + 3 * 2);
  EXPECT_EQ(ledger.total("all_reduce", Purpose::training).payload_bytes, 100 + 3 * 42);
  EXPECT_EQ(ledger.total("all_reduce", Purpose::training).seconds, 0.5);
  EXPECT_EQ(ledger.total("all_reduce", Purpose::bookkeeping).calls, 3);
}

}  // namespace

// What is refused, what is counted, and what the ranks find out about each other.
#include <fmt/format.h>

#include "common/ledger.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

using mgp::Purpose;
using mgp::ReduceOp;
using namespace mgp_test;

/// All ranks must see an error that contains `expected`, before anything was sent: the call after it works.
template <typename Action>
void expect_refused(const std::string& expected, const Action& action) {
  const std::string message = error_of(action);
  EXPECT_NE(message.find(expected), std::string::npos) << "message: " << message << "\nexpected: " << expected;
}

TEST(Checks, WrongArgumentsAreRefusedOnEveryRank) {
  const int n = world().size();
  const at::Tensor five = constant(5, at::kFloat, 1.0);
  expect_refused(
      fmt::format("world all_gather 'x': output has {} elements, {} ranks x input of 5 need {}", 5 * n + 1, n, 5 * n),
      [&] { world().all_gather(constant(5 * n + 1, at::kFloat, 0.0), five, {"x"}).wait(); });
  expect_refused(
      fmt::format("world reduce_scatter 'x': input has {} elements, {} ranks x output of 5 need {}", 5 * n + 2, n,
                  5 * n),
      [&] { world().reduce_scatter(five, constant(5 * n + 2, at::kFloat, 0.0), ReduceOp::sum, {"x"}).wait(); });
  expect_refused("output is f64[", [&] { world().all_gather(constant(5 * n, at::kDouble, 0.0), five, {"x"}).wait(); });
  expect_refused("world all_reduce 'x': tensor has type Short; f64, f32, f16, bf16, i64, i32 and u8 can be sent",
                 [&] { world().all_reduce(constant(5, at::kShort, 1.0), ReduceOp::sum, {"x"}).wait(); });
  expect_refused("world all_reduce 'x': tensor is not contiguous: shape [3,2], strides [1,3]", [&] {
    world().all_reduce(constant(6, at::kFloat, 1.0).view({2, 3}).t(), ReduceOp::sum, {"x"}).wait();
  });
  expect_refused("world all_reduce 'x': tensor is an undefined tensor",
                 [&] { world().all_reduce(at::Tensor(), ReduceOp::sum, {"x"}).wait(); });
  expect_refused(fmt::format("world broadcast 'x': root is {}, the ranks of this group are 0 to {}", n, n - 1),
                 [&] { world().broadcast(five, n, {"x"}).wait(); });
  expect_refused("root is -1", [&] { world().reduce(five, -1, ReduceOp::sum, {"x"}).wait(); });
  expect_refused("peer is 1000", [&] { world().send(five, 1000, {"x"}).wait(); });
  const at::Device other = world().device().is_cpu() ? at::Device(at::kMeta) : at::Device(at::kCPU);
  expect_refused(fmt::format("tensor is on {}, this communicator is for {}", other.str(), world().device().str()), [&] {
    world().all_reduce(at::empty({5}, at::TensorOptions().device(other)), ReduceOp::sum, {"x"}).wait();
  });
  const at::Tensor large = constant(5 * n + 1, at::kFloat, 1.0);
  expect_refused("input and output overlap; only this rank's own part of output may be input", [&] {
    world().all_gather(large.narrow(0, 0, 5 * n), large.narrow(0, 5 * world().rank() + 1, 5), {"x"}).wait();
  });
  world().all_reduce(five, ReduceOp::sum, {"x"}).wait();
  expect_close(five, constant(5, at::kFloat, n), "after the refusals");
}

TEST(Checks, TheLedgerCountsCallsAndPayload) {
  mgp::Ledger& ledger = world().ledger();
  ledger.clear();
  const int64_t n = world().size();
  world().all_reduce(constant(10, at::kFloat, 1.0), ReduceOp::sum, {"a"}).wait();
  world().all_reduce(constant(6, at::kDouble, 1.0), ReduceOp::avg, {"b"}).wait();
  world().all_reduce(constant(1, at::kFloat, 1.0), ReduceOp::sum, {"loss", Purpose::bookkeeping}).wait();
  world().all_gather(constant(3 * n, at::kHalf, 1.0), constant(3, at::kHalf, 1.0), {"c"}).wait();
  world().reduce_scatter(constant(2, at::kLong, 1.0), constant(2 * n, at::kLong, 1.0), ReduceOp::sum, {"d"}).wait();
  world().broadcast(constant(7, at::kByte, 1.0), 0, {"e"}).wait();
  world().barrier("f");
  const auto expect = [&](const char* call, Purpose purpose, int64_t calls, int64_t bytes) {
    EXPECT_EQ(ledger.total(call, purpose).calls, calls) << call;
    EXPECT_EQ(ledger.total(call, purpose).payload_bytes, bytes) << call;
  };
  expect("all_reduce", Purpose::training, 2, 10 * 4 + 6 * 8);
  expect("all_reduce", Purpose::bookkeeping, 1, 4);
  expect("all_gather", Purpose::training, 1, 3 * n * 2);
  expect("reduce_scatter", Purpose::training, 1, 2 * n * 8);
  expect("broadcast", Purpose::training, 1, 7);
  expect("barrier", Purpose::bookkeeping, 1, 0);
  for (const mgp::LedgerRow& row : ledger.rows()) EXPECT_EQ(row.group, "world");
  world().barrier("everything has passed");
  world().barrier("and was seen");
  EXPECT_GT(ledger.total("all_reduce", Purpose::training).seconds, 0.0);
  // The calls of a group share its time by their bytes.
  ledger.clear();
  {
    mgp::CommGroup group(world());
    const mgp::Work a = world().all_reduce(constant(30, at::kFloat, 1.0), ReduceOp::sum, {"a"});
    const mgp::Work b = world().broadcast(constant(10, at::kFloat, 1.0), 0, {"b"});
    group.finish().wait();
  }
  world().barrier("everything has passed");
  world().barrier("and was seen");
  EXPECT_NEAR(ledger.total("all_reduce", Purpose::training).seconds,
              3.0 * ledger.total("broadcast", Purpose::training).seconds, 1e-9);
  ledger.clear();
}

TEST(Checks, ExpectSameNamesTheRankThatDiffers) {
  world().expect_same("hashes", 0xFFFFFFFF12345678ULL);
  const int last = world().size() - 1;
  if (last == 0) return;
  world().watchdog();
  const std::string message =
      error_of([&] { world().expect_same("parameters", world().rank() == last ? 0xABCU : 0x123U); });
  EXPECT_NE(message.find(fmt::format("parameters differ between the ranks of 'world' at step 0: rank {} has "
                                     "0x0000000000000abc, {} of {} ranks have 0x0000000000000123",
                                     last, last, world().size())),
            std::string::npos)
      << message;
}

TEST(Checks, GatherTextComesInRankOrderAndMayBeRepeated) {
  for (int round = 0; round < 3; ++round) {
    const std::vector<std::string> texts =
        world().gather_text("row", fmt::format("round {}\nof rank {}", round, world().rank()));
    EXPECT_EQ(texts.size(), static_cast<size_t>(world().size()));
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      EXPECT_EQ(texts[rank], fmt::format("round {}\nof rank {}", round, rank));
    }
  }
}

TEST(Checks, DevicesOfAllRanksAreKnown) {
  EXPECT_EQ(world().devices().size(), static_cast<size_t>(world().size()));
  for (size_t rank = 0; rank < world().devices().size(); ++rank) {
    EXPECT_EQ(world().devices()[rank].rank, static_cast<int>(rank));
    EXPECT_GT(world().devices()[rank].pid, 0);
  }
}

class DebugDetail : public ::testing::Test {
 protected:
  DebugDetail() { world().set_debug(mgp::DebugLevel::detail); }
  ~DebugDetail() override { world().set_debug(mgp::DebugLevel::off); }
};

TEST_F(DebugDetail, EqualCallsPass) {
  const at::Tensor tensor = constant(10, at::kFloat, 1.0);
  world().all_reduce(tensor, ReduceOp::sum, {"a"}).wait();
  // Labels are for people, they may differ.
  world().broadcast(tensor, 0, {fmt::format("of rank {}", world().rank())}).wait();
  expect_close(tensor, constant(10, at::kFloat, world().size()), "detail");
}

TEST_F(DebugDetail, DifferentCallsAreNamedOnEveryRank) {
  if (world().size() < 2) GTEST_SKIP() << "needs two ranks";
  const at::Tensor tensor = constant(10, at::kFloat, 1.0);
  std::string message = error_of([&] {
    if (world().rank() == 0) {
      world().all_reduce(tensor, ReduceOp::sum, {"a"}).wait();
    } else {
      world().broadcast(tensor, 0, {"b"}).wait();
    }
  });
  EXPECT_NE(
      message.find("rank 0 calls world all_reduce 'a' f32[10]; rank 1 calls world broadcast 'b' from rank 0 f32[10]"),
      std::string::npos)
      << message;
  // The same call with different sizes, types, roots and operations.
  message = error_of(
      [&] { world().all_reduce(constant(10 + world().rank(), at::kFloat, 1.0), ReduceOp::sum, {"a"}).wait(); });
  EXPECT_NE(message.find("rank 0 calls world all_reduce 'a' f32[10]; rank 1 calls world all_reduce 'a' f32[11]"),
            std::string::npos)
      << message;
  EXPECT_NE(
      error_of([&] {
        world().all_reduce(constant(8, world().rank() == 0 ? at::kFloat : at::kInt, 1.0), ReduceOp::sum, {"a"}).wait();
      }),
      "");
  EXPECT_NE(error_of([&] { world().broadcast(tensor, world().rank() == 0 ? 0 : 1, {"a"}).wait(); }), "");
  EXPECT_NE(
      error_of([&] { world().all_reduce(tensor, world().rank() == 0 ? ReduceOp::sum : ReduceOp::max, {"a"}).wait(); }),
      "");
  world().set_debug(mgp::DebugLevel::off);
  world().all_reduce(tensor, ReduceOp::max, {"a"}).wait();
  expect_close(tensor, constant(10, at::kFloat, 1.0), "nothing was sent by the refused calls");
}

}  // namespace

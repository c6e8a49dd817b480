#include "common/watchdog.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common/heartbeat.hpp"

namespace {

using mgp::Heartbeat;
using mgp::Launch;
using mgp::Watchdog;
using std::chrono::milliseconds;

TEST(Heartbeat, GoesThroughText) {
  Heartbeat heartbeat;
  heartbeat.calls = 12;
  heartbeat.step = 5;
  heartbeat.pid = 4711;
  heartbeat.host = "node with a space";
  heartbeat.paused = true;
  heartbeat.groups = {{"world", 7}, {"world/tp.1.0", 3}};
  heartbeat.last = "world all_reduce 'a=b;c' f32[10]\nsecond line";
  const Heartbeat read = mgp::parse_heartbeat(mgp::serialize(heartbeat));
  EXPECT_EQ(read.calls, 12);
  EXPECT_EQ(read.step, 5);
  EXPECT_EQ(read.pid, 4711);
  EXPECT_EQ(read.host, heartbeat.host);
  EXPECT_FALSE(read.traced);
  EXPECT_TRUE(read.paused);
  EXPECT_FALSE(read.left);
  EXPECT_EQ(read.groups, heartbeat.groups);
  EXPECT_EQ(read.last, heartbeat.last);
}

TEST(Heartbeat, OtherTextIsNoHeartbeat) {
  EXPECT_FALSE(mgp::parse_heartbeat("").heard());
  EXPECT_FALSE(mgp::parse_heartbeat("hello\n1\n2\n3").heard());
  EXPECT_FALSE(mgp::parse_heartbeat("heartbeat 1\n1\n2").heard());
}

TEST(Heartbeat, ProcessesOfThisHost) {
  EXPECT_FALSE(mgp::process_ended(getpid()));
  const pid_t child = fork();
  if (child == 0) _exit(0);
  // Not waited for: it stays as a zombie, which counts as ended.
  for (int i = 0; i < 500 && !mgp::process_ended(child); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(mgp::process_ended(child));
}

TEST(Watchdog, ClockRunsAndStandsStillDuringAPause) {
  Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(60));
  const double start = watchdog.active_time().count();
  std::this_thread::sleep_for(milliseconds(300));
  const double running = watchdog.active_time().count();
  EXPECT_GT(running - start, 0.2);
  double paused = 0.0;
  {
    const Watchdog::Pause pause(watchdog);
    const double before = watchdog.active_time().count();
    std::this_thread::sleep_for(milliseconds(400));
    paused = watchdog.active_time().count() - before;
  }
  EXPECT_LT(paused, 0.01);
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_GT(watchdog.active_time().count(), running + 0.1);
}

TEST(Watchdog, AFinishedCallIsForgotten) {
  Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(1));
  std::atomic<int> asked{0};
  watchdog.begin_call(
      "world all_reduce 'a'", [&] { return ++asked > 2; }, nullptr);
  const uint64_t second = watchdog.begin_call("world all_reduce 'b'", nullptr, nullptr);
  // Never begun: no deadline runs for it.
  const uint64_t third = watchdog.begin_call(
      "world all_reduce 'c'", [] { return false; }, [] { return false; });
  watchdog.finish_call(second);
  std::this_thread::sleep_for(milliseconds(1800));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(watchdog.first_failure(), "");
  watchdog.finish_call(third);
}

TEST(Watchdog, StepIsKept) {
  Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(60));
  watchdog.set_step(17);
  EXPECT_EQ(watchdog.step(), 17);
}

TEST(Watchdog, OwnFailureIsNoReasonToFollow) {
  Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(60));
  watchdog.publish_failure("disk full");
  EXPECT_EQ(watchdog.first_failure(), "disk full");
  EXPECT_EQ(watchdog.ending_reason(), "");
}

class WatchdogDeath : public ::testing::Test {
 protected:
  // The watchdog's thread must exist in the child, so the child starts the program again.
  WatchdogDeath() { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(WatchdogDeath, ACallThatIsLateEndsTheProcess) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(1));
        watchdog.set_step(5);
        watchdog.begin_call(
            "world all_reduce 'bucket 1' f32[10]", [] { return false; }, nullptr);
        std::this_thread::sleep_for(std::chrono::seconds(20));
      },
      ::testing::ExitedWithCode(1),
      "collective timed out after 1 s: rank 0, step 5, world all_reduce 'bucket 1' f32\\[10\\]; no other rank");
}

TEST_F(WatchdogDeath, ADriverThatDoesNotAnswerStopsNoDeadline) {
  // As while another thread hangs in the launch of a CUDA graph: the question whether the call has begun never returns.
  EXPECT_EXIT(
      {
        Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(1));
        const auto hangs = [] {
          std::this_thread::sleep_for(std::chrono::seconds(100));
          return false;
        };
        watchdog.begin_call("replay 5", hangs, hangs);
        watchdog.begin_call("world all_reduce 'loss'", hangs, hangs);
        std::this_thread::sleep_for(std::chrono::seconds(20));
      },
      ::testing::ExitedWithCode(1), "collective timed out after 1 s: rank 0, step 0, replay 5; no other rank");
}

TEST_F(WatchdogDeath, AFailedWireEndsTheProcess) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(60));
        watchdog.watch_wire([] { return std::string("NCCL failed: unhandled system error"); }, nullptr);
        std::this_thread::sleep_for(std::chrono::seconds(20));
      },
      ::testing::ExitedWithCode(1), "rank 0: NCCL failed: unhandled system error");
}

TEST_F(WatchdogDeath, EndProcessSaysItsLineAbortsTheWireAndKeepsTheCode) {
  EXPECT_EXIT(
      {
        Watchdog watchdog(Launch{}, nullptr, std::chrono::seconds(60));
        watchdog.watch_wire(nullptr, [](int code) {
          if (code == 3) (void)!::write(STDERR_FILENO, "aborted\n", 8);
        });
        mgp::end_process(nullptr, "the disk is full", 3);
      },
      ::testing::ExitedWithCode(3), "the disk is full\naborted");
}

TEST_F(WatchdogDeath, EndProcessWorksWithoutAWatchdog) {
  EXPECT_EXIT(mgp::end_process(nullptr, "no watchdog", 1), ::testing::ExitedWithCode(1), "no watchdog");
}

}  // namespace

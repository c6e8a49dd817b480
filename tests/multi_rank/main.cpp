// GoogleTest on several ranks at once: every rank runs the same tests in the same order, and all pass or fail together.
//
//   mpirun -n 3 build/bin/multi_rank_tests                                          CPU ranks, over MPI
//   MGP_TEST_DEVICE=cuda scripts/launch.sh --share-gpu -n 3 multi_rank_tests        GPU ranks, over NCCL
//
// Tests use EXPECT, never ASSERT, between collectives: a rank that leaves a test early would leave the others waiting.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "common/device.hpp"
#include "common/watchdog.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

std::optional<mgp::Communicator> the_world;

/// Collects this rank's failures, so that rank 0 can print them in one piece.
class FailureCollector : public ::testing::EmptyTestEventListener {
 public:
  explicit FailureCollector(std::string& text) : text_(text) {}

 private:
  void OnTestStart(const ::testing::TestInfo& info) override {
    name_ = std::string(info.test_suite_name()) + "." + info.name();
  }
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    text_ += name_ + ": " + result.summary() + "\n";
  }

  std::string& text_;
  std::string name_;
};

int run_all() {
  mgp::Communicator& world = *the_world;
  std::string failures;
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (world.rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailureCollector(failures));
  if (world.rank() == 0) std::printf("%d ranks over %s\n", world.size(), world.wire());
  [[maybe_unused]] const int own_result = RUN_ALL_TESTS();
  const std::vector<std::string> all = world.gather_text("failures", failures);
  int code = mgp::kExitDone;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    code = mgp::kExitFailed;
    if (world.rank() == 0) std::printf("failures on rank %zu:\n%s", rank, all[rank].c_str());
  }
  if (world.rank() == 0) std::printf("%s\n", code == mgp::kExitDone ? "all ranks passed" : "FAILED");
  return code;
}

}  // namespace

mgp::Communicator& mgp_test::world() { return *the_world; }

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* const wanted = std::getenv("MGP_TEST_DEVICE");
  const std::string device_name = wanted != nullptr ? wanted : "cpu";
  int rank = 0;
  try {
    const mgp::Launch launch = mgp::detect_launch();
    rank = launch.rank;
    const at::Device device = mgp::claim_device(launch, device_name);
    mgp::limit_threads(launch);
    mgp::CommOptions options;
    options.timeout = std::chrono::seconds(60);
    the_world.emplace(mgp::Communicator::connect(launch, device, options));
    const int code = run_all();
    the_world.reset();
    return code;
  } catch (const mgp::UsageError& error) {
    if (rank == 0 || error.every_rank()) std::fprintf(stderr, "cannot run here: %s\n", error.what());
    return mgp::kExitSkipped;
  } catch (const std::exception& error) {
    mgp::end_process(nullptr, std::string("multi_rank_tests failed: ") + error.what(), mgp::kExitFailed);
  }
}

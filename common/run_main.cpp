// What main() of every trainer is: one call that turns exceptions into one line and an exit code.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <thread>

#include "common/error.hpp"
#include "common/report.hpp"
#include "common/run.hpp"
#include "common/text.hpp"
#include "common/watchdog.hpp"

namespace mgp {

void say(const Launch& launch, const std::string& text) {
  if (launch.rank != 0) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

std::optional<int> answer_and_stop(const Options& options, const Launch& launch, const MemoryPattern& pattern,
                                   const std::vector<CallPrediction>& calls) {
  if (options.environment) {
    say(launch, environment_report(launch));
    return kExitDone;
  }
  if (options.predict) {
    say(launch, table(options.trainer.summary, to_rows(settings(options)), /*head=*/false) +
                    memory_table(predict_memory(options, pattern)) + choices_text(options, pattern) +
                    call_table(calls, options.world));
    return kExitDone;
  }
  return std::nullopt;
}

int run_main(int (*trainer)(int, char**), int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // `ulimit -f`: an error of the write (EFBIG), like a full disk, and not the end
  int rank = 0;
  try {
    rank = detect_launch().rank;
    return trainer(argc, argv);
  } catch (const HelpShown&) {
    return kExitDone;
  } catch (const UsageError& error) {
    if (rank == 0 || error.every_rank()) {
      std::fprintf(stderr, "error: %s\n", error.what());
    } else {
      // Rank 0 finds the same mistake and says it. A launcher ends everything as soon as one rank ends, so wait for that.
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    return kExitUsage;
  } catch (const std::exception& error) {
    std::string line = error.what();
    line.erase(std::min(line.find("\nException raised from"), line.size()));  // LibTorch appends its own stack
    end_process(nullptr, fmt::format("rank {} failed: {}", rank, line), kExitFailed);
  }
}

}  // namespace mgp

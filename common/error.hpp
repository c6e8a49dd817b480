// Exit codes and the two kinds of error that a trainer can end with.
#pragma once

#include <stdexcept>
#include <string>

namespace mgp {

/// What the shell sees. Scripts and tests rely on these numbers.
enum ExitCode : int {
  kExitDone = 0,     ///< trained, and proved equal where --verify asked for it
  kExitFailed = 1,   ///< failed at run time (a rank died, a collective timed out, a disk was full)
  kExitUsage = 2,    ///< wrong usage or impossible configuration, found before anything was allocated
  kExitVerify = 3,   ///< --verify found a difference to the one-device run
  kExitSkipped = 77  ///< a test that cannot run here
};

/// Wrong usage or an impossible configuration. The text is one line: the value, the limit and the flag to change.
/// Every rank finds the same mistake, so only rank 0 prints it; `every_rank` is for mistakes that one rank alone can see.
class UsageError : public std::runtime_error {
 public:
  explicit UsageError(const std::string& line, bool every_rank = false)
      : std::runtime_error(line), every_rank_(every_rank) {}
  bool every_rank() const { return every_rank_; }

 private:
  bool every_rank_;
};

/// A failure at run time: ends all ranks with exit code 1. The text names the rank and the call.
class RunError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace mgp

// The thread that notices when something hangs, says who is missing, and ends this process if nobody else does.
//
// NCCL kernels spin until their peers come, and nothing tells them that a peer is gone. So each rank publishes what it
// did last (its heartbeat), and each rank watches its own unfinished calls, NCCL's asynchronous error, and the failure
// key in the store.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/launch.hpp"
#include "common/rendezvous.hpp"

namespace mgp {

/// Who must take part in a call, so that a message can name who did not come.
struct CallParty {
  std::string group;                              ///< unique name of the communicator
  std::shared_ptr<const std::vector<int>> ranks;  ///< ranks of the world; null: all
  int64_t sequence = 0;                           ///< number of this collective in its group; 0 for send and recv
};

class Watchdog;

/// The last resort: prints `line` (unless it is empty), publishes it, aborts the wire and ends this process with
/// `code`, whatever the other threads are doing. `watchdog` null: the one of this process, if there is one. Never
/// returns.
[[noreturn]] void end_process(Watchdog* watchdog, const std::string& line, int code);

class Watchdog {
 public:
  /// `rendezvous` may be null (one rank). Starts the thread.
  Watchdog(const Launch& launch, Rendezvous* rendezvous, std::chrono::seconds timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// The training step, for messages.
  void set_step(int64_t step);
  int64_t step() const;

  /// Registers a call that was started: `poll` says whether it is finished (it must never wait; called from the
  /// watchdog thread). Its deadline begins when `begun` first returns true (null: now). Returns an id; `finish_call` is
  /// called when the owner has seen it complete. `poll` may be null: then only finish_call ends it, its owner throws at
  /// the deadline, and the watchdog steps in 5 s later.
  uint64_t begin_call(const std::string& description, std::function<bool()> poll, std::function<bool()> begun,
                      CallParty party = {});
  void finish_call(uint64_t id);

  /// Added to each tick: throws or returns a non-empty text when the wire has failed (ncclCommGetAsyncError). `abort`
  /// is called once, by end_process, with the exit code.
  void watch_wire(std::function<std::string()> poll_error, std::function<void(int code)> abort);

  /// While a Pause lives, deadlines stand still on this rank (verification on rank 0, waiting for a key press).
  class Pause {
   public:
    explicit Pause(Watchdog& watchdog);
    ~Pause();

   private:
    Watchdog& watchdog_;
  };

  /// Whether the deadline of a call that has been watched for `watched` has passed. The clock that counts is this
  /// watchdog's: it stands still while any rank is traced by a debugger (TracerPid in /proc of local peers, heartbeats
  /// of remote ones), while a Pause lives anywhere, and a stopped process does not jump.
  std::chrono::duration<double> active_time() const;  ///< seconds of the clock that counts
  std::chrono::seconds timeout() const;

  /// For a timeout message: the ranks that did not come to the oldest unfinished call, and what each did last.
  std::string laggards();

  /// Tells all ranks that this one failed, so that they end soon, with `code` too. Only the first failure counts; it is
  /// not printed here. If the owner has not ended this process 10 s later, the watchdog does.
  void publish_failure(const std::string& line, int code = 1);

  /// What the first failing rank published, or "".
  std::string first_failure();

  /// "ending because rank 1 failed: ..." when another rank has failed, else "".
  std::string ending_reason();

  struct State;

 private:
  friend void end_process(Watchdog* watchdog, const std::string& line, int code);
  std::shared_ptr<State> state_;
};

}  // namespace mgp

// The inside of the watchdog, shared by its thread (watchdog_thread.cpp) and its callers (watchdog.cpp).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/heartbeat.hpp"
#include "common/watchdog.hpp"

namespace mgp {

struct Watchdog::State : std::enable_shared_from_this<Watchdog::State> {
  using Clock = std::chrono::steady_clock;

  struct Entry {
    std::string description;
    std::function<bool()> poll;
    std::function<bool()> begun;
    CallParty party;
    bool started = false;
    double start = 0.0;  ///< active time when it had begun
  };
  struct WireWatch {
    std::function<std::string()> error;
    std::function<void(int)> abort;
  };
  struct Failure {
    int rank = -1;  ///< -1: nobody has failed
    int code = 1;
    std::string line;
    Clock::time_point heard;
  };

  State(const Launch& launch_in, Rendezvous* rendezvous, std::chrono::seconds timeout_in);

  // ── the threads (watchdog_thread.cpp) ──
  void run();
  void ask();
  void tick();
  void stop(bool in_order);  ///< joins the threads; in order: the others are told that this rank's end is no failure

  // ── the clock and the messages; `mutex` is held by the caller ──
  void advance_clock();
  double active_now() const;
  const Entry* oldest_started() const;
  std::string missing_ranks(const Entry* entry) const;
  std::string ending_line() const;  ///< "ending because rank 1 failed: ..."

  // ── the store (watchdog_store.cpp); these lock `store_mutex` and do nothing without a store ──
  void publish_heartbeat();
  void read_peers();
  void read_failure();
  /// True if this is the first failure of all ranks. `grace`: seconds that the other threads get to end this process.
  /// `culprit`: the rank that failed, -1 for this one.
  bool publish(const std::string& line, int code, double grace, int culprit = -1);
  void wait_until_heard();

  void abort_wires(int code);

  const Launch launch;
  const std::chrono::seconds timeout;

  std::timed_mutex store_mutex;       ///< for `store`: one client is not for two threads at once
  std::unique_ptr<Rendezvous> store;  ///< null: alone

  mutable std::mutex mutex;  ///< for everything below
  std::condition_variable wake;
  bool stopping = false;
  bool publish_now = false;
  Heartbeat mine;
  std::vector<Heartbeat> peers;  ///< by rank; mine is not kept up to date in it
  std::map<uint64_t, Entry> entries;
  uint64_t next_id = 1;
  int pauses = 0;
  double active = 0.0;
  bool halted = false;  ///< a debugger or a Pause somewhere: the clock stands
  Clock::time_point clock_read = Clock::now();
  std::vector<WireWatch> wires;
  Failure failure;           ///< the first failure of all ranks
  bool own_failure = false;  ///< this rank published, first or not
  std::string own_line;
  int own_code = 1;
  Clock::time_point own_deadline;
  std::string store_lost;  ///< why the store does not answer any more
  Clock::time_point store_lost_at;

  bool asking = false;  ///< a question is on its way to the driver
  Clock::time_point asked_at;

  // Only the watchdog's thread touches these.
  Clock::time_point published{};
  Clock::time_point peers_read{};
  std::vector<char> seen_alive;    ///< by rank: its process was seen in /proc of this host
  std::vector<int> missing_ticks;  ///< by rank: ticks since its process was not found any more
  bool neighbour_traced = false;   ///< another rank of this host sits in a debugger

  // Two threads, because the driver may hold a question for ever: while the main thread hangs in the launch of a CUDA
  // graph, for example. The one that judges asks nothing.
  std::thread thread;
  std::thread asking_thread;

 private:
  void check_peers();
  void check_wires();
  void check_deadlines();
  void check_failures();
  bool store_usable() const;
  bool read_failure_locked();  ///< with `store_mutex` held; true if there is one
  void lose_store(const char* why);
};

/// The state that end_process(nullptr, ...) finds: of the newest watchdog that still runs.
std::shared_ptr<Watchdog::State> current_watchdog();

/// end_process on the state itself.
[[noreturn]] void end_process(const std::shared_ptr<Watchdog::State>& state, const std::string& line, int code);

}  // namespace mgp

// What a rank says about itself in the store twice a second, and what /proc says about a process. Internal to the
// watchdog.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace mgp {

/// The last sign of life of a rank.
struct Heartbeat {
  int64_t calls = 0;  ///< calls made so far; 0 with pid 0: nothing heard yet
  int64_t step = 0;
  int pid = 0;
  std::string host;
  bool traced = false;                    ///< this process, or another rank on its host, sits in a debugger
  bool paused = false;                    ///< a Watchdog::Pause lives
  bool left = false;                      ///< ended in order: not to be taken for dead
  std::map<std::string, int64_t> groups;  ///< number of collectives made in each communicator, by its unique name
  std::string last;                       ///< description of the last call

  bool heard() const { return pid != 0; }
};

std::string serialize(const Heartbeat& heartbeat);
/// A heartbeat that nobody wrote (heard() is false) if the text is not one.
Heartbeat parse_heartbeat(const std::string& text);

/// "rank 1, which last made world all_reduce 'bucket 0' f32[10] at step 5".
std::string describe(int rank, const Heartbeat& heartbeat);

/// The process that traces `pid` (a debugger), 0 if none or unknown.
int tracer_of(int pid);

/// Whether a process of this host has ended, waiting to be reaped included.
bool process_ended(int pid);

}  // namespace mgp

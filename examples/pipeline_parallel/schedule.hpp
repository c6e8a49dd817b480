// The order in which the stages of a pipeline work, as plain data: made, checked, counted and printed without a device.
//
// A stage holds a run of layers. The batch is cut into m microbatches that follow each other through the p stages, so that
// the stages work at the same time. Which order a stage works in decides how many activations it has to keep:
//   GPipe   all forwards, then all backwards: m are kept (Huang et al., arXiv 1811.06965)
//   1F1B    a stage begins with backwards as soon as it can, and then takes one forward, one backward: min(p - s, m) are
//           kept on stage s (PipeDream-Flush in Narayanan et al., arXiv 2104.04473, section 2.2.1)
// Both idle for the same share of the time: (p - 1) / (m + p - 1).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mgp {

enum class ActionKind { forward, backward, send_activation, recv_activation, send_gradient, recv_gradient };

/// One thing that a stage does. Activations go to the next chunk of layers, gradients to the one before.
struct Action {
  ActionKind kind;
  int64_t microbatch = 0;  ///< from 0
  int64_t chunk = 0;       ///< which of the stage's runs of layers; always 0 unless the schedule is interleaved
  bool operator==(const Action&) const = default;
};

/// What each stage does, in order. Chunk c of stage s is number c * stages + s on the way through the model.
struct Schedule {
  std::string name;  ///< "gpipe", "1f1b"
  int64_t stages = 1;
  int64_t micro_batches = 1;
  int64_t chunks = 1;                        ///< runs of layers on each stage
  std::vector<std::vector<Action>> actions;  ///< [stage]
};

/// All forwards, then all backwards, both in the order of the microbatches.
Schedule gpipe_schedule(int64_t stages, int64_t micro_batches);

/// min(p - 1 - s, m) forwards to warm up, then one forward and one backward in turn, then the backwards that are left.
/// Two neighbours that have something for each other at the same time are told who sends first (the stage with an even
/// number), so the order holds even where a send waits for its receive (trial B48).
Schedule one_f_one_b_schedule(int64_t stages, int64_t micro_batches);

/// "gpipe" or "1f1b"; throws UsageError naming --schedule on another.
Schedule make_schedule(const std::string& name, int64_t stages, int64_t micro_batches);

/// Proves by walking through it that the schedule runs to its end: each chunk takes each microbatch forward and backward
/// once, has what it needs by then, each send meets its receive, and nobody waits for ever though EVERY SEND WAITS FOR ITS
/// RECEIVE. (Real sends are asynchronous. This is the strictest case: large messages of MPI, or a GPU that runs one
/// communication kernel at a time.) Throws RunError saying what each stage waits for.
void check_schedule(const Schedule& schedule);

/// When each action begins and ends if a forward takes `forward` units of time, a backward `backward` and messages none.
struct TimedAction {
  Action action;
  int64_t begin = 0, end = 0;
};
std::vector<std::vector<TimedAction>> timetable(const Schedule& schedule, int64_t forward = 1, int64_t backward = 2);

/// Share of the time in which a stage has nothing to do, from the formula (p - 1) / (m + p - 1).
double predicted_idle_share(int64_t stages, int64_t micro_batches);

/// The same share, counted in the timetable.
double counted_idle_share(const Schedule& schedule);

/// How many forwards whose backward is still to come stage `stage` holds at most: what its activations cost.
int64_t activations_kept(const Schedule& schedule, int64_t stage);

/// Messages of a step that `stage` sends, or all of them: 2 (p - 1) m without interleaving.
int64_t messages_sent(const Schedule& schedule, int64_t stage);
int64_t messages_sent(const Schedule& schedule);

/// The table of --print-schedule: a row a stage, a column a unit of time, a backward two columns wide; below it what the
/// schedule costs.
std::string schedule_table(const Schedule& schedule);

/// "F3", "B0", "send activation 3": for messages.
std::string to_string(const Action& action);

}  // namespace mgp

#include "examples/pipeline_parallel/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/error.hpp"

namespace mgp {
namespace {

bool is_compute(ActionKind kind) { return kind == ActionKind::forward || kind == ActionKind::backward; }
bool is_send(ActionKind kind) { return kind == ActionKind::send_activation || kind == ActionKind::send_gradient; }

/// The list of one stage while it is made. What a stage has no neighbour for is left out.
class StageList {
 public:
  StageList(int64_t stage, int64_t stages) : first_(stage == 0), last_(stage + 1 == stages) {}
  void forward(int64_t m) { list_.push_back({ActionKind::forward, m}); }
  void backward(int64_t m) { list_.push_back({ActionKind::backward, m}); }
  void recv_activation(int64_t m) {
    if (!first_) list_.push_back({ActionKind::recv_activation, m});
  }
  void send_gradient(int64_t m) {
    if (!first_) list_.push_back({ActionKind::send_gradient, m});
  }
  void send_activation(int64_t m) {
    if (!last_) list_.push_back({ActionKind::send_activation, m});
  }
  void recv_gradient(int64_t m) {
    if (!last_) list_.push_back({ActionKind::recv_gradient, m});
  }
  std::vector<Action> take() { return std::move(list_); }

 private:
  bool first_, last_;
  std::vector<Action> list_;
};

}  // namespace

std::string to_string(const Action& action) {
  const std::string which = action.chunk == 0 ? std::to_string(action.microbatch)
                                              : fmt::format("{} of chunk {}", action.microbatch, action.chunk);
  switch (action.kind) {
    case ActionKind::forward:
      return "F" + which;
    case ActionKind::backward:
      return "B" + which;
    case ActionKind::send_activation:
      return "send activation " + which;
    case ActionKind::recv_activation:
      return "receive activation " + which;
    case ActionKind::send_gradient:
      return "send gradient " + which;
    case ActionKind::recv_gradient:
      return "receive gradient " + which;
  }
  return "";
}

// ── the two schedules ─────────────────────────────────────────────────────────────────────────────────────────────────

Schedule gpipe_schedule(int64_t stages, int64_t micro_batches) {
  Schedule schedule{"gpipe", stages, micro_batches, 1, {}};
  for (int64_t stage = 0; stage < stages; ++stage) {
    StageList list(stage, stages);
    for (int64_t m = 0; m < micro_batches; ++m) {
      list.recv_activation(m);
      list.forward(m);
      list.send_activation(m);
    }
    // The paper draws the backwards last to first. In the order of the forwards the idle share is the same, and the sums of
    // the gradients are those of a run without a pipeline.
    for (int64_t m = 0; m < micro_batches; ++m) {
      list.recv_gradient(m);
      list.backward(m);
      list.send_gradient(m);
    }
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

Schedule one_f_one_b_schedule(int64_t stages, int64_t micro_batches) {
  Schedule schedule{"1f1b", stages, micro_batches, 1, {}};
  for (int64_t stage = 0; stage < stages; ++stage) {
    StageList list(stage, stages);
    // The first gradient comes back when the first microbatch has passed the stages behind this one: so many forwards fit
    // in before. Fewer microbatches than that: all of them (trial B54).
    const int64_t warm_up = std::min(stages - 1 - stage, micro_batches);
    const int64_t steady = micro_batches - warm_up;
    for (int64_t m = 0; m < warm_up; ++m) {
      list.recv_activation(m);
      list.forward(m);
      list.send_activation(m);
    }
    // In the steady state a stage and the next one exchange: an activation down, a gradient up. If both sent first, and a
    // send waited for its receive, both would wait for ever. So stages with an odd number receive first.
    const bool sends_first = stage % 2 == 0;
    if (steady > 0) list.recv_activation(warm_up);
    for (int64_t m = 0; m < steady; ++m) {
      const int64_t ahead = warm_up + m;
      list.forward(ahead);
      if (sends_first) list.send_activation(ahead);
      list.recv_gradient(m);
      if (!sends_first) list.send_activation(ahead);

      list.backward(m);
      const bool more = m + 1 < steady;
      if (sends_first || !more) list.send_gradient(m);
      if (more) list.recv_activation(ahead + 1);
      if (!sends_first && more) list.send_gradient(m);
    }
    for (int64_t m = steady; m < micro_batches; ++m) {
      list.recv_gradient(m);
      list.backward(m);
      list.send_gradient(m);
    }
    schedule.actions.push_back(list.take());
  }
  return schedule;
}

Schedule make_schedule(const std::string& name, int64_t stages, int64_t micro_batches) {
  if (name == "gpipe") return gpipe_schedule(stages, micro_batches);
  if (name == "1f1b") return one_f_one_b_schedule(stages, micro_batches);
  throw UsageError(fmt::format("--schedule is '{}': choose gpipe or 1f1b", name));
}

// ── counting ──────────────────────────────────────────────────────────────────────────────────────────────────────────

double predicted_idle_share(int64_t stages, int64_t micro_batches) {
  return static_cast<double>(stages - 1) / static_cast<double>(micro_batches + stages - 1);
}

int64_t activations_kept(const Schedule& schedule, int64_t stage) {
  int64_t now = 0, most = 0;
  for (const Action& action : schedule.actions.at(static_cast<size_t>(stage))) {
    if (action.kind == ActionKind::forward) most = std::max(most, ++now);
    if (action.kind == ActionKind::backward) --now;
  }
  return most;
}

int64_t messages_sent(const Schedule& schedule, int64_t stage) {
  const std::vector<Action>& list = schedule.actions.at(static_cast<size_t>(stage));
  return std::count_if(list.begin(), list.end(), [](const Action& action) { return is_send(action.kind); });
}

int64_t messages_sent(const Schedule& schedule) {
  int64_t all = 0;
  for (int64_t stage = 0; stage < schedule.stages; ++stage) all += messages_sent(schedule, stage);
  return all;
}

std::vector<std::vector<TimedAction>> timetable(const Schedule& schedule, int64_t forward, int64_t backward) {
  const auto stages = static_cast<size_t>(schedule.stages);
  const auto places = static_cast<size_t>(schedule.stages * schedule.chunks);  // chunks on the way through the model
  const auto micro_batches = static_cast<size_t>(schedule.micro_batches);
  // When the forward and the backward of a microbatch ended in each chunk; -1: not yet.
  std::vector<std::vector<int64_t>> forwarded(places, std::vector<int64_t>(micro_batches, -1)), backwarded = forwarded;
  std::vector<std::vector<TimedAction>> times(stages);
  std::vector<int64_t> clock(stages, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t stage = 0; stage < stages; ++stage) {
      while (times[stage].size() < schedule.actions[stage].size()) {
        const Action& action = schedule.actions[stage][times[stage].size()];
        const size_t place = static_cast<size_t>(action.chunk) * stages + stage;
        const auto m = static_cast<size_t>(action.microbatch);
        int64_t begin = clock[stage], end = begin;
        if (is_compute(action.kind)) {
          const bool is_forward = action.kind == ActionKind::forward;
          // What it needs from the chunk before or behind; the last chunk's backward follows from its own forward.
          int64_t ready = 0;
          if (is_forward && place > 0) ready = forwarded[place - 1][m];
          if (!is_forward) ready = place + 1 < places ? backwarded[place + 1][m] : forwarded[place][m];
          if (ready < 0) break;
          begin = std::max(begin, ready);
          end = begin + (is_forward ? forward : backward);
          (is_forward ? forwarded : backwarded)[place][m] = end;
          clock[stage] = end;
        }
        times[stage].push_back({action, begin, end});
        moved = true;
      }
    }
  }
  return times;
}

double counted_idle_share(const Schedule& schedule) {
  int64_t last = 0, busy = 0;
  for (const std::vector<TimedAction>& stage : timetable(schedule)) {
    for (const TimedAction& timed : stage) {
      last = std::max(last, timed.end);
      busy += timed.end - timed.begin;
    }
  }
  return last == 0 ? 0.0 : 1.0 - static_cast<double>(busy) / static_cast<double>(last * schedule.stages);
}

std::string schedule_table(const Schedule& schedule) {
  const std::vector<std::vector<TimedAction>> times = timetable(schedule);
  const size_t width = std::to_string(schedule.micro_batches - 1).size() + 2;  // "F3 "
  std::string text =
      fmt::format("schedule {}, {} stage{}, {} microbatch{}: F forward, B backward (twice as long), . idle\n",
                  schedule.name, schedule.stages, schedule.stages == 1 ? "" : "s", schedule.micro_batches,
                  schedule.micro_batches == 1 ? "" : "es");
  int64_t last = 0;
  for (const auto& stage : times) last = std::max(last, stage.empty() ? 0 : stage.back().end);
  for (int64_t stage = 0; stage < schedule.stages; ++stage) {
    std::vector<std::string> cells(static_cast<size_t>(last), ".");
    for (const TimedAction& timed : times[static_cast<size_t>(stage)]) {
      for (int64_t t = timed.begin; t < timed.end; ++t) {
        const char* const letter = timed.action.kind == ActionKind::forward ? "F" : "B";
        cells[static_cast<size_t>(t)] = fmt::format("{}{}", letter, timed.action.microbatch);
      }
    }
    std::string line = fmt::format("stage {:<3}", stage);
    for (const std::string& cell : cells) line += fmt::format("{:<{}}", cell, width);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + fmt::format("   keeps {}\n", activations_kept(schedule, stage));
  }
  text += fmt::format("idle share {:.1f} % ((p-1)/(m+p-1): {:.1f} %), messages a step {} (2(p-1)m)\n",
                      100.0 * counted_idle_share(schedule),
                      100.0 * predicted_idle_share(schedule.stages, schedule.micro_batches), messages_sent(schedule));
  return text;
}

}  // namespace mgp

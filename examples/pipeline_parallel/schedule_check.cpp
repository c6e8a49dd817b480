// The proof that a schedule ends: a walk through it in which every send waits for its receive.
#include <fmt/format.h>

#include <set>
#include <tuple>

#include "common/error.hpp"
#include "examples/pipeline_parallel/schedule.hpp"

namespace mgp {
namespace {

/// What has happened so far: (kind, chunk on the way through the model, microbatch).
using Event = std::tuple<ActionKind, int64_t, int64_t>;

class Walk {
 public:
  explicit Walk(const Schedule& schedule)
      : schedule_(schedule),
        next_(static_cast<size_t>(schedule.stages), 0),
        places_(schedule.stages * schedule.chunks) {
    if (schedule.actions.size() != next_.size()) fail(fmt::format("has lists for {} stages", schedule.actions.size()));
  }

  void go_to_the_end() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t stage = 0; stage < schedule_.stages; ++stage) moved = step(stage) || moved;
    }
    std::string waiting;
    for (int64_t stage = 0; stage < schedule_.stages; ++stage) {
      if (const Action* action = head(stage)) {
        waiting += fmt::format("{}stage {} waits at '{}'", waiting.empty() ? "" : ", ", stage, to_string(*action));
      }
    }
    if (!waiting.empty()) fail("stands still: " + waiting);
    for (int64_t place = 0; place < places_; ++place) {
      for (int64_t m = 0; m < schedule_.micro_batches; ++m) {
        if (!done(ActionKind::forward, place, m) || !done(ActionKind::backward, place, m)) {
          fail(fmt::format("leaves out microbatch {} on stage {}", m, place % schedule_.stages));
        }
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw RunError(fmt::format("the schedule {} of {} stages and {} microbatches {}", schedule_.name, schedule_.stages,
                               schedule_.micro_batches, what));
  }
  const Action* head(int64_t stage) const {
    const auto& list = schedule_.actions[static_cast<size_t>(stage)];
    const size_t next = next_[static_cast<size_t>(stage)];
    return next < list.size() ? &list[next] : nullptr;
  }
  bool done(ActionKind kind, int64_t place, int64_t m) const { return events_.count({kind, place, m}) > 0; }
  void advance(int64_t stage, ActionKind kind, int64_t place, int64_t m) {
    if (!events_.insert({kind, place, m}).second) {
      fail(fmt::format("does '{}' twice on stage {}", to_string({kind, m, place / schedule_.stages}), stage));
    }
    ++next_[static_cast<size_t>(stage)];
  }

  /// Lets `stage` do what is next in its list, if it can.
  bool step(int64_t stage) {
    const Action* const action = head(stage);
    if (action == nullptr) return false;
    const int64_t m = action->microbatch;
    const int64_t place = action->chunk * schedule_.stages + stage;
    if (m < 0 || m >= schedule_.micro_batches || action->chunk < 0 || action->chunk >= schedule_.chunks) {
      fail(fmt::format("has '{}' on stage {}", to_string(*action), stage));
    }
    const bool first = place == 0, last = place + 1 == places_;
    const auto need = [&](bool there, const char* what) {
      if (!there) fail(fmt::format("has '{}' on stage {} before {}", to_string(*action), stage, what));
    };
    switch (action->kind) {
      case ActionKind::forward:
        need(first || done(ActionKind::recv_activation, place, m), "its activation was received");
        advance(stage, action->kind, place, m);
        return true;
      case ActionKind::backward:
        need(done(ActionKind::forward, place, m), "its forward");
        need(last || done(ActionKind::recv_gradient, place, m), "its gradient was received");
        advance(stage, action->kind, place, m);
        return true;
      case ActionKind::send_activation:
        need(!last, "there is a chunk behind it");
        need(done(ActionKind::forward, place, m), "its forward");
        return meet(stage, place, ActionKind::recv_activation, place + 1, m);
      case ActionKind::send_gradient:
        need(!first, "there is a chunk before it");
        need(done(ActionKind::backward, place, m), "its backward");
        return meet(stage, place, ActionKind::recv_gradient, place - 1, m);
      case ActionKind::recv_activation:
      case ActionKind::recv_gradient:
        return false;  // moves together with its send
    }
    return false;
  }

  /// A send and its receive pass in the same moment, when both are next in their lists.
  bool meet(int64_t stage, int64_t place, ActionKind recv, int64_t peer_place, int64_t m) {
    const int64_t peer = peer_place % schedule_.stages;
    const Action* const other = head(peer);
    if (other == nullptr || !(*other == Action{recv, m, peer_place / schedule_.stages})) return false;
    advance(stage, head(stage)->kind, place, m);
    advance(peer, recv, peer_place, m);
    return true;
  }

  const Schedule& schedule_;
  std::vector<size_t> next_;
  const int64_t places_;
  std::set<Event> events_;
};

}  // namespace

void check_schedule(const Schedule& schedule) { Walk(schedule).go_to_the_end(); }

}  // namespace mgp

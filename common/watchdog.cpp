#include "common/watchdog.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "common/watchdog_state.hpp"

namespace mgp {

namespace {

/// Seconds after which a process that wanted to end is ended, whatever hangs in it.
constexpr double kOwnerGrace = 10.0;

std::atomic<bool> ending{false};  // end_process has begun

std::mutex current_mutex;
std::weak_ptr<Watchdog::State> current;

}  // namespace

std::shared_ptr<Watchdog::State> current_watchdog() {
  std::lock_guard<std::mutex> lock(current_mutex);
  return current.lock();
}

Watchdog::Watchdog(const Launch& launch, Rendezvous* rendezvous, std::chrono::seconds timeout)
    : state_(std::make_shared<State>(launch, rendezvous, timeout)) {
  {
    std::lock_guard<std::mutex> lock(current_mutex);
    current = state_;
    // A process that returns from main while the thread still runs (an exception passed by) must not meet it in the
    // middle of the static destructors.
    static const int registered = std::atexit([] {
      const std::shared_ptr<State> state = current_watchdog();
      if (state && !ending) state->stop(/*in_order=*/false);
    });
    (void)registered;
  }
  state_->thread = std::thread([state = state_.get()] { state->run(); });
  // This one may have to be left behind inside the driver, so it keeps the state alive.
  state_->asking_thread = std::thread([state = state_] { state->ask(); });
}

Watchdog::~Watchdog() { state_->stop(/*in_order=*/true); }

void Watchdog::set_step(int64_t step) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->mine.step = step;
}

int64_t Watchdog::step() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->mine.step;
}

uint64_t Watchdog::begin_call(const std::string& description, std::function<bool()> poll, std::function<bool()> begun,
                              CallParty party) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->mine.calls += 1;
  state_->mine.last = description;
  if (party.sequence > 0) state_->mine.groups[party.group] = party.sequence;
  const uint64_t id = state_->next_id++;
  state_->entries.emplace(id, State::Entry{description, std::move(poll), std::move(begun), std::move(party)});
  return id;
}

void Watchdog::finish_call(uint64_t id) {
  State::Entry finished;  // its functions may hold the last reference to something: destroyed outside the lock
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto entry = state_->entries.find(id);
  if (entry == state_->entries.end()) return;
  finished = std::move(entry->second);
  state_->entries.erase(entry);
}

void Watchdog::watch_wire(std::function<std::string()> poll_error, std::function<void(int code)> abort) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->wires.push_back({std::move(poll_error), std::move(abort)});
}

Watchdog::Pause::Pause(Watchdog& watchdog) : watchdog_(watchdog) {
  State& state = *watchdog_.state_;
  std::lock_guard<std::mutex> lock(state.mutex);
  state.advance_clock();
  state.pauses += 1;
  state.halted = true;
  state.publish_now = true;  // the others' clocks stop when they read it
  state.wake.notify_all();
}

Watchdog::Pause::~Pause() {
  State& state = *watchdog_.state_;
  std::lock_guard<std::mutex> lock(state.mutex);
  state.advance_clock();
  state.pauses -= 1;
  state.publish_now = true;  // the tick that publishes also finds out whether the clock may go on
  state.wake.notify_all();
}

std::chrono::duration<double> Watchdog::active_time() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return std::chrono::duration<double>(state_->active_now());
}

std::chrono::seconds Watchdog::timeout() const { return state_->timeout; }

std::string Watchdog::laggards() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->missing_ranks(state_->oldest_started());
}

void Watchdog::publish_failure(const std::string& line, int code) { state_->publish(line, code, kOwnerGrace); }

std::string Watchdog::first_failure() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->failure.line;
}

std::string Watchdog::ending_reason() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->failure.rank < 0 || state_->failure.rank == state_->launch.rank) return {};
  return state_->ending_line();
}

void end_process(Watchdog* watchdog, const std::string& line, int code) {
  end_process(watchdog != nullptr ? watchdog->state_ : current_watchdog(), line, code);
}

void end_process(const std::shared_ptr<Watchdog::State>& state, const std::string& line, int code) {
  // The main thread and the watchdog may both come here: the first one decides, the other waits to be ended.
  if (ending.exchange(true)) {
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  // Whatever hangs below (a store that is gone, an abort inside a broken driver), this thread ends the process.
  std::thread([code] {
    std::this_thread::sleep_for(std::chrono::seconds(10));
    _exit(code);
  }).detach();
  if (!line.empty()) {
    const std::string text = line + "\n";
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());  // at once, in one piece
    (void)written;
  }
  std::fflush(nullptr);
  if (state) {
    state->publish(line.empty() ? "stopped" : line, code, kOwnerGrace);
    state->wait_until_heard();
    state->abort_wires(code);
  }
  _exit(code);
}

}  // namespace mgp

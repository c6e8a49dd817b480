// The watchdog's threads: what one does in each tick, and the questions that the other asks.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "common/watchdog_state.hpp"

namespace mgp {

namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kTick{150};
constexpr std::chrono::milliseconds kHeartbeat{500};
constexpr std::chrono::seconds kReadPeersRarely{5};  // while nothing waits; otherwise with each heartbeat
constexpr double kLongWait = 1.0;     // seconds after which an unfinished call makes the peers interesting
constexpr double kOwnerGrace = 5.0;   // for calls whose owner throws at the deadline
constexpr double kFollowGrace = 1.0;  // the main thread may end itself first when another rank failed
constexpr double kStoreGrace = 3.0;   // a rank 0 that ends in order takes its store away while the others end too
constexpr int kMissingTicks = 3;
constexpr std::chrono::seconds kStuckQuestion{1};  // the driver answers in microseconds, or is busy with a launch

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string shortened(const std::string& line) {
  constexpr size_t kLongest = 160;
  return line.size() <= kLongest ? line : fmt::format("{}...", std::string_view(line).substr(0, kLongest - 3));
}

}  // namespace

Watchdog::State::State(const Launch& launch_in, Rendezvous* rendezvous, std::chrono::seconds timeout_in)
    : launch(launch_in), timeout(timeout_in) {
  if (rendezvous != nullptr) store = rendezvous->second_client();
  mine.pid = getpid();
  mine.host = launch.host.empty() ? host_name() : launch.host;
  const auto size = static_cast<size_t>(std::max(1, launch.world_size));
  peers.resize(size);
  seen_alive.assign(size, 0);
  missing_ticks.assign(size, 0);
}

void Watchdog::State::run() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping) {
    lock.unlock();
    tick();
    lock.lock();
    wake.wait_for(lock, kTick, [this] { return stopping || publish_now; });
  }
}

void Watchdog::State::ask() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping) {
    std::vector<std::pair<uint64_t, Entry>> watched(entries.begin(), entries.end());
    for (const auto& [id, entry] : watched) {
      asking = true;
      asked_at = Clock::now();
      lock.unlock();  // the questions go to the driver
      bool finished = false;
      bool begun = false;
      std::string trouble;
      try {
        finished = entry.poll && entry.poll();
        begun = !finished && !entry.started && (!entry.begun || entry.begun());
      } catch (const std::exception& error) {
        trouble = fmt::format("rank {}: {}: {}", launch.rank, entry.description, error.what());
      }
      if (!trouble.empty()) publish(trouble, 1, kFollowGrace);
      lock.lock();
      asking = false;
      const auto found = entries.find(id);
      if (found == entries.end()) continue;
      if (finished) {
        entries.erase(found);
      } else if (begun && !found->second.started) {
        found->second.started = true;
        found->second.start = active_now();
      }
    }
    lock.unlock();
    watched.clear();  // may hold the last reference to an event, and to destroy it asks the driver too
    lock.lock();
    wake.wait_for(lock, kTick, [this] { return stopping; });
  }
}

void Watchdog::State::stop(bool in_order) {
  bool stuck = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
    wake.notify_all();
    stuck = asking && Clock::now() - asked_at > kStuckQuestion;
  }
  if (thread.joinable() && thread.get_id() != std::this_thread::get_id()) thread.join();
  if (asking_thread.joinable()) stuck ? asking_thread.detach() : asking_thread.join();
  if (!in_order) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    mine.left = true;
  }
  publish_heartbeat();
}

// ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────────

double Watchdog::State::active_now() const {
  if (halted) return active;
  return active + std::min(1.0, Seconds(Clock::now() - clock_read).count());
}

void Watchdog::State::advance_clock() {
  // At most a second a tick: a process that was stopped (Ctrl-Z, a debugger that just let go) does not jump.
  active = active_now();
  clock_read = Clock::now();
}

// ── one tick ─────────────────────────────────────────────────────────────────────────────────────────────────────────

void Watchdog::State::tick() {
  const Clock::time_point now = Clock::now();
  // A rank that is stopped cannot say so itself; its neighbours on the host say it to those of other hosts.
  const bool traced = tracer_of(getpid()) != 0 || neighbour_traced;
  bool publish_due = false;
  bool read_often = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    advance_clock();
    publish_due = publish_now || mine.traced != traced || now - published >= kHeartbeat;
    mine.traced = traced;
    mine.paused = pauses > 0;
    publish_now = false;
    const Entry* oldest = oldest_started();
    read_often = halted || (oldest != nullptr && active - oldest->start > kLongWait);
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      read_often = read_often || (static_cast<int>(rank) != launch.rank && !peers[rank].heard());
    }
  }
  if (publish_due) {
    published = now;
    publish_heartbeat();
  }
  if (now - peers_read >= (read_often ? std::chrono::milliseconds(kHeartbeat) : kReadPeersRarely)) {
    peers_read = now;
    read_peers();
  }
  read_failure();
  check_peers();
  check_wires();
  check_deadlines();
  check_failures();
}

void Watchdog::State::check_peers() {
  std::vector<Heartbeat> heard;
  {
    std::lock_guard<std::mutex> lock(mutex);
    heard = peers;
  }
  bool peer_halts = false;
  std::string gone;
  int gone_rank = -1;
  neighbour_traced = false;
  for (size_t index = 0; index < heard.size(); ++index) {
    const Heartbeat& peer = heard[index];
    const int rank = static_cast<int>(index);
    if (rank == launch.rank || !peer.heard() || peer.left) continue;
    peer_halts = peer_halts || peer.paused || peer.traced;
    if (peer.host != mine.host) continue;
    if (!process_ended(peer.pid)) {
      seen_alive[index] = 1;
      missing_ticks[index] = 0;
      neighbour_traced = neighbour_traced || tracer_of(peer.pid) != 0;
    } else if (seen_alive[index] != 0 && ++missing_ticks[index] >= kMissingTicks) {
      // Not there for a while, and no failure in the store. Did it leave in order just now?
      read_peers();
      std::lock_guard<std::mutex> lock(mutex);
      if (!peers[index].left && failure.rank < 0) {
        gone_rank = rank;
        gone = fmt::format("rank {} (process {} on {}) is gone without a word; its last heartbeat: {}", rank, peer.pid,
                           peer.host, describe(rank, peers[index]));
      }
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    halted = pauses > 0 || mine.traced || neighbour_traced || peer_halts;
  }
  if (!gone.empty()) publish(gone, 1, kFollowGrace, gone_rank);
}

void Watchdog::State::check_wires() {
  std::vector<WireWatch> watched;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (failure.rank >= 0) return;
    watched = wires;
  }
  for (const WireWatch& wire : watched) {
    if (!wire.error) continue;
    std::string text;
    try {
      text = wire.error();
    } catch (const std::exception& error) {
      text = error.what();
    }
    if (!text.empty()) publish(fmt::format("rank {}: {}", launch.rank, text), 1, kFollowGrace);
  }
}

void Watchdog::State::check_deadlines() {
  std::string late;
  uint64_t late_id = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    // A driver that does not answer cannot say what has begun: from now on the deadline of every call runs.
    if (asking && Clock::now() - asked_at > kStuckQuestion) {
      for (auto& [id, entry] : entries) {
        if (entry.started) continue;
        entry.started = true;
        entry.start = active_now();
      }
    }
    if (failure.rank < 0 && !own_failure) {
      for (const auto& [id, entry] : entries) {
        const double limit = static_cast<double>(timeout.count()) + (entry.poll ? 0.0 : kOwnerGrace);
        if (!entry.started || active_now() - entry.start <= limit) continue;
        late_id = id;
        late = entry.description;
        break;
      }
    }
  }
  if (late_id == 0) return;
  read_peers();
  std::string line;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto entry = entries.find(late_id);
    if (entry == entries.end()) return;
    line = fmt::format("collective timed out after {} s: rank {}, step {}, {}; {}", timeout.count(), launch.rank,
                       mine.step, late, missing_ranks(&entry->second));
  }
  // The first one to notice speaks at length; for the others the failure is news from the store.
  if (publish(line, 1, kFollowGrace)) end_process(shared_from_this(), line, 1);
}

void Watchdog::State::check_failures() {
  std::string line;
  int code = 1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const Clock::time_point now = Clock::now();
    if (failure.rank >= 0 && failure.rank != launch.rank) {
      if (Seconds(now - failure.heard).count() < kFollowGrace) return;
      line = fmt::format("rank {}: {}", launch.rank, ending_line());
      code = failure.code;
    } else if (own_failure) {
      if (now < own_deadline) return;
      line = own_line;
      code = own_code;
    } else if (!store_lost.empty()) {
      if (Seconds(now - store_lost_at).count() < kStoreGrace) return;
      line = "ending: " + store_lost;  // names this rank and the place
    } else {
      return;
    }
  }
  end_process(shared_from_this(), line, code);
}

// ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const Watchdog::State::Entry* Watchdog::State::oldest_started() const {
  for (const auto& entry : entries) {
    if (entry.second.started) return &entry.second;
  }
  return nullptr;
}

std::string Watchdog::State::missing_ranks(const Entry* entry) const {
  const CallParty party = entry != nullptr ? entry->party : CallParty{};
  const auto is_late = [&](const Heartbeat& peer) {
    if (peer.left) return true;
    if (party.group.empty()) return peer.calls < mine.calls;
    const auto made = peer.groups.find(party.group);
    return made == peer.groups.end() || made->second < party.sequence;
  };
  std::string late;
  std::string present;
  for (int rank = 0; rank < static_cast<int>(peers.size()); ++rank) {
    if (rank == launch.rank) continue;
    if (party.ranks && std::find(party.ranks->begin(), party.ranks->end(), rank) == party.ranks->end()) continue;
    const Heartbeat& peer = peers[static_cast<size_t>(rank)];
    std::string& list = is_late(peer) ? late : present;
    list += (list.empty() ? "" : "; ") + describe(rank, peer);
  }
  // A send or a receive waits for its one peer, whatever else that peer has done.
  if (!party.group.empty() && party.sequence == 0) return "waiting for " + late + present;
  if (!late.empty()) return "missing: " + late;
  if (present.empty()) return "no other rank takes part";
  return "no rank is known to be missing; " + present;
}

std::string Watchdog::State::ending_line() const {
  const std::string line = shortened(failure.line);
  const bool named = line.rfind(fmt::format("rank {} ", failure.rank), 0) == 0;
  return named ? "ending because " + line : fmt::format("ending because rank {} failed: {}", failure.rank, line);
}

void Watchdog::State::abort_wires(int code) {
  std::vector<WireWatch> watched;
  {
    std::lock_guard<std::mutex> lock(mutex);
    watched.swap(wires);
  }
  for (const WireWatch& wire : watched) {
    if (wire.abort) wire.abort(code);
  }
}

}  // namespace mgp

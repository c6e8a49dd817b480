// What the watchdog reads and writes in the store: heartbeats and the first failure.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "common/watchdog_state.hpp"

namespace mgp {

namespace {

const char kFailureCount[] = "failure/count";
const char kFailureText[] = "failure/text";    // "rank\ncode\nline" of the first failure
const char kFailureHeard[] = "failure/heard";  // how many ranks have read it

std::string heartbeat_key(int rank) { return fmt::format("heartbeat/{}", rank); }

}  // namespace

bool Watchdog::State::store_usable() const {
  std::lock_guard<std::mutex> lock(mutex);
  return store != nullptr && store_lost.empty();
}

void Watchdog::State::lose_store(const char* why) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!store_lost.empty()) return;
  store_lost = why;
  store_lost.erase(std::min(store_lost.find('\n'), store_lost.size()));
  store_lost_at = Clock::now();
}

void Watchdog::State::publish_heartbeat() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    text = serialize(mine);
  }
  std::unique_lock<std::timed_mutex> lock(store_mutex, std::chrono::seconds(2));
  if (!lock || !store_usable()) return;
  try {
    store->set(heartbeat_key(launch.rank), text);
  } catch (const std::exception& error) {
    lose_store(error.what());
  }
}

void Watchdog::State::read_peers() {
  std::unique_lock<std::timed_mutex> lock(store_mutex, std::chrono::seconds(2));
  if (!lock || !store_usable()) return;
  try {
    for (int rank = 0; rank < launch.world_size; ++rank) {
      if (rank == launch.rank) continue;
      const std::optional<std::string> text = store->peek(heartbeat_key(rank));
      if (!text) continue;
      const Heartbeat heartbeat = parse_heartbeat(*text);
      std::lock_guard<std::mutex> state_lock(mutex);
      peers[static_cast<size_t>(rank)] = heartbeat;
    }
  } catch (const std::exception& error) {
    lose_store(error.what());
  }
}

void Watchdog::State::read_failure() {
  {
    const std::lock_guard<std::mutex> state_lock(mutex);
    if (failure.rank >= 0) return;
  }
  const std::unique_lock<std::timed_mutex> lock(store_mutex, std::chrono::seconds(2));
  if (!lock || !store_usable()) return;
  try {
    read_failure_locked();
  } catch (const std::exception& error) {
    lose_store(error.what());
  }
}

bool Watchdog::State::read_failure_locked() {
  const std::optional<std::string> text = store->peek(kFailureText);
  if (!text) return false;
  const size_t first = text->find('\n');
  const size_t second = text->find('\n', first + 1);
  if (second == std::string::npos) return false;
  {
    const std::lock_guard<std::mutex> state_lock(mutex);
    failure.rank = std::atoi(text->c_str());
    failure.code = std::atoi(text->c_str() + first + 1);
    failure.line = text->substr(second + 1);
    failure.heard = Clock::now();
  }
  store->add(kFailureHeard, 1);
  return true;
}

bool Watchdog::State::publish(const std::string& line, int code, double grace, int culprit) {
  const int rank = culprit >= 0 ? culprit : launch.rank;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (own_failure) return failure.rank == launch.rank;
    own_failure = true;
    own_line = line;
    own_code = code;
    own_deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace));
    if (failure.rank >= 0) return false;
    if (!store) failure = {rank, code, line, Clock::now()};
  }
  if (!store) return true;
  const std::unique_lock<std::timed_mutex> lock(store_mutex, std::chrono::seconds(1));
  if (!lock || !store_usable()) return false;
  try {
    if (store->add(kFailureCount, 1) == 1) {
      store->set(kFailureText, fmt::format("{}\n{}\n{}", rank, code, line));
      const std::lock_guard<std::mutex> state_lock(mutex);
      failure = {rank, code, line, Clock::now()};
      return true;
    }
    // Somebody was faster by a moment. What it says is there now, or soon.
    for (int i = 0; i < 20 && !read_failure_locked(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } catch (const std::exception& error) {
    lose_store(error.what());
  }
  return false;
}

void Watchdog::State::wait_until_heard() {
  // Only the process that serves the store must wait: with it the message would go away.
  if (!store || launch.rank != 0 || launch.agent_store) return;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(2);
  while (Clock::now() < end) {
    {
      std::unique_lock<std::timed_mutex> lock(store_mutex, std::chrono::milliseconds(500));
      if (!lock || !store_usable()) return;
      try {
        if (store->add(kFailureHeard, 0) >= launch.world_size - 1) return;
      } catch (const std::exception&) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace mgp

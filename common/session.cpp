#include "common/session.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "common/device.hpp"
#include "common/error.hpp"

namespace mgp {

namespace {

using Clock = std::chrono::steady_clock;

// How long a wait spins before it sleeps. A small message between two ranks that run takes some 10 us; a rank that
// spins longer takes the core from the rank it waits for.
constexpr std::chrono::microseconds kSpin{100};
constexpr std::chrono::microseconds kStoreSleep{2000};

/// Registers a wait with the watchdog for as long as it lives.
class WatchedWait {
 public:
  WatchedWait(Watchdog& watchdog, const std::string& what, const CallParty& party)
      : watchdog_(watchdog), id_(watchdog.begin_call(what, nullptr, nullptr, party)) {}
  ~WatchedWait() { watchdog_.finish_call(id_); }
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;

 private:
  Watchdog& watchdog_;
  uint64_t id_;
};

}  // namespace

Session::Session(const Launch& launch_in, at::Device device_in, const CommOptions& options_in)
    : launch(launch_in), device(device_in), options(options_in) {}

Session::~Session() {
  const bool orderly = !failed;
  if (!orderly && mpi) mpi->abandon();
  watchdog.reset();  // publishes that this rank's end is no failure
  if (rendezvous && orderly) {
    try {
      rendezvous->goodbye();
    } catch (const std::exception&) {
      // Somebody else has failed meanwhile; this rank is done.
    }
  }
  rendezvous.reset();
  mpi.reset();
}

std::shared_ptr<Session> Session::start(const Launch& launch, at::Device device, const CommOptions& options) {
  auto session = std::make_shared<Session>(launch, device, options);
  if (device.is_cuda()) {
    check_nccl_version();
  }
  // On GPUs MPI is only used to meet, and only where nobody said where the store is. It never sees a device pointer.
  const bool store_known = !launch.master_addr.empty() || !launch.rendezvous_file.empty() || launch.agent_store;
  const bool meet_over_mpi = started_by_mpi(launch) && !store_known && launch.world_size > 1;
  if (!device.is_cuda() || meet_over_mpi) session->mpi = MpiRuntime::start(launch);
  if (launch.world_size > 1) {
    std::function<std::string(const std::string&)> tell_all;
    if (session->mpi && !launch.agent_store) {
      tell_all = [mpi = session->mpi.get()](const std::string& text) { return mpi->tell_all(text); };
    }
    session->rendezvous = Rendezvous::meet(launch, options.timeout, tell_all);
  }
  const DeviceFacts mine = describe_device(launch, device, at::get_num_threads());
  session->devices = session->rendezvous ? exchange_devices(mine, launch.share_gpu, session->rendezvous.get())
                                         : std::vector<DeviceFacts>{mine};
  session->watchdog = std::make_unique<Watchdog>(launch, session->rendezvous.get(), options.timeout);
  session->watchdog->watch_wire(
      [raw = session.get()]() -> std::string {
        std::lock_guard<std::mutex> lock(raw->wires_mutex_);
        for (Wire* wire : raw->wires_) {
          std::string text = wire->error();
          if (!text.empty()) return text;
        }
        return {};
      },
      [raw = session.get()](int code) {
        // No lock: the thread that holds it may be the one that hangs, and this process ends now.
        raw->failed = true;
        for (Wire* wire : raw->wires_) wire->abort(code);
      });
  return session;
}

void Session::abandon(const std::shared_ptr<Session>& session) {
  session->failed = true;
  if (session->mpi) session->mpi->abandon();
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<Session>>;  // never destroyed, on purpose
  std::lock_guard<std::mutex> lock(mutex);
  if (std::find(kept->begin(), kept->end(), session) == kept->end()) kept->push_back(session);
}

void Session::poll_until(const std::function<bool()>& ready, const std::string& what,
                         std::chrono::microseconds longest_sleep) {
  if (ready()) return;
  const Clock::time_point begin = Clock::now();
  const double active_begin = watchdog->active_time().count();
  std::chrono::microseconds sleep{10};
  Clock::time_point checked = begin;
  for (;;) {
    const Clock::time_point now = Clock::now();
    if (now - begin < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(sleep);
      sleep = std::min(sleep * 2, longest_sleep);
    }
    if (ready()) return;
    if (now - checked < std::chrono::milliseconds(20)) continue;
    checked = now;
    const std::string reason = watchdog->ending_reason();
    if (!reason.empty()) throw RunError(reason);
    if (watchdog->active_time().count() - active_begin < static_cast<double>(options.timeout.count())) continue;
    const std::string line =
        fmt::format("collective timed out after {} s: rank {}, step {}, {}; {}", options.timeout.count(), launch.rank,
                    watchdog->step(), what, watchdog->laggards());
    watchdog->publish_failure(line);
    const std::string earlier = watchdog->ending_reason();  // somebody else noticed first and has said it all
    throw RunError(earlier.empty() ? line : earlier);
  }
}

void Session::poll_until(const std::function<bool()>& ready, const std::string& what, const CallParty& party,
                         std::chrono::microseconds longest_sleep) {
  const WatchedWait watched(*watchdog, what, party);
  poll_until(ready, what, longest_sleep);
}

std::vector<std::string> Session::exchange_text(const GroupFacts& group, int64_t number, const std::string& mine,
                                                const std::string& what) {
  if (!rendezvous || group.size() == 1) return {mine};
  const std::string prefix = fmt::format("text/{}/{}", group.id, number);
  const auto size = static_cast<size_t>(group.size());
  rendezvous->set(fmt::format("{}/{}", prefix, group.rank), mine);
  std::vector<std::string> texts(size);
  std::vector<char> there(size, 0);
  size_t missing = size - 1;
  texts[static_cast<size_t>(group.rank)] = mine;
  there[static_cast<size_t>(group.rank)] = 1;
  const auto ready = [&] {
    for (size_t index = 0; index < size; ++index) {
      if (there[index] != 0) continue;
      std::optional<std::string> text = rendezvous->peek(fmt::format("{}/{}", prefix, index));
      if (!text) return false;  // the ranks after it are asked when this one has come
      texts[index] = *std::move(text);
      there[index] = 1;
      --missing;
    }
    return missing == 0;
  };
  poll_until(ready, what, {group.id + "#text", group.ranks, number}, kStoreSleep);
  // The last one to have read everything removes it.
  if (rendezvous->add(prefix + "/read", 1) == group.size()) {
    for (size_t index = 0; index < size; ++index) rendezvous->erase(fmt::format("{}/{}", prefix, index));
    rendezvous->erase(prefix + "/read");
  }
  return texts;
}

void Session::add_wire(Wire* wire) {
  std::lock_guard<std::mutex> lock(wires_mutex_);
  wires_.push_back(wire);
}

void Session::remove_wire(Wire* wire) {
  std::lock_guard<std::mutex> lock(wires_mutex_);
  wires_.erase(std::remove(wires_.begin(), wires_.end(), wire), wires_.end());
}

}  // namespace mgp

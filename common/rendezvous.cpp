#include "common/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "common/error.hpp"
#include "common/meeting_point.hpp"
#include "common/socket.hpp"
#include "common/store_connection.hpp"

namespace mgp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using TellAll = std::function<std::string(const std::string&)>;

milliseconds time_left(Clock::time_point deadline) {
  return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

constexpr char kFailed = '!';  // what follows is not an address but why there is none

std::string rank_list(const std::vector<int>& ranks) {
  return ranks.empty() ? "none" : fmt::format("{}", fmt::join(ranks, ", "));
}

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

struct Rendezvous::State {
  int rank = 0;
  int size = 1;
  Endpoint connected;   // where this rank's connections go
  std::string address;  // what the banner shows
  std::string prefix;
  bool agent_store = false;
  c10::intrusive_ptr<c10d::Store> server;  // rank 0: serves; shared with second clients, so that it outlives them
  c10::intrusive_ptr<c10d::Store> store;   // what the calls go through, with the prefix of this run

  /// Opens a connection; as the server if `listening` is a socket.
  c10::intrusive_ptr<c10d::Store> open(int listening, milliseconds timeout) const {
    const auto opened = open_store(connected, listening, timeout);
    if (opened) return opened;
    throw RunError(
        fmt::format("rank {}: {} answers, but not as the store of this run: is another program listening there?", rank,
                    connected.shown()));
  }

  /// Runs one call on the store; a lost connection becomes one line.
  template <typename Call>
  auto guarded(const std::string& what, Call&& call) const {
    const QuietLog quiet;
    try {
      return call();
    } catch (const c10::Error&) {
      throw RunError(fmt::format("rank {}: lost the store at {} in {} (has rank 0 ended?)", rank, address, what));
    }
  }

  /// True when all keys are there in time. Polls: a blocking wait of LibTorch would log and could not be told apart
  /// from a lost connection.
  bool wait_for(const std::vector<std::string>& keys, Clock::time_point deadline) const {
    milliseconds pause(1);
    while (!guarded("check", [&] { return store->check(keys); })) {
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::min(pause, time_left(deadline) + milliseconds(1)));
      pause = std::min(pause * 2, milliseconds(20));
    }
    return true;
  }

  std::string read(const std::string& key) const {
    const std::vector<uint8_t> value = guarded("get", [&] { return store->get(key); });
    return {value.begin(), value.end()};
  }

  std::vector<std::string> rank_keys(const std::string& key) const {
    std::vector<std::string> keys;
    for (int r = 0; r < size; ++r) keys.push_back(fmt::format("{}/{}", key, r));
    return keys;
  }

  void serve(const Launch& launch, const TellAll& tell_all);
  void find(const Launch& launch, const TellAll& tell_all, Clock::time_point deadline);
  void expect_all_present(milliseconds timeout);
};

Rendezvous::Rendezvous(std::unique_ptr<State> state) : state_(std::move(state)) {}
Rendezvous::~Rendezvous() = default;

/// Rank 0: takes a port, serves the store there and tells the others.
void Rendezvous::State::serve(const Launch& launch, const TellAll& tell_all) {
  const auto tell = [&](const std::string& text) {
    if (tell_all) {
      tell_all(text);
    } else if (!launch.rendezvous_file.empty()) {
      write_rendezvous_file(launch.rendezvous_file, text);
    }
  };
  try {
    const bool told = tell_all || !launch.rendezvous_file.empty() || launch.world_size == 1;
    const bool loopback = all_local(launch);
    Endpoint mine = told ? Endpoint{launch.master_addr, launch.master_port} : agreed_endpoint(launch);
    if (loopback) mine.host = "127.0.0.1";
    if (mine.host.empty()) mine.host = reachable_address(launch.host);
    const int listening = listen_on(loopback, mine.port);
    if (listening < 0) {
      const std::string why = errno == EADDRINUSE ? "is taken by another program" : std::strerror(errno);
      throw UsageError(
          fmt::format("{} {}: choose another with --master-port of scripts/launch.sh or MASTER_PORT, or leave it "
                      "unset on one machine",
                      mine.shown(), why),
          /*every_rank=*/true);
    }
    address = mine.shown();
    connected = {"127.0.0.1", mine.port};  // works whatever name the others use
    server = open(listening, std::chrono::seconds(10));
  } catch (const std::exception& error) {
    try {
      tell(kFailed + std::string(error.what()));  // nobody may wait for an address that will never come
    } catch (const UsageError&) {
      // The file cannot be written either; the first error is the one to report.
    }
    throw;
  }
  tell(address);
  store = c10::make_intrusive<c10d::PrefixStore>(prefix, server);
}

/// The other ranks, and all ranks under torchrun's agent: learns the address and connects.
void Rendezvous::State::find(const Launch& launch, const TellAll& tell_all, Clock::time_point deadline) {
  std::string text;
  std::optional<Endpoint> agreed;
  const bool by_file = !launch.agent_store && !tell_all && !launch.rendezvous_file.empty();
  if (!launch.agent_store && tell_all) {
    text = tell_all("");
  } else if (!by_file) {
    agreed = agreed_endpoint(launch);
  }
  std::string reason = "nothing there yet";
  while (true) {
    if (by_file) text = read_rendezvous_file(launch.rendezvous_file);  // each time again: the first may be an old one
    if (!text.empty() && text[0] == kFailed) throw UsageError(text.substr(1));
    std::vector<Endpoint> candidates;
    if (const auto endpoint = agreed ? agreed : parse_endpoint(text)) candidates.push_back(*endpoint);
    // The agent serves under the host's own name, which a container may not resolve.
    if (launch.agent_store && all_local(launch)) candidates.push_back({"127.0.0.1", agreed->port});
    for (const Endpoint& candidate : candidates) {
      if (!answers(candidate, reason)) continue;
      connected = candidate;
      address = candidate.shown();
      store =
          c10::make_intrusive<c10d::PrefixStore>(prefix, open(-1, std::min(milliseconds(10000), time_left(deadline))));
      return;
    }
    if (Clock::now() >= deadline) {
      throw RunError(
          fmt::format("rank {} ({}) found no {} at {} in time: {}", launch.rank, launch.host,
                      launch.agent_store ? "torchrun agent" : "rank 0",
                      candidates.empty() ? "the address in " + launch.rendezvous_file : candidates[0].shown(), reason));
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
}

std::unique_ptr<Rendezvous> Rendezvous::meet(const Launch& launch, std::chrono::seconds timeout,
                                             const std::function<std::string(const std::string&)>& tell_all) {
  const Clock::time_point deadline = Clock::now() + timeout;
  auto state = std::make_unique<State>();
  state->rank = launch.rank;
  state->size = launch.world_size;
  state->agent_store = launch.agent_store;
  state->prefix = "mgp/" + launch.store_prefix;
  if (launch.rank == 0 && !launch.agent_store) {
    state->serve(launch, tell_all);
  } else {
    state->find(launch, tell_all, deadline);
  }
  state->expect_all_present(time_left(deadline));
  return std::unique_ptr<Rendezvous>(new Rendezvous(std::move(state)));
}

void Rendezvous::State::expect_all_present(milliseconds timeout) {
  const std::string mine = fmt::format("joined/{}", rank);
  if (guarded("joining", [&] { return store->add(mine, 1); }) > 1) {
    throw RunError(fmt::format("two processes came to {} as rank {} of {}: is another run using this address?", address,
                               rank, size));
  }
  // Rank 0 decides, so that all ranks hear the same; the others allow it some seconds more.
  const std::vector<std::string> keys = rank_keys("joined");
  const std::chrono::seconds grace(10);
  const bool all_here =
      rank == 0 ? wait_for(keys, Clock::now() + timeout) : wait_for({"verdict"}, Clock::now() + timeout + grace);
  std::string verdict;
  int64_t came = size;
  if (rank != 0 && all_here) {
    verdict = read("verdict");
  } else if (!all_here) {
    std::vector<int> present;
    std::vector<int> missing;
    for (int r = 0; r < size; ++r) {
      const bool joined = guarded("check", [&] { return store->check({keys[static_cast<size_t>(r)]}); });
      (joined ? present : missing).push_back(r);
    }
    came = static_cast<int64_t>(present.size());
    verdict = fmt::format("waited {:.0f} s at {} for {} ranks: came {}; missing {}",
                          std::chrono::duration<double>(timeout).count(), address, size, rank_list(present),
                          rank_list(missing));
  }
  if (rank == 0) {
    guarded("verdict", [&] { store->set("verdict", bytes(verdict)); });
    // With rank 0 ends the store: those that came must have heard it first.
    const auto heard_by = Clock::now() + std::chrono::seconds(3);
    while (!verdict.empty() && !agent_store && Clock::now() < heard_by &&
           guarded("verdict", [&] { return store->add("heard", 0); }) + 1 < came) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  } else if (!verdict.empty()) {
    guarded("verdict", [&] { return store->add("heard", 1); });
  }
  if (!verdict.empty()) throw RunError(verdict);
}

void Rendezvous::set(const std::string& key, const std::string& value) {
  state_->guarded("set", [&] { state_->store->set(key, bytes(value)); });
}

std::string Rendezvous::get(const std::string& key, milliseconds timeout) {
  if (!state_->wait_for({key}, Clock::now() + timeout)) {
    throw RunError(fmt::format("rank {}: the store at {} has no key '{}' after {:.1f} s", state_->rank, state_->address,
                               key, std::chrono::duration<double>(timeout).count()));
  }
  return state_->read(key);
}

std::optional<std::string> Rendezvous::peek(const std::string& key) {
  if (!state_->guarded("check", [&] { return state_->store->check({key}); })) return std::nullopt;
  return state_->read(key);
}

int64_t Rendezvous::add(const std::string& key, int64_t amount) {
  return state_->guarded("add", [&] { return state_->store->add(key, amount); });
}

void Rendezvous::erase(const std::string& key) {
  state_->guarded("erase", [&] { state_->store->deleteKey(key); });
}

std::vector<std::string> Rendezvous::exchange(const std::string& key, const std::string& mine, milliseconds timeout) {
  const std::vector<std::string> keys = state_->rank_keys(key);
  set(keys[static_cast<size_t>(state_->rank)], mine);
  if (!state_->wait_for(keys, Clock::now() + timeout)) {
    std::vector<int> missing;
    for (int r = 0; r < state_->size; ++r) {
      if (!peek(keys[static_cast<size_t>(r)])) missing.push_back(r);
    }
    throw RunError(fmt::format("rank {}: exchange of '{}': nothing from rank {} after {:.1f} s", state_->rank, key,
                               rank_list(missing), std::chrono::duration<double>(timeout).count()));
  }
  std::vector<std::string> values;
  for (const std::string& one : keys) values.push_back(state_->read(one));
  return values;
}

std::unique_ptr<Rendezvous> Rendezvous::second_client() const {
  auto state = std::make_unique<State>(*state_);
  state->store = c10::make_intrusive<c10d::PrefixStore>(state->prefix, state->open(-1, std::chrono::seconds(10)));
  return std::unique_ptr<Rendezvous>(new Rendezvous(std::move(state)));
}

void Rendezvous::goodbye() {
  try {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    int64_t gone = add("goodbye", 1);
    if (state_->rank != 0 || state_->agent_store) return;
    while (gone < state_->size && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(5));
      gone = add("goodbye", 0);
    }
  } catch (const RunError&) {
    // The store is gone already: there is nobody left to wait for.
  }
}

const std::string& Rendezvous::address() const { return state_->address; }
int Rendezvous::rank() const { return state_->rank; }
int Rendezvous::size() const { return state_->size; }

}  // namespace mgp

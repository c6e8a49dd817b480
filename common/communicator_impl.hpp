// The inside of a Communicator: what happens round each call. Internal to common/.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "common/communicator.hpp"
#include "common/session.hpp"
#include "common/wire.hpp"

namespace mgp {

struct Communicator::Impl {
  Impl(std::shared_ptr<Session> session_in, GroupFacts facts_in, std::shared_ptr<Wire> wire_in);

  /// Checks, logs, counts and starts a call: on its own, or as part of the open group.
  Work start(Call call);

  void begin_group();
  Work end_group();
  void drop_group() noexcept;

  /// Forgets the works that have passed. Never waits.
  void reap();
  /// Asks MPI about all that is under way.
  void progress();
  /// Waits on the host until `work` has passed.
  void wait_on_host(const Work& work, const std::string& what);
  void wait_for_all();

  std::vector<std::string> exchange_text(const std::string& mine, const std::string& what);

  const std::shared_ptr<Session> session;
  const GroupFacts facts;
  const std::shared_ptr<Wire> wire;
  const std::string wire_text;
  int64_t splits = 0;

 private:
  std::shared_ptr<Work::State> new_state();
  /// With --debug: logs the call, and compares it with the other ranks'.
  void debug(const Call& call);
  void watch(Work::State& state);
  /// Which message between the two ranks it is, if it is one.
  void count_message(Work::State& state, const Call& call);
  void keep(const std::shared_ptr<Work::State>& state);

  int64_t collectives_ = 0;
  std::map<std::tuple<int, int, bool>, int64_t> messages_;  ///< so far, by (from, to, sent)
  int64_t texts_ = 0;
  std::shared_ptr<Work::State> group_;  ///< null: no group is open
  std::mutex mutex_;                    ///< hooks may call from autograd's thread
  std::deque<std::shared_ptr<Work::State>> pending_;
  friend class Communicator;
};

/// "rank 3", or "rank 3 (tp rank 1)" where the group numbers its ranks otherwise than the world.
std::string rank_text(const GroupFacts& facts, size_t rank);

}  // namespace mgp

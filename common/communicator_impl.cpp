#include "common/communicator_impl.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "common/call_checks.hpp"
#include "common/error.hpp"
#include "common/nvtx.hpp"

namespace mgp {

namespace {

bool is_collective(const Call& call) { return call.kind != CallKind::send && call.kind != CallKind::recv; }

}  // namespace

std::string rank_text(const GroupFacts& facts, size_t rank) {
  const int world_rank = (*facts.ranks)[rank];
  if (world_rank == static_cast<int>(rank)) return fmt::format("rank {}", rank);
  return fmt::format("rank {} ({} rank {})", world_rank, facts.name, rank);
}

// ── one started operation ────────────────────────────────────────────────────────────────────────────────────────────

Work::State::~State() {
  if (!finished && watch_id != 0) session->watchdog->finish_call(watch_id);
}

void Work::State::finish() {
  if (finished) return;
  finished = true;
  if (watch_id != 0) session->watchdog->finish_call(watch_id);
  calls.clear();
  if (captured) return;  // each replay takes its own time
  show();
  // The calls of a group go out as one, so they share its time by their bytes.
  const double seconds = Moment::milliseconds(progress->began, progress->ended) / 1000.0;
  double bytes = 0.0;
  for (const LedgerRow& row : counted) bytes += static_cast<double>(row.payload_bytes);
  for (const LedgerRow& row : counted) {
    const double share =
        bytes > 0.0 ? static_cast<double>(row.payload_bytes) / bytes : 1.0 / static_cast<double>(counted.size());
    session->ledger.add_time(group, row.call, row.purpose, seconds * share);
  }
}

void Work::State::show() const {
  if (!session->observer) return;
  PastCall call{group, description, 0, messages, progress->began, progress->ended};
  for (const LedgerRow& row : counted) call.bytes += row.payload_bytes;
  session->observer(call);
}

void Work::wait() {
  if (!state_) return;
  if (state_->open) {
    throw RunError(
        fmt::format("{}: its group is still open; wait on what CommGroup::finish() returns", state_->description));
  }
  state_->wire->wait(*state_);
  if (state_->wire->moves_only_when_asked()) state_->finish();
}

bool Work::done() {
  if (!state_) return true;
  if (state_->open || !state_->wire->done(*state_)) return false;
  state_->finish();
  return true;
}

const Moment& Work::began() const {
  if (!state_) throw RunError("Work::began: no operation was started");
  return state_->progress->began;
}

const Moment& Work::ended() const {
  if (!state_) throw RunError("Work::ended: no operation was started");
  return state_->progress->ended;
}

// ── round each call ──────────────────────────────────────────────────────────────────────────────────────────────────

Communicator::Impl::Impl(std::shared_ptr<Session> session_in, GroupFacts facts_in, std::shared_ptr<Wire> wire_in)
    : session(std::move(session_in)),
      facts(std::move(facts_in)),
      wire(std::move(wire_in)),
      wire_text(wire->describe()) {}

std::shared_ptr<Work::State> Communicator::Impl::new_state() {
  auto state = std::make_shared<Work::State>();
  state->wire = wire;
  state->session = session;
  state->group = facts.name;
  return state;
}

Work Communicator::Impl::start(Call call) {
  check_call(call, facts.name, facts.rank, facts.size(), session->device);
  reap();
  if (is_collective(call)) ++collectives_;
  debug(call);
  const bool alone = group_ == nullptr;
  const std::shared_ptr<Work::State> state = alone ? new_state() : group_;
  if (state->description.empty()) state->description = describe(call, facts.name);
  const LedgerRow row{facts.name, name_of(call.kind), call.tag.purpose, 1, call.payload_bytes()};
  state->counted.push_back(row);
  state->calls.push_back(call);
  if (alone) {
    wire->open(*state, /*group=*/false);
    watch(*state);
    state->open = false;
  }
  count_message(*state, call);
  {
    const NvtxRange range(state->description.c_str());
    wire->start(*state, call);
  }
  session->ledger.count(row.group, row.call, row.purpose, row.payload_bytes);
  if (alone) {
    wire->close(*state, /*group=*/false);
    keep(state);
  }
  return Work(state);
}

void Communicator::Impl::begin_group() {
  if (group_) throw RunError(fmt::format("communicator '{}': a group of calls is already open", facts.name));
  reap();
  const std::shared_ptr<Work::State> state = new_state();
  wire->open(*state, /*group=*/true);
  group_ = state;
}

Work Communicator::Impl::end_group() {
  const std::shared_ptr<Work::State> state = std::move(group_);
  if (state->calls.empty()) state->description = facts.name + " group without calls";
  if (state->calls.size() > 1) {
    state->description += fmt::format(" and {} more in one group", state->calls.size() - 1);
  }
  watch(*state);
  state->open = false;
  wire->close(*state, /*group=*/true);
  keep(state);
  return Work(state);
}

void Communicator::Impl::drop_group() noexcept {
  if (!group_) return;
  wire->drop_group();
  group_->open = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(group_));
}

void Communicator::Impl::debug(const Call& call) {
  if (session->options.debug == DebugLevel::off) return;
  const std::string text = describe(call, facts.name);
  fmt::print(stderr, "[rank {}] step {} {} {} B\n", session->launch.rank, session->watchdog->step(), text,
             call.payload_bytes());
  if (session->options.debug != DebugLevel::detail || !is_collective(call)) return;
  const std::vector<std::string> all = exchange_text(signature(call) + "\n" + text, "comparing " + text);
  const auto signature_of = [](const std::string& line) { return line.substr(0, line.find('\n')); };
  bool equal = true;
  std::string sides;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    equal = equal && signature_of(all[rank]) == signature_of(all[0]);
    sides += fmt::format("{}{} calls {}", rank == 0 ? "" : "; ", rank_text(facts, rank),
                         all[rank].substr(all[rank].find('\n') + 1));
  }
  if (!equal) throw RunError("the ranks do not make the same call: " + sides);
}

void Communicator::Impl::watch(Work::State& state) {
  if (state.captured) return;  // nothing runs yet
  CallParty party{facts.id, facts.ranks, 0};
  std::vector<int> peers;
  for (const Call& call : state.calls) {
    if (is_collective(call)) {
      party.sequence = collectives_;
    } else {
      peers.push_back((*facts.ranks)[static_cast<size_t>(call.peer)]);
    }
  }
  if (party.sequence == 0) party.ranks = std::make_shared<const std::vector<int>>(std::move(peers));
  state.watch_id = session->watchdog->begin_call(state.description, wire->finished_question(state.progress),
                                                 wire->begun_question(state.progress), std::move(party));
}

void Communicator::Impl::count_message(Work::State& state, const Call& call) {
  if (is_collective(call)) return;
  const int mine = (*facts.ranks)[static_cast<size_t>(facts.rank)];
  const int peer = (*facts.ranks)[static_cast<size_t>(call.peer)];
  const bool sent = call.kind == CallKind::send;
  const int from = sent ? mine : peer;
  const int to = sent ? peer : mine;
  state.messages.push_back({facts.id, from, to, messages_[{from, to, sent}]++, sent});
}

void Communicator::Impl::keep(const std::shared_ptr<Work::State>& state) {
  if (state->captured) {  // memory of a graph stays where it is, and each replay takes its own time
    state->show();
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(state);
}

void Communicator::Impl::reap() {
  if (wire->capturing()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!pending_.empty() && (pending_.front()->finished || wire->done(*pending_.front()))) {
    pending_.front()->finish();
    pending_.pop_front();
  }
}

void Communicator::Impl::progress() {
  if (!wire->moves_only_when_asked()) return;
  reap();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<Work::State>& state : pending_) {
    if (!state->finished && wire->done(*state)) state->finish();
  }
}

void Communicator::Impl::wait_on_host(const Work& work, const std::string& what) {
  Work copy = work;
  copy.state_->progress->waiting = true;
  session->poll_until([&] { return copy.done(); }, what);
}

void Communicator::Impl::wait_for_all() {
  for (;;) {
    reap();
    std::shared_ptr<Work::State> first;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (pending_.empty()) return;
      first = pending_.front();
    }
    first->progress->waiting = true;
    session->poll_until([&] { return wire->done(*first); }, first->description);
  }
}

std::vector<std::string> Communicator::Impl::exchange_text(const std::string& mine, const std::string& what) {
  return session->exchange_text(facts, ++texts_, mine, what);
}

}  // namespace mgp

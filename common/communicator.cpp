#include "common/communicator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <map>
#include <numeric>

#include "common/communicator_impl.hpp"
#include "common/error.hpp"

namespace mgp {

// ── coming and going ─────────────────────────────────────────────────────────────────────────────────────────────────

Communicator Communicator::connect(const Launch& launch, at::Device device, const CommOptions& options) {
  const std::shared_ptr<Session> session = Session::start(launch, device, options);
  GroupFacts facts;
  facts.id = "world";
  facts.name = "world";
  facts.rank = launch.rank;
  std::vector<int> ranks(static_cast<size_t>(launch.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  facts.ranks = std::make_shared<const std::vector<int>>(std::move(ranks));
  try {
    std::shared_ptr<Wire> wire = device.is_cuda() ? make_nccl_wire(*session, facts) : make_mpi_wire(*session, facts);
    return Communicator(std::make_shared<Impl>(session, facts, std::move(wire)));
  } catch (const UsageError&) {
    throw;  // all ranks find the same mistake, so all leave in order
  } catch (const std::exception& error) {
    session->watchdog->publish_failure(error.what());
    Session::abandon(session);
    throw;
  }
}

Communicator::Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Communicator::Communicator(Communicator&&) noexcept = default;

Communicator& Communicator::operator=(Communicator&& other) noexcept {
  if (this == &other) return *this;
  leave();
  impl_ = std::move(other.impl_);
  return *this;
}

Communicator::~Communicator() { leave(); }

void Communicator::leave() {
  if (!impl_) return;
  const std::shared_ptr<Impl> impl = std::move(impl_);
  Session& session = *impl->session;
  if (std::uncaught_exceptions() > 0 || session.failed || !session.watchdog->first_failure().empty()) {
    // Something has failed: nobody is waited for. The session stays, so that the others hear of it; so do the buffers,
    // which a peer may still write to.
    Session::abandon(impl->session);
    impl->wire->abort(/*code=*/0);
    (void)new std::shared_ptr<Impl>(impl);  // never destroyed, on purpose
    return;
  }
  try {
    impl->wait_for_all();
    impl->wire->leave();
  } catch (const std::exception& error) {
    end_process(session.watchdog.get(), fmt::format("rank {} failed: {}", session.launch.rank, error.what()),
                kExitFailed);
  }
}

// ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────────

int Communicator::rank() const { return impl_->facts.rank; }
int Communicator::size() const { return impl_->facts.size(); }
const std::string& Communicator::name() const { return impl_->facts.name; }
at::Device Communicator::device() const { return impl_->session->device; }
const char* Communicator::wire() const { return impl_->wire_text.c_str(); }
const std::vector<int>& Communicator::members() const { return *impl_->facts.ranks; }
const std::vector<DeviceFacts>& Communicator::devices() const { return impl_->session->devices; }
Ledger& Communicator::ledger() { return impl_->session->ledger; }
Watchdog& Communicator::watchdog() { return *impl_->session->watchdog; }
void Communicator::observe(std::function<void(const PastCall&)> observer) {
  impl_->session->observer = std::move(observer);
}

void Communicator::set_debug(DebugLevel level) { impl_->session->options.debug = level; }
void Communicator::progress() { impl_->progress(); }

// ── collectives ──────────────────────────────────────────────────────────────────────────────────────────────────────

Work Communicator::all_reduce(at::Tensor tensor, ReduceOp op, CallTag tag) {
  return impl_->start({CallKind::all_reduce, tensor, tensor, op, -1, std::move(tag)});
}

Work Communicator::all_gather(at::Tensor output, at::Tensor input, CallTag tag) {
  return impl_->start({CallKind::all_gather, std::move(output), std::move(input), ReduceOp::sum, -1, std::move(tag)});
}

Work Communicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op, CallTag tag) {
  return impl_->start({CallKind::reduce_scatter, std::move(output), std::move(input), op, -1, std::move(tag)});
}

Work Communicator::broadcast(at::Tensor tensor, int root, CallTag tag) {
  return impl_->start({CallKind::broadcast, tensor, tensor, ReduceOp::sum, root, std::move(tag)});
}

Work Communicator::reduce(at::Tensor tensor, int root, ReduceOp op, CallTag tag) {
  return impl_->start({CallKind::reduce, tensor, tensor, op, root, std::move(tag)});
}

Work Communicator::send(at::Tensor tensor, int peer, CallTag tag) {
  return impl_->start({CallKind::send, tensor, tensor, ReduceOp::sum, peer, std::move(tag)});
}

Work Communicator::recv(at::Tensor tensor, int peer, CallTag tag) {
  return impl_->start({CallKind::recv, tensor, tensor, ReduceOp::sum, peer, std::move(tag)});
}

void Communicator::barrier(const std::string& label) {
  const at::Tensor nothing = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device()));
  const Work work =
      impl_->start({CallKind::barrier, nothing, nothing, ReduceOp::sum, -1, {label, Purpose::bookkeeping}});
  impl_->wait_on_host(work, fmt::format("{} barrier '{}'", name(), label));
  impl_->wait_for_all();  // NCCL's stream is in order anyway; MPI finishes as it likes
}

// ── groups of ranks, and what they say to each other ─────────────────────────────────────────────────────────────────

std::optional<Communicator> Communicator::split(int color, int key, const std::string& name) {
  const std::vector<std::string> all =
      impl_->exchange_text(fmt::format("{} {}", color, key), fmt::format("{} split '{}'", this->name(), name));
  struct Place {
    int key;
    int old_rank;
  };
  std::vector<Place> places;
  for (size_t old_rank = 0; old_rank < all.size(); ++old_rank) {
    Place place{0, static_cast<int>(old_rank)};
    int its_color = 0;
    const char* const end = all[old_rank].data() + all[old_rank].size();
    const char* const space = std::from_chars(all[old_rank].data(), end, its_color).ptr;
    std::from_chars(space + 1, end, place.key);
    if (color >= 0 && its_color == color) places.push_back(place);
  }
  std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.key < b.key; });
  GroupFacts facts;
  facts.name = name;
  facts.id = fmt::format("{}/{}.{}.{}", impl_->facts.id, name, ++impl_->splits, color);
  std::vector<int> ranks;
  for (const Place& place : places) {
    if (place.old_rank == rank()) facts.rank = static_cast<int>(ranks.size());
    ranks.push_back(members()[static_cast<size_t>(place.old_rank)]);
  }
  facts.ranks = std::make_shared<const std::vector<int>>(std::move(ranks));
  std::shared_ptr<Wire> wire = impl_->wire->split(color, key, facts);
  if (!wire) return std::nullopt;
  return Communicator(std::make_shared<Impl>(impl_->session, std::move(facts), std::move(wire)));
}

void Communicator::expect_same(const std::string& what, uint64_t value) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor mine = at::full({1}, static_cast<int64_t>(value), options).to(device());
  const at::Tensor all = at::empty({size()}, options.device(device()));
  all_gather(all, mine, {what, Purpose::bookkeeping}).wait();
  const at::Tensor on_host = all.cpu();
  const int64_t* const values = on_host.data_ptr<int64_t>();
  // The value that most ranks have counts as the right one; rank 0 decides between equals.
  std::map<int64_t, int> votes;
  for (int rank = 0; rank < size(); ++rank) ++votes[values[rank]];
  if (votes.size() == 1) return;
  int64_t common = values[0];
  for (int rank = 1; rank < size(); ++rank) {
    if (votes[values[rank]] > votes[common]) common = values[rank];
  }
  std::string differing;
  for (int rank = 0; rank < size(); ++rank) {
    if (values[rank] == common) continue;
    differing += fmt::format("{}{} has {:#018x}", differing.empty() ? "" : ", ",
                             rank_text(impl_->facts, static_cast<size_t>(rank)), static_cast<uint64_t>(values[rank]));
  }
  throw RunError(fmt::format("{} differ between the ranks of '{}' at step {}: {}, {} of {} ranks have {:#018x}", what,
                             name(), watchdog().step(), differing, votes[common], size(),
                             static_cast<uint64_t>(common)));
}

std::vector<std::string> Communicator::gather_text(const std::string& key, const std::string& mine) {
  return impl_->exchange_text(mine, fmt::format("{} gather_text '{}'", name(), key));
}

// ── several calls as one ─────────────────────────────────────────────────────────────────────────────────────────────

CommGroup::CommGroup(Communicator& communicator)
    : communicator_(communicator), exceptions_(std::uncaught_exceptions()) {
  communicator_.impl_->begin_group();
}

CommGroup::~CommGroup() {
  if (!open_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    communicator_.impl_->drop_group();
    return;
  }
  try {
    const Work work = finish();
  } catch (const std::exception& error) {
    end_process(&communicator_.watchdog(),
                fmt::format("rank {} failed: {}", communicator_.impl_->session->launch.rank, error.what()),
                kExitFailed);
  }
}

Work CommGroup::finish() {
  open_ = false;
  return communicator_.impl_->end_group();
}

}  // namespace mgp

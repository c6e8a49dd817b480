// The NCCL wire: one communicator and one stream of its own.
//
// How a call gets onto the wire (open, start, close):
//
//   current stream   ...compute...──●                 ... other compute ...      ●── wait(): continues after `out`
//                                   │ in                                         │
//   this stream                     └─► began ─► ncclAllReduce ─► ended ─► out ──┘
//
// `in` and `out` are plain events that order the streams; began and ended carry times. The communicator is
// non-blocking: NCCL's calls return at once with ncclInProgress, and we ask until they are done. So the host never
// hangs inside NCCL where no deadline could reach it, and ncclCommAbort is always safe.
#include "common/error.hpp"
#include "common/session.hpp"
#include "common/wire.hpp"

#if MGP_WITH_CUDA && MGP_WITH_NCCL

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "common/nccl_support.hpp"

namespace mgp {

namespace {

struct NcclPart : Work::State::WirePart {
  explicit NcclPart(c10::cuda::CUDAStream stream) : issued_on(stream) {}
  c10::cuda::CUDAStream issued_on;  ///< the stream that was current when the call was made
  StreamFence out;
};

class NcclWire : public Wire {
 public:
  NcclWire(Session& session, const GroupFacts& facts)
      : session_(session),
        name_(facts.name),
        size_(facts.size()),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, session.device.index())) {}

  ~NcclWire() override { abort(0); }  // no more than a net: leave() or abort() came before

  /// Meets the other ranks: rank 0 makes an id, the store hands it round.
  void connect(const GroupFacts& facts) {
    ncclUniqueId id;
    if (facts.rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    if (session_.rendezvous) {
      // The generation keeps a second connection of this process from reading the first one's id. A restart under
      // torchrun has another store prefix.
      static std::atomic<int> generation{0};
      const std::string key = fmt::format("nccl_id/{}", generation++);
      if (facts.rank == 0) session_.rendezvous->set(key, std::string(id.internal, sizeof(id.internal)));
      std::string text;
      const auto arrived = [&] {
        const std::optional<std::string> value = session_.rendezvous->peek(key);
        text = value.value_or("");
        return value.has_value();
      };
      session_.poll_until(arrived, "waiting for the NCCL id of rank 0", {}, std::chrono::milliseconds(2));
      if (text.size() != sizeof(id.internal)) throw RunError("the NCCL id in the store has a wrong size");
      std::memcpy(id.internal, text.data(), sizeof(id.internal));
    }
    const c10::cuda::CUDAGuard guard(session_.device);
    ncclConfig_t config = configure();
    settle(ncclCommInitRankConfig(&comm_, size_, id, facts.rank, &config), "making the NCCL communicator 'world'");
    session_.add_wire(this);
  }

  std::string describe() const override {
    int version = 0;
    ncclGetVersion(&version);
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }

  std::function<bool()> begun_question(std::shared_ptr<CallProgress> progress) override {
    return [progress = std::move(progress), device = session_.device] {
      enter_watching_thread(device);
      return progress->began.passed();
    };
  }

  std::function<bool()> finished_question(std::shared_ptr<CallProgress> progress) override {
    return [progress = std::move(progress), device = session_.device] {
      enter_watching_thread(device);
      return progress->launched.load(std::memory_order_acquire) && progress->ended.passed();
    };
  }

  bool capturing() const override {
    return is_capturing(c10::cuda::getCurrentCUDAStream(session_.device.index()).stream());
  }

  void open(Work::State& state, bool group) override {
    const c10::cuda::CUDAGuard guard(session_.device);
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(session_.device.index());
    state.captured = is_capturing(current.stream());
    state.part = std::make_unique<NcclPart>(current);
    StreamFence in;  // may be destroyed once it is recorded and waited for: the driver keeps what it needs
    in.record(current.stream());
    in.block(stream_.stream());
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream_);
      state.progress->began = Moment::record(session_.device);
    }
    if (broken_) throw RunError(fmt::format("communicator '{}': an exception left a group of calls half made", name_));
    if (group) check(ncclGroupStart(), "ncclGroupStart");
  }

  void start(Work::State& state, const Call& call) override {
    const c10::cuda::CUDAGuard guard(session_.device);
    const ncclResult_t result = enqueue(call);
    if (state.open) {
      // Inside a group nothing runs yet; ncclGroupEnd tells.
      if (result != ncclSuccess && result != ncclInProgress) check(result, state.description);
    } else {
      settle(result, state.description);
    }
  }

  void close(Work::State& state, bool group) override {
    const c10::cuda::CUDAGuard guard(session_.device);
    if (group) settle(ncclGroupEnd(), state.description);
    // The kernel is in the stream now (settle() waits for NCCL's own thread to have put it there): what follows in the
    // stream follows the communication.
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream_);
      state.progress->ended = Moment::record(session_.device);
    }
    static_cast<NcclPart&>(*state.part).out.record(stream_.stream());
    state.progress->launched.store(true, std::memory_order_release);
  }

  void wait(Work::State& state) override {
    const c10::cuda::CUDAGuard guard(session_.device);
    auto& part = static_cast<NcclPart&>(*state.part);
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(session_.device.index());
    part.out.block(current.stream());
    // The stream that made the call continues after the communication, so memory that it frees from now on is free: the
    // tensors need no longer be kept. On another stream they are kept until the communication has passed.
    if (current == part.issued_on) state.calls.clear();
  }

  void drop_group() noexcept override {
    broken_ = true;
    (void)ncclGroupEnd();  // returns at once: the communicator is non-blocking
  }

  bool done(Work::State& state) override {
    return !state.captured && state.progress->launched.load(std::memory_order_acquire) &&
           state.progress->ended.passed();
  }

  std::shared_ptr<Wire> split(int color, int key, const GroupFacts& facts) override {
    const c10::cuda::CUDAGuard guard(session_.device);
    // NCCL wants no outstanding work on the parent.
    Moment quiet;
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream_);
      quiet = Moment::record(session_.device);
    }
    session_.poll_until([&] { return quiet.passed(); }, fmt::format("{}: calls before a split", name_));
    const bool stays_out = facts.ranks->empty();
    auto child = std::make_shared<NcclWire>(session_, facts);
    ncclConfig_t config = child->configure();
    const std::string what = fmt::format("splitting '{}' off '{}'", facts.name, name_);
    // A thread of NCCL makes the child and writes its handle when it is complete; the parent's state alone may say
    // "success" before. On the heap, and not freed when this fails: that thread may still be at work then.
    auto* const comm = new ncclComm_t(nullptr);
    const ncclResult_t started = ncclCommSplit(comm_, stays_out ? NCCL_SPLIT_NOCOLOR : color, key, comm, &config);
    if (started != ncclInProgress) check(started, what);
    const auto complete = [&] {
      ncclResult_t parent = ncclSuccess;
      check(ncclCommGetAsyncError(comm_, &parent), what);
      if (parent == ncclInProgress) return false;
      check(parent, what);
      return stays_out || *static_cast<ncclComm_t volatile*>(comm) != nullptr;
    };
    session_.poll_until(complete, what);
    if (stays_out) return nullptr;
    child->comm_ = *comm;
    delete comm;
    child->settle(ncclInProgress, what);  // the child has a state of its own
    session_.add_wire(child.get());
    return child;
  }

  std::string error() override {
    const std::lock_guard<std::timed_mutex> lock(mutex_);
    if (comm_ == nullptr || leaving_) return {};
    ncclResult_t result = ncclSuccess;
    if (ncclCommGetAsyncError(comm_, &result) != ncclSuccess || result == ncclSuccess || result == ncclInProgress) {
      return {};
    }
    return fmt::format("NCCL failed on communicator '{}': {} ({})", name_, ncclGetErrorString(result),
                       ncclGetLastError(comm_));
  }

  void leave() override {
    if (comm_ == nullptr) return;
    const c10::cuda::CUDAGuard guard(session_.device);
    leaving_ = true;
    settle(ncclCommFinalize(comm_), fmt::format("leaving '{}'", name_));
    session_.remove_wire(this);
    const std::lock_guard<std::timed_mutex> lock(mutex_);
    ncclCommDestroy(comm_);
    comm_ = nullptr;
  }

  void abort(int) noexcept override {
    if (comm_ == nullptr) return;
    if (!aborted_.exchange(true)) {
      // Ends settle() on another thread, which must not find its communicator freed.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    // The watchdog may ask for the error at this moment. A thread that hangs with the lock must not keep us for ever.
    const std::unique_lock<std::timed_mutex> lock(mutex_, std::chrono::milliseconds(500));
    if (comm_ == nullptr) return;
    ncclComm_t comm = comm_;
    comm_ = nullptr;
    ncclCommAbort(comm);
  }

 private:
  ncclConfig_t configure() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
#if NCCL_VERSION_CODE >= 22700
    config.commName = name_.c_str();  // shows in NCCL_DEBUG=INFO
#endif
    return config;
  }

  ncclResult_t enqueue(const Call& call) {
    const void* const input = call.input.data_ptr();
    void* const output = call.output.data_ptr();
    const auto in_count = static_cast<size_t>(call.input.numel());
    const auto out_count = static_cast<size_t>(call.output.numel());
    const ncclDataType_t type = nccl_type(call.input.scalar_type());
    // With one rank the average is the sum. (NCCL 2.28.9's kernel for an average over one rank leaves the last element
    // of some odd counts unwritten when input and output differ: seen with 4099 doubles.)
    const ncclRedOp_t op = nccl_op(size_ == 1 && call.op == ReduceOp::avg ? ReduceOp::sum : call.op);
    cudaStream_t stream = stream_.stream();
    switch (call.kind) {
      case CallKind::barrier:
      case CallKind::all_reduce:
        return ncclAllReduce(input, output, in_count, type, op, comm_, stream);
      case CallKind::all_gather:
        return ncclAllGather(input, output, in_count, type, comm_, stream);
      case CallKind::reduce_scatter:
        return ncclReduceScatter(input, output, out_count, type, op, comm_, stream);
      case CallKind::broadcast:
        return ncclBroadcast(input, output, in_count, type, call.peer, comm_, stream);
      case CallKind::reduce:
        return ncclReduce(input, output, in_count, type, op, call.peer, comm_, stream);
      case CallKind::send:
        return ncclSend(input, in_count, type, call.peer, comm_, stream);
      case CallKind::recv:
        return ncclRecv(output, out_count, type, call.peer, comm_, stream);
    }
    return ncclInvalidArgument;
  }

  void check(ncclResult_t result, const std::string& what) {
    if (result == ncclSuccess) return;
    throw RunError(fmt::format("{}: NCCL: {} ({})", what, ncclGetErrorString(result), ncclGetLastError(comm_)));
  }

  /// Asks until the communicator is no longer in progress.
  void settle(ncclResult_t result, const std::string& what) {
    if (result == ncclInProgress) {
      session_.poll_until(
          [&] {
            if (aborted_) throw RunError(what + ": aborted");
            check(ncclCommGetAsyncError(comm_, &result), what);
            return result != ncclInProgress;
          },
          what);
    }
    check(result, what);
  }

  Session& session_;
  const std::string name_;
  const int size_;
  const c10::cuda::CUDAStream stream_;
  ncclComm_t comm_ = nullptr;
  std::timed_mutex mutex_;  ///< between the watchdog's question and the end of the communicator
  std::atomic<bool> leaving_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> broken_{false};
};

}  // namespace

std::shared_ptr<Wire> make_nccl_wire(Session& session, const GroupFacts& facts) {
  if (session.rendezvous) {
    int version = 0;
    ncclGetVersion(&version);
    GroupFacts before = facts;  // the communicator counts its own exchanges from 1
    before.id += "#nccl";
    const std::vector<std::string> versions =
        session.exchange_text(before, 1, std::to_string(version), "comparing NCCL versions");
    for (size_t rank = 0; rank < versions.size(); ++rank) {
      if (versions[rank] == versions[0]) continue;
      throw UsageError(
          fmt::format("rank 0 runs NCCL {}, rank {} runs NCCL {}: all ranks need the same (numbers are "
                      "NCCL's version codes)",
                      versions[0], rank, versions[rank]));
    }
  }
  auto wire = std::make_shared<NcclWire>(session, facts);
  wire->connect(facts);
  return wire;
}

}  // namespace mgp

#else

namespace mgp {

std::shared_ptr<Wire> make_nccl_wire(Session&, const GroupFacts&) {
  throw UsageError(
      "GPU ranks exchange over NCCL, but this was built without CUDA or NCCL: configure again with "
      "-DMGP_CUDA=ON -DMGP_NCCL=ON, or train on the CPU with --device cpu");
}

}  // namespace mgp

#endif

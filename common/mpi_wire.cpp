// The MPI wire, for CPU ranks. Every call is non-blocking: it posts requests, and wait() asks MPI about them until they
// are complete. MPI moves messages only inside such questions, so what overlaps is what asks
// (Communicator::progress()).
#include "common/error.hpp"
#include "common/session.hpp"
#include "common/wire.hpp"

#if MGP_WITH_MPI

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "common/mpi_types.hpp"

namespace mgp {

namespace {

int64_t chunk_limit = std::numeric_limits<int>::max();

/// The requests of one work, and what is left to do when they are complete.
struct MpiPart : Work::State::WirePart {
  struct Expected {
    size_t request;  ///< index of a receive
    int count;       ///< elements that must have come
    MPI_Datatype type;
  };
  std::vector<MPI_Request> requests;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  ///< (to, from): results that could not be made in place
  std::vector<at::Tensor> averages;                       ///< sums, to be divided by the number of ranks
  std::vector<Expected> expected;
  bool complete = false;
};

/// Elements [first, first + count) of a contiguous tensor.
void* at_element(const at::Tensor& tensor, int64_t first) {
  return static_cast<char*>(tensor.data_ptr()) + first * tensor.element_size();
}

class MpiWire : public Wire {
 public:
  MpiWire(Session& session, const GroupFacts& facts, MPI_Comm parent, std::shared_ptr<MpiOps> ops)
      : session_(session), name_(facts.name), rank_(facts.rank), size_(facts.size()), ops_(std::move(ops)) {
    // A communicator of our own: messages of anybody else in this process cannot match ours.
    check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    session_.add_wire(this);
  }

  ~MpiWire() override { session_.remove_wire(this); }

  std::string describe() const override { return fmt::format("MPI ({})", MpiRuntime::version()); }

  // The deadline runs while somebody waits: before that MPI makes no progress, and nobody is to blame for it.
  std::function<bool()> begun_question(std::shared_ptr<CallProgress> progress) override {
    return [progress = std::move(progress)] { return progress->waiting.load(); };
  }
  std::function<bool()> finished_question(std::shared_ptr<CallProgress>) override { return nullptr; }

  void open(Work::State& state, bool) override {
    state.part = std::make_unique<MpiPart>();
    state.progress->began = Moment::record(at::kCPU);
  }

  void close(Work::State& state, bool) override { state.progress->launched = true; }
  void drop_group() noexcept override {}  // what was posted stays posted; the failure ends the process

  void start(Work::State& state, const Call& call) override {
    auto& part = static_cast<MpiPart&>(*state.part);
    const std::string& what = state.description;
    switch (call.kind) {
      case CallKind::barrier:
        check_mpi(MPI_Ibarrier(comm_, next(part)), what);
        break;
      case CallKind::all_reduce:
      case CallKind::reduce:
        reduce(part, call, what);
        break;
      case CallKind::all_gather:
        all_gather(part, call, what);
        break;
      case CallKind::reduce_scatter:
        reduce_scatter(part, call, what);
        break;
      case CallKind::broadcast:
        in_chunks(call.output.numel(), [&](int64_t first, int count) {
          check_mpi(MPI_Ibcast(at_element(call.output, first), count, mpi_type(call.output.scalar_type()), call.peer,
                               comm_, next(part)),
                    what);
        });
        break;
      case CallKind::send:
        in_chunks(call.input.numel(), [&](int64_t first, int count) {
          check_mpi(MPI_Isend(at_element(call.input, first), count, mpi_type(call.input.scalar_type()), call.peer, 0,
                              comm_, next(part)),
                    what);
        });
        break;
      case CallKind::recv:
        in_chunks(call.output.numel(), [&](int64_t first, int count) {
          const MPI_Datatype type = mpi_type(call.output.scalar_type());
          part.expected.push_back({part.requests.size(), count, type});
          check_mpi(MPI_Irecv(at_element(call.output, first), count, type, call.peer, 0, comm_, next(part)), what);
        });
        break;
    }
  }

  bool done(Work::State& state) override {
    auto& part = static_cast<MpiPart&>(*state.part);
    if (part.complete) return true;
    if (state.open) return false;
    int flag = 0;
    std::vector<MPI_Status> statuses(part.requests.size());
    const int result =
        MPI_Testall(static_cast<int>(part.requests.size()), part.requests.data(), &flag, statuses.data());
    if (result != MPI_SUCCESS || flag != 0) {
      // Over, whether it went well or not.
      part.complete = true;
      state.progress->ended = Moment::record(at::kCPU);
    }
    if (result == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : statuses) {
        if (status.MPI_ERROR != MPI_ERR_PENDING) check_mpi(status.MPI_ERROR, state.description);
      }
    }
    check_mpi(result, state.description);
    if (flag == 0) return false;
    check_sizes(part, statuses, state.description);
    for (const auto& [to, from] : part.copies) to.copy_(from);
    for (at::Tensor& sum : part.averages) {
      if (at::isFloatingType(sum.scalar_type())) {
        sum.div_(size_);
      } else {
        sum.div_(size_, "trunc");  // as NCCL does
      }
    }
    return true;
  }

  bool moves_only_when_asked() const override { return true; }

  void wait(Work::State& state) override {
    state.progress->waiting = true;
    session_.poll_until([&] { return done(state); }, state.description);
  }

  std::shared_ptr<Wire> split(int color, int key, const GroupFacts& facts) override {
    const bool stays_out = facts.ranks->empty();
    MPI_Comm child = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, stays_out ? MPI_UNDEFINED : color, key, &child), "MPI_Comm_split");
    if (stays_out) return nullptr;
    auto wire = std::make_shared<MpiWire>(session_, facts, child, ops_);
    MPI_Comm_free(&child);
    return wire;
  }

  void leave() override {
    session_.remove_wire(this);
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }

  void abort(int code) noexcept override {
    // Only when the process ends: MPI's launcher then ends the other ranks too. A wire that is dropped because an
    // exception passes by keeps quiet, so that the exception's own message comes first.
    if (code != 0) MPI_Abort(MPI_COMM_WORLD, code);
  }

 private:
  static MPI_Request* next(MpiPart& part) {
    part.requests.push_back(MPI_REQUEST_NULL);
    return &part.requests.back();
  }

  /// At least one piece, so that an empty tensor makes a real call too.
  template <typename Action>
  static void in_chunks(int64_t elements, const Action& action) {
    int64_t first = 0;
    do {
      const int64_t count = std::min(chunk_limit, elements - first);
      action(first, static_cast<int>(count));
      first += count;
    } while (first < elements);
  }

  void reduce(MpiPart& part, const Call& call, const std::string& what) {
    const at::Tensor& tensor = call.output;
    const MPI_Datatype type = mpi_type(tensor.scalar_type());
    const MPI_Op op = ops_->find(tensor.scalar_type(), call.op);
    in_chunks(tensor.numel(), [&](int64_t first, int count) {
      void* const data = at_element(tensor, first);
      if (call.kind == CallKind::all_reduce) {
        check_mpi(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op, comm_, next(part)), what);
      } else if (rank_ == call.peer) {
        check_mpi(MPI_Ireduce(MPI_IN_PLACE, data, count, type, op, call.peer, comm_, next(part)), what);
      } else {
        check_mpi(MPI_Ireduce(data, nullptr, count, type, op, call.peer, comm_, next(part)), what);
      }
    });
    if (call.op == ReduceOp::avg && (call.kind == CallKind::all_reduce || rank_ == call.peer)) {
      part.averages.push_back(tensor);
    }
  }

  void all_gather(MpiPart& part, const Call& call, const std::string& what) {
    const int64_t count = call.input.numel();
    const MPI_Datatype type = mpi_type(call.input.scalar_type());
    void* const slot = at_element(call.output, rank_ * count);
    const bool in_place = call.input.data_ptr() == slot;
    if (count <= chunk_limit) {
      check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : call.input.data_ptr(), static_cast<int>(count), type,
                               call.output.data_ptr(), static_cast<int>(count), type, comm_, next(part)),
                what);
      return;
    }
    // Each rank's part in pieces, from its owner to all.
    if (!in_place) call.output.view({-1}).narrow(0, rank_ * count, count).copy_(call.input.view({-1}));
    for (int owner = 0; owner < size_; ++owner) {
      in_chunks(count, [&](int64_t first, int piece) {
        check_mpi(MPI_Ibcast(at_element(call.output, owner * count + first), piece, type, owner, comm_, next(part)),
                  what);
      });
    }
  }

  void reduce_scatter(MpiPart& part, const Call& call, const std::string& what) {
    const int64_t count = call.output.numel();
    const MPI_Datatype type = mpi_type(call.input.scalar_type());
    const MPI_Op op = ops_->find(call.input.scalar_type(), call.op);
    // MPI wants the two buffers apart. Where the output is this rank's part of the input, as NCCL allows it, the result
    // goes through a buffer.
    at::Tensor result = call.output;
    if (count > 0 && call.output.data_ptr() == at_element(call.input, rank_ * count)) {
      result = at::empty_like(call.output);
      part.copies.emplace_back(call.output, result);
    }
    if (count <= chunk_limit) {
      check_mpi(MPI_Ireduce_scatter_block(call.input.data_ptr(), result.data_ptr(), static_cast<int>(count), type, op,
                                          comm_, next(part)),
                what);
    } else {
      for (int owner = 0; owner < size_; ++owner) {
        in_chunks(count, [&](int64_t first, int piece) {
          void* const target = rank_ == owner ? at_element(result, first) : nullptr;
          check_mpi(MPI_Ireduce(at_element(call.input, owner * count + first), target, piece, type, op, owner, comm_,
                                next(part)),
                    what);
        });
      }
    }
    if (call.op == ReduceOp::avg) part.averages.push_back(call.output);
  }

  /// A longer message than the receiver's tensor is MPI's own error; a shorter one would go unnoticed.
  static void check_sizes(const MpiPart& part, const std::vector<MPI_Status>& statuses, const std::string& what) {
    for (const MpiPart::Expected& expected : part.expected) {
      int count = 0;
      MPI_Get_count(&statuses[expected.request], expected.type, &count);
      if (count == expected.count) continue;
      throw RunError(
          fmt::format("{}: the tensor has room for {} elements, the message has {}", what, expected.count, count));
    }
  }

  Session& session_;
  const std::string name_;
  const int rank_;
  const int size_;
  const std::shared_ptr<MpiOps> ops_;
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace

std::shared_ptr<Wire> make_mpi_wire(Session& session, const GroupFacts& facts) {
  return std::make_shared<MpiWire>(session, facts, MPI_COMM_WORLD, std::make_shared<MpiOps>());
}

void set_mpi_chunk_limit(int64_t elements) { chunk_limit = elements > 0 ? elements : std::numeric_limits<int>::max(); }

}  // namespace mgp

#else

namespace mgp {

std::shared_ptr<Wire> make_mpi_wire(Session&, const GroupFacts&) {
  throw UsageError("CPU ranks exchange over MPI, but this was built without it");  // MpiRuntime::start said so before
}

void set_mpi_chunk_limit(int64_t) {}

}  // namespace mgp

#endif

// What a Communicator needs of a wire. There are two: NCCL for GPUs (nccl_wire.cpp) and MPI for CPUs (mpi_wire.cpp).
// Internal to common/: trainers see communicator.hpp.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/communicator.hpp"

namespace mgp {

struct Session;
class Wire;

enum class CallKind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, recv, barrier };

const char* name_of(CallKind kind);
const char* name_of(ReduceOp op);

/// One call, checked: both tensors are defined, contiguous, on the right device and of the right size. Calls that work
/// in place have the same tensor on both sides.
struct Call {
  CallKind kind;
  at::Tensor output;
  at::Tensor input;
  ReduceOp op = ReduceOp::sum;
  int peer = -1;  ///< root, or the other rank of send and recv
  CallTag tag;

  /// The tensor whose bytes the ledger counts: the larger one.
  const at::Tensor& payload() const { return kind == CallKind::reduce_scatter ? input : output; }
  int64_t payload_bytes() const;
};

/// Which ranks form a communicator. Shared with the watchdog.
struct GroupFacts {
  std::string id;                                 ///< unique in the run: "world", "world/tp.1.0"
  std::string name;                               ///< "world", "tp"
  std::shared_ptr<const std::vector<int>> ranks;  ///< of the world, in the order of the group
  int rank = 0;                                   ///< mine, in the group
  int size() const { return static_cast<int>(ranks->size()); }
};

/// What the watchdog's thread may see of a started call: no tensors, so that they are not kept alive by it.
struct CallProgress {
  std::atomic<bool> launched{false};  ///< `ended` is valid
  std::atomic<bool> waiting{false};   ///< the host waits for it
  Moment began;
  Moment ended;
};

struct Work::State {
  ~State();

  std::shared_ptr<Wire> wire;
  std::shared_ptr<Session> session;
  std::string group;
  std::vector<Call> calls;                  ///< keeps the tensors alive until the communication has passed
  std::vector<LedgerRow> counted;           ///< what the calls counted as, for their share of the time
  std::vector<PastCall::Message> messages;  ///< the sends and receives among them
  std::string description;
  std::shared_ptr<CallProgress> progress = std::make_shared<CallProgress>();
  uint64_t watch_id = 0;  ///< 0: not watched
  bool open = true;       ///< in a group that is not finished yet
  bool captured = false;  ///< part of a CUDA graph: runs when the graph is replayed
  bool finished = false;  ///< seen complete: counted, tensors released

  /// What one wire needs beyond this.
  struct WirePart {
    virtual ~WirePart() = default;
  };
  std::unique_ptr<WirePart> part;

  /// Counts the time, tells the watchdog, releases the tensors. Once.
  void finish();
  /// Tells the session's observer, if there is one.
  void show() const;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string describe() const = 0;

  /// Questions that the watchdog's thread may ask at any time: has the call begun, is it finished?
  virtual std::function<bool()> begun_question(std::shared_ptr<CallProgress> progress) = 0;
  virtual std::function<bool()> finished_question(std::shared_ptr<CallProgress> progress) = 0;

  /// Whether the current stream records a CUDA graph: then nothing may be asked of the device.
  virtual bool capturing() const { return false; }

  /// Before the first operation of a work: fences in and marks the beginning.
  virtual void open(Work::State& state, bool group) = 0;
  virtual void start(Work::State& state, const Call& call) = 0;
  /// After the last: everything is on its way.
  virtual void close(Work::State& state, bool group) = 0;
  /// Instead of close(), when an exception leaves a group half made: the wire is of no use afterwards.
  virtual void drop_group() noexcept = 0;
  virtual void wait(Work::State& state) = 0;
  /// Never waits. True again and again once it was true.
  virtual bool done(Work::State& state) = 0;
  virtual bool moves_only_when_asked() const { return false; }  ///< MPI

  /// Collective. `facts.ranks` empty: this rank stays out and gets null.
  virtual std::shared_ptr<Wire> split(int color, int key, const GroupFacts& facts) = 0;

  virtual std::string error() { return {}; }  ///< asked by the watchdog
  virtual void leave() = 0;                   ///< in order, with all ranks
  virtual void abort(int code) noexcept = 0;  ///< at once, alone
};

/// Collective: connects all ranks of `facts` over NCCL. UsageError when this was built without it.
std::shared_ptr<Wire> make_nccl_wire(Session& session, const GroupFacts& facts);

/// The same over MPI.
std::shared_ptr<Wire> make_mpi_wire(Session& session, const GroupFacts& facts);

/// MPI counts are int, so larger tensors go in pieces. Tests make the pieces small.
void set_mpi_chunk_limit(int64_t elements);

}  // namespace mgp

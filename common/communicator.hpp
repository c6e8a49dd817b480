// Collectives on typed tensors: NCCL on GPUs, MPI on CPUs, one interface with NCCL's names.
//
// Every call STARTS the operation and returns a Work; nothing may be read or overwritten before Work::wait(). So
// overlap is visible at the call site: what stands between the call and its wait is what hides the communication.
//
//   Work work = world.all_reduce(bucket, ReduceOp::avg, {"bucket 0"});
//   ...                                  // compute that does not touch `bucket`
//   work.wait();                         // GPU: the current STREAM waits, not the host. CPU: the host waits.
//
// On a GPU a call fences in (the communication stream waits for what the current stream has queued so far) and wait()
// fences out, both with events. Tensors are kept alive until the communication has passed.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/device.hpp"
#include "common/launch.hpp"
#include "common/ledger.hpp"
#include "common/timing.hpp"

namespace mgp {

class Rendezvous;
class Watchdog;

enum class ReduceOp { sum, avg, max, min };

/// What a call is for: shown in messages, in --debug info and in the ledger.
struct CallTag {
  std::string label;  ///< "bucket 3", "loss", "encoder.layers.0": what the tensor is
  Purpose purpose = Purpose::training;
};

/// --debug: off; info logs every call (step, rank, call, tensor, bytes); detail also proves before each collective that
/// all ranks of the group make the same call with the same size and dtype, and names both sides if they do not. It
/// cannot prove send and recv: two ranks that both send first are no mistake here. Detail waits on the host before each
/// call.
enum class DebugLevel { off, info, detail };

struct CommOptions {
  std::chrono::seconds timeout{300};  ///< deadline of one collective; does not run while a rank sits in a debugger
  DebugLevel debug = DebugLevel::off;
};

/// A call that has passed, for --trace.
struct PastCall {
  std::string group;        ///< name of the communicator: a row of the trace
  std::string description;  ///< "world all_reduce 'bucket 0' f32[262144]"
  int64_t bytes = 0;        ///< payload
  /// Of send and recv: between which ranks of the world, and which message between the two in this direction it is.
  struct Message {
    std::string group_id;  ///< unique in the run
    int from = 0, to = 0;
    int64_t number = 0;
    bool sent = false;  ///< this rank is `from`
  };
  std::vector<Message> messages;
  Moment began, ended;
};

/// A started operation.
class [[nodiscard]] Work {
 public:
  Work() = default;
  /// GPU: makes the current stream wait for the communication. CPU: waits, and throws RunError at the deadline with the
  /// call, the ranks that are missing and what they did last. Waiting twice is harmless.
  void wait();
  /// Whether it has finished; never waits. On MPI this also drives progress.
  bool done();
  /// When the communication began and ended on the communication stream (GPU), or when it was posted and seen complete
  /// (CPU). Valid after wait().
  const Moment& began() const;
  const Moment& ended() const;
  bool valid() const { return state_ != nullptr; }

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  friend class Communicator;
  std::shared_ptr<State> state_;
};

class Communicator {
 public:
  /// Connects all ranks of `launch`: meets them in the store, checks versions and devices, makes the NCCL communicator
  /// (device is CUDA) or checks MPI's size against the launcher's (CPU). World size 1 works without a store and still
  /// makes real calls. Throws UsageError or RunError; starts the watchdog.
  static Communicator connect(const Launch& launch, at::Device device, const CommOptions& options);

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  /// Leaves in order: waits for pending work, says goodbye, finalises. After an exception it aborts instead.
  ~Communicator();

  int rank() const;
  int size() const;
  const std::string& name() const;  ///< "world", "dp", "tp", ...
  at::Device device() const;
  const char* wire() const;                         ///< "NCCL 2.28.9" or "MPI (Open MPI 4.1.4)"
  const std::vector<int>& members() const;          ///< the ranks of this group, as ranks of the world
  const std::vector<DeviceFacts>& devices() const;  ///< of all ranks of the world, in rank order

  // ── collectives ── Each checks device, dtype (fp64 fp32 fp16 bf16 int64 int32 uint8), contiguity and sizes first;
  // the message names both sides ("all_gather 'x': output has 12 elements, 3 ranks x input of 5 need 15").

  /// tensor <- op over ranks of tensor, in place.
  Work all_reduce(at::Tensor tensor, ReduceOp op, CallTag tag);
  /// output[r*n : (r+1)*n] <- input (n elements) of rank r; output has size() * n elements.
  Work all_gather(at::Tensor output, at::Tensor input, CallTag tag);
  /// output (n elements) <- op over ranks of input[rank*n : (rank+1)*n]; input has size() * n elements.
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op, CallTag tag);
  /// tensor <- tensor of `root`, in place.
  Work broadcast(at::Tensor tensor, int root, CallTag tag);
  /// On `root`: tensor <- op over ranks; elsewhere unchanged.
  Work reduce(at::Tensor tensor, int root, ReduceOp op, CallTag tag);
  /// Point to point. No tags: messages between two ranks arrive in the order of the calls, sizes must match.
  Work send(at::Tensor tensor, int peer, CallTag tag);
  Work recv(at::Tensor tensor, int peer, CallTag tag);

  /// Host barrier: returns when every rank of the group has come and all earlier calls of this group are finished here.
  void barrier(const std::string& label);

  /// New communicators, one for each color, ranks ordered by (key, old rank). Collective over this group; a negative
  /// color stays out and gets nullopt. They share the watchdog and the ledger, and have a stream of their own. Calls of
  /// several communicators must be issued in the same order on all ranks: a GPU does not promise to run two streams at
  /// once, so two NCCL kernels can wait for each other for ever (NCCL_LAUNCH_ORDER_IMPLICIT=1 makes the order hold).
  std::optional<Communicator> split(int color, int key, const std::string& name);

  /// Throws RunError on every rank, naming the ranks that differ, unless `value` is equal on all ranks.
  void expect_same(const std::string& what, uint64_t value);

  /// Text of every rank in rank order (over the store; "" for others when alone). For tables, never in the loop.
  std::vector<std::string> gather_text(const std::string& key, const std::string& mine);

  /// MPI moves messages only inside MPI calls: hooks call this while backward runs. Nothing to do on NCCL.
  void progress();

  /// Changes --debug for all communicators of this process. On all ranks alike, between calls.
  void set_debug(DebugLevel level);

  /// `observer` is told of every call of all communicators of this process, once it has passed; in a CUDA graph when it is
  /// captured. It runs inside the library: it must not make calls. Null ends it.
  void observe(std::function<void(const PastCall&)> observer);

  Ledger& ledger();
  Watchdog& watchdog();

  struct Impl;
  explicit Communicator(std::shared_ptr<Impl> impl);

 private:
  friend class CommGroup;
  void leave();
  std::shared_ptr<Impl> impl_;
};

/// Calls between construction and finish() go out together (ncclGroupStart/End): a send and a receive in one group
/// cannot deadlock, and small collectives become one launch. The Works returned inside belong to the group: wait on
/// finish().
class CommGroup {
 public:
  explicit CommGroup(Communicator& communicator);
  ~CommGroup();  ///< ends the group if finish() was not called; drops it when an exception passes by
  CommGroup(const CommGroup&) = delete;
  CommGroup& operator=(const CommGroup&) = delete;
  Work finish();

 private:
  Communicator& communicator_;
  int exceptions_;  ///< in flight when the group began
  bool open_ = true;
};

/// A 64-bit hash of the tensors' bytes, in order, computed on their device: equal hashes mean equal bits.
uint64_t hash_tensors(const std::vector<at::Tensor>& tensors);

}  // namespace mgp

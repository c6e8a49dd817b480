// --trace: what every rank did and when, as one file for ui.perfetto.dev or chrome://tracing.
//
// A rank collects spans (a step, a phase, a call on the wire) and numbers (memory) with marks on its device's streams. At
// the end rank 0 gets the events of all ranks as text and writes the file. There
//   - a process is a rank, a row is "step", "compute" or one communicator;
//   - all times are those of one clock: marks of a GPU are measured from a mark whose time on the host's monotonic clock is
//     known, and processes of a host share that clock;
//   - an arrow goes from each send to its receive.
// The format: Google, "Trace Event Format" (events X, C, M, s and f).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/communicator.hpp"
#include "common/timing.hpp"

namespace mgp {

/// What one rank did. Calls may come from autograd's thread too.
class Trace {
 public:
  /// Spans that a rank keeps: the text that goes to rank 0 stays below 2 MB. Later ones are counted, and the file says so.
  static constexpr int64_t kSpanLimit = 20000;

  /// Waits for the device once, to learn which time a mark on it has.
  Trace(int rank, at::Device device);

  /// A piece of work on a row. The marks may still be ahead of the device.
  void span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended);
  /// The same with marks on another device of this process (model parallel). Its first span waits for that device once.
  void span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended,
            at::Device device);
  /// A call on the wire, on the row of its communicator.
  void communication(const PastCall& call);
  /// A number that holds from `at` until the next one of its track.
  void counter(const std::string& track, const Moment& at, double value);

  /// Turns marks into times and lets them go. Waits until the device has reached them: call where the host has waited
  /// anyway.
  void resolve();

  /// All events of this rank for trace_file(). Waits as resolve() does.
  std::string serialize();

 private:
  /// Marks are compared on one device alone, so each device has a mark whose time is known.
  struct Base {
    at::Device device;
    Moment mark;
    double ns = 0;  // its time on the host's monotonic clock
  };
  struct Span {
    int64_t row = 0, name = 0;  // indices into words_
    size_t base = 0;            // index into bases_
    Moment began, ended;        // until resolve()
    int64_t began_ns = 0, ended_ns = 0, bytes = 0;
    std::vector<PastCall::Message> messages;
  };
  struct Value {
    int64_t track = 0;
    Moment at;
    int64_t at_ns = 0;
    double value = 0;
  };
  int64_t word(const std::string& text);
  void add(const std::string& row, const std::string& name, const Moment& began, const Moment& ended, int64_t bytes,
           std::vector<PastCall::Message> messages, at::Device device);
  size_t base_of(at::Device device);
  void resolve_locked();
  static int64_t nanoseconds(const Base& base, const Moment& mark);

  std::mutex mutex_;
  const int rank_;
  const at::Device device_;
  std::vector<Base> bases_;  // that of device_ is the first
  size_t resolved_ = 0;      // of spans_
  size_t resolved_values_ = 0;
  std::vector<std::string> words_;
  std::map<std::string, int64_t> index_of_;
  std::vector<Span> spans_;
  std::vector<Value> values_;
  int64_t dropped_ = 0;
};

/// How far each rank's monotonic clock is ahead of rank 0's, in nanoseconds: 0 for the ranks of rank 0's host. Of another
/// host it is read right after a barrier, so it is wrong by as much as the ranks leave the barrier apart (some 10 us).
/// Collective.
std::vector<int64_t> clock_offsets(Communicator& world);

/// The file, from serialize() of every rank in rank order. `process_names`: one for each rank. Spans of a row that overlap
/// (calls of MPI that are under way at once) go to rows of their own: "communication world", "communication world (2)".
/// Throws RunError on text that serialize() did not make.
std::string trace_file(const std::vector<std::string>& ranks, const std::vector<std::string>& process_names,
                       const std::vector<int64_t>& offsets_ns);

}  // namespace mgp

// What a Run remembers between its calls. Seen by run*.cpp alone.
#pragma once

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/metrics.hpp"
#include "common/nvml.hpp"
#include "common/report.hpp"
#include "common/run.hpp"
#include "common/sharded_checkpoint.hpp"
#include "common/trace.hpp"

namespace mgp {

/// Steps that --profile records, after the warm-up.
inline constexpr int64_t kProfiledSteps = 3;

/// A checkpoint that is being written while training goes on (--async-save).
struct SaveUnderWay {
  int64_t step = 0;
  FullState full;              // rank 0's copy, with --save
  std::vector<Moment> copied;  // it is in host memory: a mark on each device that holds parameters
  std::string full_error;
  std::optional<ShardedSave> sharded;
  std::future<void> writer;  // joined when this goes
  bool busy() const { return writer.wait_for(std::chrono::seconds(0)) != std::future_status::ready; }
};

struct Run::State {
  const Options options;
  const Launch launch;
  const at::Device device;
  Communicator* const world;      // null in a trainer of one process
  ShardLayout* layout = nullptr;  // null: every rank holds whole tensors
  MemoryPrediction memory;
  std::vector<CallPrediction> calls;
  std::vector<DeviceFacts> devices;

  TrainingState loaded;  // step 0 unless --load
  TrainingRecord record;
  std::vector<PendingStep> pending;  // steps whose numbers are still on the device
  Moment step_began;
  Report report;
  std::unique_ptr<MetricsFile> metrics;
  NamedTensors batches;  // --dump-batches, rank 0
  std::vector<std::pair<std::string, int64_t>> measured_memory;
  int64_t memory_mark = 0;
  int64_t saved_step = -1;
  bool save_failed = false;
  std::unique_ptr<SaveUnderWay> saving;
  std::vector<std::string> warnings;     // for the record; printed when they came up
  std::string drifted;                   // with --verify: which ranks ended with other parameters
  bool stop = false;                     // Ctrl-C, agreed on by all ranks
  bool go_on = options.min_seconds > 0;  // past --steps, because --min-seconds are not over; agreed on likewise
  std::chrono::steady_clock::time_point started;

  // ── what can be watched (run_watch.cpp) ──
  std::unique_ptr<NvmlSampler> gpu;
  std::unique_ptr<Trace> trace;  // --trace
  std::string phase;             // the open one; empty between steps
  Moment phase_began;
  std::map<std::string, Moment> whole_units;  // --trace: when each unit came
  int64_t current_step = 0;                   // the one under way, 0 before the first
  bool profiling = false, profiled = false;
  bool halts_wait = true;  // false once the keyboard of --pace =key has gone

  State(const Options& o, const Launch& l, at::Device d, Communicator* w)
      : options(o), launch(l), device(d), world(w) {}

  bool records() const { return options.verify; }
  bool saves() const { return options.save || options.save_sharded; }
  /// Whole tensors on the CPU: copies, or gathered through the layout (collective; empty on ranks other than 0).
  NamedTensors whole(const NamedTensors& tensors) const {
    return layout != nullptr ? layout->gather(tensors) : copies_on_cpu(tensors);
  }
  /// Text of every rank in rank order; collective, and of one where there is no world.
  std::vector<std::string> from_all(const std::string& key, const std::string& mine) const {
    return world != nullptr ? world->gather_text(key, mine) : std::vector<std::string>{mine};
  }
  /// Says it on stderr at once, and keeps it for the run object.
  void warn(const std::string& line);
  void inject(int64_t step) const;
  void refuse_if_too_large(const MemoryPattern& pattern) const;
  void flush(int64_t step);
  /// Equal on all ranks, or RunError; with --verify the difference is kept in `drifted`.
  void check_equal(const std::string& what, uint64_t hash);
  bool stop_asked() const;  ///< by Ctrl-C, on this rank
  void begin_watching();
  void begin_phase(const std::string& name);
  void end_phase();
  bool halts_after(const std::string& name) const;
  void halt(const std::string& after);
  std::string standstill_report(const std::string& after, const std::vector<std::string>& rows) const;
  void wait_at_halt();
  void trace_memory(const Moment& at);
  void start_profile();
  void write_profile();
  void abandon_profile();
  void write_trace();
  void write_checkpoint(int64_t step, const AdamW& optimizer, const LossScaler& scaler,
                        const std::vector<std::string>& bucket_order);
  void save_full(int64_t step, const AdamW& optimizer, const TrainingState& training);
  void save_shards(int64_t step, const AdamW& optimizer, const TrainingState& training);
  void begin_save(int64_t step, const AdamW& optimizer, const TrainingState& training);
  /// Waits for the writer, publishes and says so; nothing if there is none. Collective where pieces are saved.
  void finish_save();
  void save_failed_because(const std::exception& error);
};

}  // namespace mgp

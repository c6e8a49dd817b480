// What a Run remembers between its calls. Seen by run.cpp and run_finish.cpp alone.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/metrics.hpp"
#include "common/report.hpp"
#include "common/run.hpp"

namespace mgp {

struct Run::State {
  const Options options;
  const Launch launch;
  const at::Device device;
  Communicator* const world;  // null in a trainer of one process
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
  std::string drifted;                   // with --verify: which ranks ended with other parameters
  bool stop = false;                     // Ctrl-C, agreed on by all ranks
  bool go_on = options.min_seconds > 0;  // past --steps, because --min-seconds are not over; agreed on likewise
  std::chrono::steady_clock::time_point started;

  State(const Options& o, const Launch& l, at::Device d, Communicator* w)
      : options(o), launch(l), device(d), world(w) {}

  bool records() const { return options.verify; }
  void inject(int64_t step) const;
  void refuse_if_too_large(const MemoryPattern& pattern) const;
  void flush(int64_t step);
  void write_checkpoint(int64_t step, const AdamW& optimizer, const LossScaler& scaler,
                        const std::vector<std::string>& bucket_order);
};

}  // namespace mgp

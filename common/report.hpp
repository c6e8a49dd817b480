// What a run prints: banner, progress line, memory table, byte ledger, summary. Numbers come in, text goes out.
#pragma once

#include <cmath>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/device.hpp"
#include "common/ledger.hpp"
#include "common/options.hpp"
#include "common/predict.hpp"
#include "common/run.hpp"

namespace mgp {

/// A step whose numbers are still on the device.
struct PendingStep {
  int64_t step = 0;
  at::Tensor loss, norm;  ///< 0-dim, on the device
  at::Tensor scale;       ///< [2] = loss scale, found_inf; undefined without a loss scale
  double learning_rate = 0;
  Moment began, ended;
  StepTimes times;
  std::vector<LedgerRow> ledger;  ///< since the start, after this step
  int64_t allocated_bytes = 0, resident_bytes = 0;
};

/// The same step in numbers.
struct StepNumbers {
  int64_t step = 0;
  double loss = 0;       ///< mean over the rows of the global batch
  double grad_norm = 0;  ///< before clipping
  double learning_rate = 0;
  double loss_scale = NAN;      ///< NaN: none
  bool skipped = false;         ///< a gradient was inf or NaN: nothing was changed
  double ms = 0;                ///< step time on this rank's device
  double exposed_ms = NAN;      ///< the compute stream waited for communication; NaN: not measured
  double gather_ms = NAN;       ///< the compute stream waited for sharded parameters; NaN: nothing is gathered
  double lead_ms = NAN;         ///< from the begin of the first collective to the end of backward: > 0 means overlap
  int64_t comm_calls = 0;       ///< training collectives of this step
  int64_t comm_bytes = 0;       ///< their payload
  int64_t allocated_bytes = 0;  ///< in tensors on the device when the host had queued the step; 0 on a CPU
  int64_t resident_bytes = 0;   ///< host memory of rank 0's process then
  double tokens_per_second = 0;
  double tflops = 0;  ///< per rank
  double mfu = NAN;   ///< share of the device's peak; NaN: peak not known
};

std::string banner(const Options& options, const Launch& launch, const std::vector<DeviceFacts>& devices,
                   const std::string& wire);
std::string environment_report(const Launch& launch);
std::vector<std::vector<std::string>> to_rows(const std::vector<std::pair<std::string, std::string>>& pairs);

/// Measured memory of this rank as text for gather_text: "allocated reserved host" peak bytes.
std::string memory_row(const Launch& launch, at::Device device);

/// Such a row in numbers, bytes.
struct MemoryRow {
  int64_t rank = 0, peak_allocated = 0, peak_reserved = 0, host_peak = 0;
};
MemoryRow parse_memory_row(const std::string& text);

class Report {
 public:
  void begin(const Options& options, const Launch& launch, at::Device device, const std::vector<DeviceFacts>& devices);

  /// Turns a finished step into numbers and adds it to the statistics.
  StepNumbers read(const PendingStep& pending, double loss, double norm, double loss_scale, bool skipped);

  /// step, loss over the whole global batch, gradient norm, lr, ms, tokens/s, TFLOP/s and MFU where known, ETA; `more` stands
  /// before it.
  std::string progress_line(const std::string& more = "") const;

  int64_t last_step() const { return last_.step; }
  void set_parameter_hash(uint64_t hash, bool ranks_equal, bool sharded = false) {
    parameter_hash_ = hash;
    ranks_equal_ = ranks_equal;
    sharded_ = sharded;
  }

  std::string memory_report(const MemoryPrediction& predicted,
                            const std::vector<std::pair<std::string, int64_t>>& measured_kinds,
                            const std::vector<std::string>& rank_rows) const;
  /// Predicted calls and bytes beside measured ones, first step and later steps; `equal` tells whether they agree.
  std::string ledger_report(const std::vector<CallPrediction>& predicted, const std::vector<LedgerRow>& measured,
                            bool& equal) const;
  /// Without the memory, which the run measures.
  RunNumbers numbers() const;
  /// Step time (median, spread), throughput, exposed communication, hash.
  std::string summary() const;
  /// The last line of --metrics, see notes/records.md. `measured_kinds` of rank 0; `rank_memory`: a memory_row of each rank;
  /// `rank_gpus`: serialize(GpuSummary) of each, empty on CPUs.
  nlohmann::json run_object(const MemoryPrediction& predicted,
                            const std::vector<std::pair<std::string, int64_t>>& measured_kinds,
                            const std::vector<std::string>& rank_memory, const std::vector<std::string>& rank_gpus,
                            const std::vector<LedgerRow>& ledger, const std::vector<std::string>& warnings) const;

 private:
  /// Median of a number over the steps after warm-up (over all steps if there are no others); NaN if never measured.
  template <typename Member>
  double median(Member member) const;
  /// What the loss scale did; empty without one.
  std::string loss_scale_line() const;

  Options options_;
  Launch launch_;
  bool cuda_ = false;
  std::vector<DeviceFacts> devices_;
  double peak_tflops_ = 0;
  std::chrono::steady_clock::time_point started_;
  std::chrono::system_clock::time_point began_;  // for the record
  std::vector<StepNumbers> steps_;
  StepNumbers last_;
  std::vector<LedgerRow> previous_ledger_;
  std::vector<std::vector<LedgerRow>> step_ledgers_;  // training calls of each step
  std::string tail_label_, reduction_;
  int64_t tail_bytes_ = 0;
  uint64_t parameter_hash_ = 0;
  bool ranks_equal_ = true;
  bool sharded_ = false;  // the hash is of the tensors that were gathered on rank 0
};

}  // namespace mgp

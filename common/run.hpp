// Everything of a run that is not the lesson: banner, progress line, ledgers, metrics, planned faults, signals, checkpoints,
// exit codes. A trainer calls one line for each; the training loop itself stands in the trainer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/checkpoint.hpp"
#include "common/communicator.hpp"
#include "common/launch.hpp"
#include "common/loss_scaler.hpp"
#include "common/options.hpp"
#include "common/predict.hpp"
#include "common/shards.hpp"
#include "common/timing.hpp"
#include "common/verify.hpp"

namespace mgp {

/// Calls `trainer` and turns what it throws into one line and an exit code: UsageError 2 (said once, by rank 0), anything
/// else 1, telling the other ranks first so that none waits for ever. Put nothing else into main().
int run_main(int (*trainer)(int, char**), int argc, char** argv);

/// --environment and --predict: prints what was asked for on rank 0 and returns the exit code; nullopt to go on.
std::optional<int> answer_and_stop(const Options& options, const Launch& launch, const MemoryPattern& pattern,
                                   const std::vector<CallPrediction>& calls);

/// When communication and compute of one step began and ended (gradient_reducer.hpp fills it).
struct StepTimes {
  Moment first_call_began;  ///< the first collective of the step, on the communication stream
  Moment backward_ended;    ///< on the compute stream
  Moment wait_began;        ///< the compute stream starts to wait for what is not hidden
  Moment wait_ended;
  std::vector<std::pair<Moment, Moment>> gather_waits;  ///< sharded parameters: from where to where each was waited for
  std::string reduction = "all-reduce";                 ///< what carries the gradients
  std::string last_label;                               ///< what was waited for last: the exposed tail
  int64_t last_bytes = 0;
};

/// What a run measured, for trainers that compare several.
struct RunNumbers {
  double ms = 0;  ///< median step time after warm-up
  double tokens_per_second = 0;
  std::vector<double> losses;  ///< of each step, over the global batch
  int64_t skipped = 0;         ///< steps that the loss scale skipped
  double loss_scale = 0;       ///< of the last step; NaN without one
  int64_t peak_allocated = 0;  ///< bytes; 0 on a CPU
  int64_t peak_reserved = 0;
  double utilization = 0;  ///< percent, mean over NVML's samples; NaN without them
};

class Run {
 public:
  /// Prints the banner (settings, ranks and devices, predictions) on rank 0 and refuses a run that does not fit, with the
  /// batch size that would. `world` may be null for a trainer of one process.
  Run(const Options& options, const Launch& launch, at::Device device, Communicator* world,
      const MemoryPattern& pattern, std::vector<CallPrediction> calls);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// For trainers that shard: whole tensors for --verify, --dump-gradients, hashes and checkpoints come together on rank 0
  /// through `layout`, whose pieces are the optimizer's parameters in order. Call before load(); it must live as long.
  void set_layout(ShardLayout* layout);

  /// Restores model, optimizer, loss scale and position from --load; returns the saved order of DDP's gradients (else
  /// empty).
  std::vector<std::string> load(AdamW& optimizer, LossScaler& scaler);

  int64_t first_step() const;      ///< 1, or the step after the one that was loaded
  bool wants(int64_t step) const;  ///< false after --steps, and on all ranks together after Ctrl-C
  double learning_rate(int64_t step) const;

  /// Measures the device memory that was taken since the last call, for the memory table ("parameters", ...).
  void measure_memory(const std::string& kind);

  // ── the loop's one-liners ──
  /// The phase `name` of the step begins, and the one before it ends: a range for Nsight Systems, a span of --trace, and a
  /// place where --pace can halt. The names are those of TrainerInfo::phases.
  void phase(const char* name);
  void before_step(int64_t step);  ///< planned faults, heartbeat
  /// A unit of sharded training came ("gather") or went ("free"): a place where --pace can halt, and a span of --trace from
  /// the one to the other. On all ranks alike.
  void unit_event(const char* what, const std::string& unit);
  /// --trace: a piece of work on a row of its own, with marks on `device`, which may be another one than the run's.
  void span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended,
            at::Device device);
  /// --inject inf@RANK,STEP: the loss becomes infinite, and with it all gradients; else nothing.
  void inject_inf(int64_t step, at::Tensor& loss) const;
  /// After the exchange and before clipping: keeps the first step's gradients for --verify and --dump-gradients.
  void gradients_ready(int64_t step, const NamedTensors& parameters);
  /// `loss_sum`: this rank's share of the global batch's mean loss, [] on the device; the shares are added over ranks when
  /// the progress line needs them. `norm`: gradient norm before clipping.
  void after_step(int64_t step, const at::Tensor& loss_sum, const at::Tensor& norm, const LossScaler& scaler,
                  const StepTimes* times = nullptr);
  /// Writes the checkpoint if --save-every says so. Rank 0 writes, the others go on. `bucket_order`: DDP's, or empty.
  void save_if_due(int64_t step, const AdamW& optimizer, const LossScaler& scaler,
                   const std::vector<std::string>& bucket_order = {});
  /// Writes the final checkpoint if --save was given and it is not written yet.
  void save_final(const AdamW& optimizer, const LossScaler& scaler, const std::vector<std::string>& bucket_order = {});
  /// Proves that all ranks hold the same parameters (a hash) and keeps them for --verify. Call after the loop.
  void training_ended(const NamedTensors& parameters);
  /// For trainers with a layout: the same proof for what all ranks hold whole (no parameters: does nothing).
  void expect_equal_replicas(const NamedTensors& replicas);
  /// With --debug detail: the same proof after each step.
  void expect_equal_ranks(const NamedTensors& parameters);

  RunNumbers numbers() const;

  /// Prints the report; with --verify calls `prove` on rank 0 while the others sleep; returns the exit code, the same on
  /// all ranks. Call when everything of the training has been freed.
  int finish(const std::function<Verdict(const TrainingRecord&)>& prove);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Prints on rank 0 only.
void say(const Launch& launch, const std::string& text);

}  // namespace mgp

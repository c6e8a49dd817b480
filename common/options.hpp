// The one command line of all trainers: declared once, shown as a table, checked before anything is allocated.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/communicator.hpp"
#include "common/data.hpp"
#include "common/launch.hpp"
#include "common/loss_scaler.hpp"
#include "common/model_config.hpp"
#include "common/optimizer.hpp"
#include "common/precision.hpp"

namespace CLI {
class App;
}

namespace mgp {

/// What a trainer is, for help, banner and file names.
struct TrainerInfo {
  std::string name;     ///< "train_ddp"
  std::string pattern;  ///< "ddp": prefix of its artifacts
  std::string summary;  ///< one line
  /// Ranks that cut the global batch between them; false for a trainer that runs in one process.
  bool many_ranks = true;
  bool compares_precisions = false;  ///< takes --precision all, and does so by default
  /// What run.phase() and run.unit_event() are called with: where --pace can halt, beside init and step.
  std::vector<std::string> phases = {"data", "forward", "backward", "optimizer"};
  std::string no_cuda_graph = "";  ///< why a step of this trainer cannot be captured; empty if it can
  /// All ranks work on the same rows: the model is cut, not the batch (model, pipeline and tensor parallel).
  bool one_batch = false;

  /// What is written without a name, as in the reference.
  std::string full_state_file() const { return pattern + "_tiny_transformer_full_state.pt"; }
  std::string sharded_folder() const { return pattern + "_tiny_transformer_sharded_dcp"; }
};

/// --pace: where all ranks halt together, and for how long.
struct Pace {
  std::vector<std::string> phases;  ///< "init", "step", or of TrainerInfo::phases; empty: no halts
  double seconds = 5.0;
  bool key = false;  ///< until Enter is pressed in rank 0's terminal, instead of `seconds`
};

/// A fault on purpose, for tests: `--inject exit@1,5` ends rank 1 in step 5. Kinds: exit, throw, segv, stall, and inf,
/// which makes that rank's gradients infinite.
struct Injection {
  std::string kind;
  int rank = -1;
  int64_t step = -1;
};

/// Options::lr.lr until settle(), where no --lr was given: the learning rate goes with the preset.
inline constexpr double kPresetLr = -1.0;

struct Options {
  TrainerInfo trainer;
  std::string command;  ///< the command line, for the record

  // model
  std::string preset;  ///< "" until settle(): base on GPUs, tiny on CPUs
  std::string model_kind = "classifier";
  ModelConfig model;  ///< complete after settle()
  // steps and batches
  int64_t steps = 50;
  double min_seconds = 0.0;  ///< go on after `steps` until so many seconds have passed
  int64_t warmup_steps = 5;
  int64_t log_every = 10;
  int64_t batch_size = 0;  ///< rows per data-parallel rank; 0 until settle()
  /// Neighbouring ranks that hold one copy of the model together and work on the same rows. After settle() all of them
  /// where TrainerInfo::one_batch says so; a trainer with a mesh sets it before.
  int64_t model_ranks = 1;
  int64_t global_batch_size = 0;  ///< rows of the whole step; 0 until settle()
  int64_t accumulate = 1;
  std::string data = "fresh";
  uint64_t seed = 1234;
  double dropout = 0.0;
  // device and arithmetic
  std::string device = "auto";
  bool cuda = false;  ///< after settle(): the ranks run on GPUs
  Precision precision = Precision::fp32;
  bool all_precisions = false;        ///< --precision all: `precision` is only the first
  std::string weights;                ///< autocast: fp32 weights, cast where they are used; low: see low_weights()
  std::string loss_scaling = "auto";  ///< after settle(): on or off
  LossScaleOptions scaler;
  bool deterministic = false;
  bool fast = false;  ///< low weights and a CUDA graph where they are possible and not set by flags of their own
  std::string cuda_graph_flag;  ///< as given: "", off or on
  bool cuda_graph = false;      ///< after settle(): a step is captured and replayed (step_graph.hpp)
  // optimizer
  double clip_norm = 1.0;
  AdamWOptions adamw;
  LrSchedule lr;
  // proof, checkpoints, records
  bool verify = false;
  std::optional<std::string> save;          ///< file, or the trainer's artifact name
  std::optional<std::string> save_sharded;  ///< folder, in trainers that shard
  int64_t save_every = 0;
  bool async_save = false;  ///< a thread writes copies in host memory while training goes on
  std::string load;
  bool resume = false;
  std::string dump_batches, dump_gradients, metrics, trace, profile;
  bool log_gpu = false;  ///< NVML's last sample in the progress line
  Pace pace;
  bool predict = false;
  int world = 0;  ///< --world for --predict; after settle() the number of ranks
  /// Ranks, or groups of ranks, that cut the global batch between them.
  int64_t data_ranks() const { return world / model_ranks; }
  DebugLevel debug = DebugLevel::off;
  int64_t comm_timeout = 300;
  std::vector<Injection> inject;
  bool environment = false;

  SyntheticTokens::Mode data_mode() const;
  /// --weights low: the model holds its weights in the precision of the arithmetic, the optimizer fp32 masters.
  bool low_weights() const { return weights == "low"; }
  at::ScalarType weight_dtype() const { return low_weights() ? compute_dtype(precision) : storage_dtype(precision); }
  /// What autocast has to do: nothing when the weights are in the low precision themselves.
  Precision autocast() const { return low_weights() ? Precision::fp32 : precision; }
  CommOptions comm() const { return {std::chrono::seconds(comm_timeout), debug}; }
};

/// Thrown after --help or --help-all was printed: the program is done, exit code 0.
struct HelpShown {};

/// Adds a trainer's own flags beside the shared ones.
using ExtraFlags = std::function<void(CLI::App&)>;

/// Parses the command line into `options` (a trainer's options derive from Options only to add fields). Throws UsageError
/// in one line for unknown flags and values out of range, HelpShown after help. Only rank 0 prints.
void parse_options(int argc, char** argv, const TrainerInfo& trainer, Options& options, const ExtraFlags& extra = {});

/// Decides what depends on the launch and on the devices there (preset, batch sizes, world size) and checks the whole
/// configuration: sizes, batches against ranks, files. Nothing is allocated and CUDA is only asked for the number of
/// devices. Throws UsageError.
void settle(Options& options, const Launch& launch);

/// Rows (name, value) of the settings table; every effective setting, derived ones included.
std::vector<std::pair<std::string, std::string>> settings(const Options& options);

/// Help text as --help or --help-all prints it. The README is tested against it.
std::string help_text(const TrainerInfo& trainer, bool all, const ExtraFlags& extra = {});

}  // namespace mgp

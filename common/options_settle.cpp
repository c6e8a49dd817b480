// What the command line leaves open and the machine decides: preset, batch sizes, ranks; and the settings table.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/atomic_file.hpp"
#include "common/error.hpp"
#include "common/options.hpp"
#include "common/published_folder.hpp"
#include "common/sharded_checkpoint.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

void override_size(int64_t raw, const char* flag, int64_t& size) {
  if (raw < 0) throw UsageError(fmt::format("{} is {}: must be at least 1", flag, raw));
  if (raw > 0) size = raw;
}

/// Decides on the CUDA graph. What a graph cannot do is refused with the reason.
void settle_cuda_graph(Options& o) {
  const bool possible = o.cuda && o.precision != Precision::fp64 && o.trainer.no_cuda_graph.empty();
  o.cuda_graph = o.cuda_graph_flag == "on" || (o.fast && o.cuda_graph_flag.empty() && possible);
  if (!o.cuda_graph) return;
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(fmt::format(
        "{}: {}", o.cuda_graph_flag.empty() ? "--fast, which means --cuda-graph on" : "--cuda-graph on", reason));
  };
  if (!o.trainer.no_cuda_graph.empty()) refuse(o.trainer.no_cuda_graph + "; leave it out");
  if (!o.cuda) refuse("needs a GPU, and this run is on the CPU (--device)");
  if (o.precision == Precision::fp64) {
    refuse("the learning rate of a graph is an fp32 number, which --precision fp64 would be compared with; choose one");
  }
  if (o.debug == DebugLevel::detail) {
    refuse("--debug detail compares each collective on the host, and a replay has no host; add --cuda-graph off");
  }
  if (!o.pace.phases.empty()) refuse("--pace halts between phases, and a replay has none; add --cuda-graph off");
  if (o.model.checkpoint_activations && o.dropout > 0) {
    refuse("--checkpoint-activations with --dropout sets the random state on the host; add --cuda-graph off");
  }
  for (const Injection& fault : o.inject) {
    if (fault.kind == "inf")
      refuse("--inject inf changes the loss of one step, and a replay repeats them all; leave one out");
  }
  const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking != nullptr && std::string(blocking) == "1") {
    refuse("CUDA_LAUNCH_BLOCKING=1 waits after each launch, which a capture forbids; unset it or add --cuda-graph off");
  }
}

}  // namespace

void settle(Options& options, const Launch& launch) {
  if (!options.trainer.many_ranks && launch.world_size > 1) {
    throw UsageError(fmt::format("{} runs in one process, but {} started {} ranks: start it without a launcher",
                                 options.trainer.name, launch.launcher, launch.world_size));
  }
  if (options.world == 0 || !options.predict) options.world = launch.world_size;
  if (options.world > 1 && !options.trainer.many_ranks) {
    throw UsageError(
        fmt::format("{} runs in one process: --world {} has no meaning here", options.trainer.name, options.world));
  }
  // A prediction is about GPUs, wherever it is made; everything else depends on what this machine has.
  options.cuda =
      options.device != "cpu" && (options.predict || options.device != "auto" || torch::cuda::is_available());
  if (options.preset.empty()) options.preset = options.cuda ? "base" : "tiny";
  if (!options.cuda && (options.precision == Precision::tf32 || options.precision == Precision::fp16)) {
    throw UsageError(fmt::format("--precision {} needs a GPU with tensor cores: choose fp32, bf16 or fp64 on a CPU",
                                 to_string(options.precision)));
  }
  if (options.weights.empty()) options.weights = options.fast && uses_autocast(options.precision) ? "low" : "autocast";
  if (options.low_weights() && !uses_autocast(options.precision) && !options.all_precisions) {
    throw UsageError(
        fmt::format("--weights low goes with --precision bf16 or fp16, not {}", to_string(options.precision)));
  }
  if (options.loss_scaling == "auto") options.loss_scaling = options.precision == Precision::fp16 ? "on" : "off";

  const ModelConfig given = options.model;
  options.model = preset_config(options.preset, options.model_kind == "mlp" ? ModelKind::mlp : ModelKind::classifier);
  override_size(given.vocab_size, "--vocab-size", options.model.vocab_size);
  override_size(given.seq_len, "--seq-len", options.model.seq_len);
  override_size(given.dim, "--dim", options.model.dim);
  override_size(given.heads, "--heads", options.model.heads);
  override_size(given.layers, "--layers", options.model.layers);
  override_size(given.mlp_dim, "--mlp-dim", options.model.mlp_dim);
  override_size(given.classes, "--classes", options.model.classes);
  options.model.dropout = options.dropout;
  options.model.checkpoint_activations = given.checkpoint_activations;
  check_config(options.model);

  if (options.lr.lr == kPresetLr) {
    options.lr.lr = options.preset == "base" ? 3e-4 : options.preset == "small" ? 5e-4 : 1e-3;
  }
  settle_cuda_graph(options);
  if (options.trainer.one_batch) options.model_ranks = options.world;
  const int64_t ranks = options.data_ranks();
  if (options.global_batch_size == 0) {
    if (options.batch_size == 0)
      options.batch_size = options.preset == "base" ? 32 : options.preset == "small" ? 16 : 8;
    options.global_batch_size = options.batch_size * ranks;
  }
  options.batch_size = slice_rows(options.global_batch_size, 0, ranks).size();  // the largest rank's rows
  if (options.global_batch_size < ranks * options.accumulate) {
    throw UsageError(
        fmt::format("a global batch of {} rows cut over {} {}{} x --accumulate {} leaves a part empty: at least {} "
                    "rows are needed (--global-batch-size or --batch-size)",
                    options.global_batch_size, ranks, options.model_ranks > 1 ? "data-parallel group" : "rank",
                    ranks == 1 ? "" : "s", options.accumulate, ranks * options.accumulate));
  }

  for (const auto& [flag, path] : {std::pair<const char*, std::string>{"--save", options.save.value_or("")},
                                   {"--metrics", options.metrics},
                                   {"--trace", options.trace},
                                   {"--profile", options.profile},
                                   {"--dump-batches", options.dump_batches},
                                   {"--dump-gradients", options.dump_gradients}}) {
    if (!path.empty() && launch.rank == 0) check_writable(path, flag);
  }
  if (options.async_save && !options.save && !options.save_sharded) {
    throw UsageError("--async-save has nothing to save: add --save [FILE.pt]");
  }
  if (options.save_sharded && launch.rank == 0) check_publishable(*options.save_sharded, "--save-sharded");
  if (options.resume) {
    // The folder first: a run that writes both writes it last.
    if (options.save_sharded && is_sharded_checkpoint(*options.save_sharded)) {
      options.load = *options.save_sharded;
    } else if (options.save && ::access(options.save->c_str(), F_OK) == 0) {
      options.load = *options.save;
    }
  }
  if (!options.load.empty() && !is_sharded_checkpoint(options.load) && ::access(options.load.c_str(), R_OK) != 0) {
    throw UsageError(fmt::format("--load {}: {}", options.load, std::strerror(errno)));
  }
}

std::vector<std::pair<std::string, std::string>> settings(const Options& o) {
  const ModelConfig& m = o.model;
  const int64_t tokens = o.global_batch_size * m.seq_len;
  std::vector<std::pair<std::string, std::string>> rows = {
      {"command", o.command},
      {"model", fmt::format("{} {}: {} parameters", o.preset, o.model_kind, with_commas(parameter_count(m)))},
      {"sizes", fmt::format("V {}  T {}  C {}  H {}  layers {}  F {}  classes {}", m.vocab_size, m.seq_len, m.dim,
                            m.heads, m.layers, m.mlp_dim, m.classes)},
      {"ranks", fmt::format("{} on {}", o.world, o.cuda ? "GPUs" : "CPUs")},
      {"batch",
       fmt::format("{} rows a step = {} {}{} x {}{}, {} tokens", o.global_batch_size, o.data_ranks(),
                   o.model_ranks > 1 ? "data-parallel group" : "rank", o.data_ranks() == 1 ? "" : "s", o.batch_size,
                   o.global_batch_size % o.data_ranks() != 0 ? " or one less" : "", with_commas(tokens))},
      {"accumulate", fmt::format("{} backward pass{} a step", o.accumulate, o.accumulate == 1 ? "" : "es")},
      {"precision", to_string(o.precision) + (o.low_weights()              ? " weights, fp32 masters in the optimizer"
                                              : uses_autocast(o.precision) ? " autocast, fp32 weights"
                                                                           : "")},
      {"loss scale", o.loss_scaling == "on" ? fmt::format("dynamic, from {}, doubled after {} good steps",
                                                          o.scaler.initial_scale, o.scaler.growth_interval)
                                            : "none"},
      {"data", fmt::format("{}, seed {}", o.data, o.seed)},
      {"optimizer", fmt::format("fused AdamW, lr {} ({}, warm-up {}), weight decay {}, clip norm {}", o.lr.lr,
                                o.lr.kind == LrSchedule::Kind::cosine ? "cosine" : "constant", o.lr.warmup,
                                o.adamw.weight_decay, o.clip_norm)},
      {"dropout", fmt::format("{}", o.dropout)},
      {"activations", o.model.checkpoint_activations ? "only block inputs kept, the rest computed again" : "kept"},
      {"CUDA graph", o.cuda_graph ? "steps 1 to 3 eager, the 4th captured, then replayed" : "off"},
      {"deterministic", o.deterministic ? "yes" : "no"},
      {"steps", fmt::format("to {}{}, {} left out of the timings, a line every {}", o.steps,
                            o.min_seconds > 0 ? fmt::format(" and on until {} s have passed", o.min_seconds) : "",
                            o.warmup_steps, o.log_every)},
  };
  if (!o.adamw.frozen.empty()) rows.emplace_back("frozen", fmt::format("{}", fmt::join(o.adamw.frozen, ", ")));
  if (!o.load.empty()) rows.emplace_back("load", o.load);
  const std::string how_often = (o.save_every > 0 ? fmt::format(" every {} steps", o.save_every) : "") +
                                (o.async_save ? ", written while training goes on" : "");
  if (o.save) rows.emplace_back("save", *o.save + how_often);
  if (o.save_sharded) rows.emplace_back("save sharded", *o.save_sharded + how_often);
  if (!o.metrics.empty()) rows.emplace_back("metrics", o.metrics);
  if (!o.trace.empty()) rows.emplace_back("trace", o.trace);
  if (!o.profile.empty()) rows.emplace_back("profile", o.profile);
  if (!o.pace.phases.empty()) {
    rows.emplace_back("pace", fmt::format("halts after {}, {}", fmt::join(o.pace.phases, ", "),
                                          o.pace.key ? "until Enter is pressed" : fmt::format("{} s", o.pace.seconds)));
  }
  rows.emplace_back("communication", fmt::format("deadline {} s, debug {}", o.comm_timeout,
                                                 o.debug == DebugLevel::off    ? "off"
                                                 : o.debug == DebugLevel::info ? "info"
                                                                               : "detail"));
  if (!o.inject.empty()) rows.emplace_back("inject", fmt::format("{} planned faults", o.inject.size()));
  return rows;
}

}  // namespace mgp

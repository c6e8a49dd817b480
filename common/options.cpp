#include "common/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <sstream>

#include "common/error.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

/// Texts that need a second look after parsing; the rest goes straight into Options.
struct RawOptions {
  std::string precision, debug, lr_schedule = "constant", save, pace;
  std::vector<std::string> inject;
  int64_t vocab_size = 0, seq_len = 0, dim = 0, heads = 0, layers = 0, mlp_dim = 0, classes = 0;
  bool help = false, help_all = false;
};

const char* kShort = "Options";
/// Declares every shared flag. Flags of the group "More options" show only in --help-all.
void declare(CLI::App& app, Options& o, RawOptions& raw, bool all) {
  const std::string more = all ? "More options" : "";  // CLI11 hides options of the group ""
  app.set_help_flag();
  app.add_flag("-h,--help", raw.help, "the options most needed")->group(kShort);
  app.add_flag("--help-all", raw.help_all, "all options")->group(kShort);

  app.add_option("--preset", o.preset, "model size: tiny, small or base (base on GPUs, tiny on CPUs)")->group(kShort);
  app.add_option("--model", o.model_kind, "classifier (Transformer encoder) or mlp")->group(kShort);
  app.add_option("--steps", o.steps, "the run ends after this optimizer step (50)")->group(kShort);
  app.add_option("--batch-size", o.batch_size, "rows per data-parallel rank (base 32, small 16, tiny 8)")
      ->group(kShort);
  app.add_option("--accumulate", o.accumulate, "cut a rank's rows into K backward passes, one gradient exchange (1)")
      ->group(kShort);
  app.add_option("--device", o.device, "auto, cpu, cuda or a GPU's index")->group(kShort);
  app.add_option("--precision", raw.precision,
                 o.trainer.compares_precisions
                     ? "fp32, tf32, bf16, fp16, fp64, or all: one after the other, compared (all)"
                     : "fp32, tf32, bf16 or fp16 (autocast), or fp64 (fp32)")
      ->group(kShort);
  app.add_option("--data", o.data, "fresh, or repeat: one batch again and again, the loss must fall")->group(kShort);
  app.add_flag("--verify", o.verify, "prove equality with one device; exit code 3 on a difference")->group(kShort);
  app.add_option("--save", raw.save, "write a full-state checkpoint at the end [FILE.pt]")
      ->expected(0, 1)
      ->group(kShort);
  app.add_option("--load", o.load, "continue from a checkpoint")->group(kShort);
  app.add_flag("--predict", o.predict, "print memory and bytes per step without a device, and stop")->group(kShort);

  app.add_option("--vocab-size", raw.vocab_size, "V, instead of the preset's")->group(more);
  app.add_option("--seq-len", raw.seq_len, "T, instead of the preset's")->group(more);
  app.add_option("--dim", raw.dim, "C, instead of the preset's")->group(more);
  app.add_option("--heads", raw.heads, "H, instead of the preset's")->group(more);
  app.add_option("--layers", raw.layers, "layers, instead of the preset's")->group(more);
  app.add_option("--mlp-dim", raw.mlp_dim, "F, instead of the preset's")->group(more);
  app.add_option("--classes", raw.classes, "classes, instead of the preset's")->group(more);
  app.add_option("--min-seconds", o.min_seconds, "go on after --steps until S seconds have passed (0), to be watched")
      ->group(more);
  app.add_option("--warmup-steps", o.warmup_steps, "steps left out of the timings (5)")->group(more);
  app.add_option("--log-every", o.log_every, "print a progress line every N steps (10); only then the host waits")
      ->group(more);
  app.add_option("--weights", o.weights,
                 "with bf16 and fp16: autocast (fp32 weights) or low (fp32 masters in the optimizer)")
      ->group(more);
  app.add_option("--loss-scaling", o.loss_scaling, "dynamic loss scale: auto (on with fp16), on or off")->group(more);
  app.add_option("--init-scale", o.scaler.initial_scale, "loss scale of the first step (65536)")->group(more);
  app.add_option("--scale-growth-interval", o.scaler.growth_interval, "good steps after which it doubles (2000)")
      ->group(more);
  app.add_option("--cuda-graph", o.cuda_graph_flag,
                 "off, or on: capture a whole step and replay it, the host launches nothing (off)")
      ->group(more);
  app.add_flag("--fast", o.fast, "--weights low and --cuda-graph on, where precision and device allow them")
      ->group(more);
  app.add_flag("--checkpoint-activations", o.model.checkpoint_activations,
               "keep only the input of each block, and run it again in backward: less memory, more time")
      ->group(more);
  app.add_option("--global-batch-size", o.global_batch_size, "rows of the whole step, cut over the ranks")->group(more);
  app.add_flag("--deterministic", o.deterministic, "the same bits in each run: algorithms and attention pinned")
      ->group(more);
  app.add_option("--seed", o.seed, "seed of data and initial values (1234)")->group(more);
  app.add_option("--lr", o.lr.lr, "AdamW's learning rate (tiny 0.001, small 0.0005, base 0.0003)")->group(more);
  app.add_option("--lr-schedule", raw.lr_schedule, "constant or cosine")->group(more);
  app.add_option("--lr-warmup-steps", o.lr.warmup, "linear warm-up of the learning rate (0)")->group(more);
  app.add_option("--weight-decay", o.adamw.weight_decay, "on matrices, not on biases, norms and positions (0.01)")
      ->group(more);
  app.add_option("--clip-norm", o.clip_norm, "limit of the global gradient norm, 0 for none (1)")->group(more);
  app.add_option("--dropout", o.dropout, "dropout probability (0)")->group(more);
  app.add_flag("--async-save", o.async_save, "copy to host memory, and let a thread write it while training goes on")
      ->group(more);
  app.add_option("--save-every", o.save_every, "also save every N steps (0: only at the end)")->group(more);
  app.add_flag("--resume", o.resume, "load the --save file if it is there")->group(more);
  app.add_option("--dump-batches", o.dump_batches, "write the global batches that were trained on [FILE.safetensors]")
      ->group(more);
  app.add_option("--dump-gradients", o.dump_gradients,
                 "write the first step's gradients before clipping [FILE.safetensors]")
      ->group(more);
  app.add_option("--metrics", o.metrics, "write one JSON object per step and one for the run [FILE.jsonl]")
      ->group(more);
  app.add_option("--trace", o.trace, "write what all ranks did when, for Chrome or ui.perfetto.dev [FILE.json]")
      ->group(more);
  app.add_option("--profile", o.profile, "write LibTorch's own profile of three steps after the warm-up [FILE.json]")
      ->group(more);
  app.add_option("--pace", raw.pace,
                 fmt::format("halt all ranks after phases, to be watched: PHASES[=SECONDS|=key], for example "
                             "forward,step=5; phases: init, {}, step",
                             fmt::join(o.trainer.phases, ", ")))
      ->group(more);
  app.add_flag("--log-gpu", o.log_gpu, "utilization, power and clock of rank 0's GPU in the progress line")
      ->group(more);
  app.add_option("--world", o.world, "ranks to predict for, with --predict")->group(more);
  app.add_option("--debug", raw.debug, "off, info (log each collective) or detail (prove that all ranks agree first)")
      ->group(more);
  app.add_option("--comm-timeout", o.comm_timeout, "seconds that a collective may take (300)")->group(more);
  app.add_option("--inject", raw.inject, "planned fault KIND@RANK,STEP; KIND: exit, throw, segv, stall, inf")
      ->group(more)
      ->allow_extra_args(false);
  app.add_flag("--environment", o.environment, "print versions, devices and launcher, and stop")->group(more);
}

[[noreturn]] void refuse(const std::string& line) { throw UsageError(line); }

template <typename T>
void at_least(const char* flag, T value, T limit) {
  if (!(value >= limit)) refuse(fmt::format("{} is {}: must be at least {}", flag, value, limit));
}

void one_of(const char* flag, const std::string& value, const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
    refuse(fmt::format("{} is '{}': choose {}", flag, value, fmt::join(allowed, ", ")));
  }
}

Injection parse_injection(const std::string& text) {
  Injection injection;
  char kind[16] = {};
  int rank = 0;
  long long step = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%15[a-z]@%d,%lld%n", kind, &rank, &step, &used) != 3 ||
      static_cast<size_t>(used) != text.size()) {
    refuse(fmt::format("--inject is '{}': write KIND@RANK,STEP, for example exit@1,5", text));
  }
  one_of("--inject", kind, {"exit", "throw", "segv", "stall", "inf"});
  injection.kind = kind;
  injection.rank = rank;
  injection.step = step;
  return injection;
}

/// "forward,step=5", "init=key".
Pace parse_pace(const std::string& text, const TrainerInfo& trainer) {
  Pace pace;
  const size_t equals = text.find('=');
  const std::string how = equals == std::string::npos ? "" : text.substr(equals + 1);
  std::istringstream names(text.substr(0, equals));
  std::vector<std::string> known = trainer.phases;
  known.insert(known.begin(), "init");
  known.push_back("step");
  for (std::string name; std::getline(names, name, ',');) {
    one_of("a phase of --pace", name, known);
    pace.phases.push_back(name);
  }
  if (pace.phases.empty()) refuse(fmt::format("--pace is '{}': write PHASES[=SECONDS|=key]", text));
  if (equals == std::string::npos) return pace;
  if (how == "key") {
    pace.key = true;
    return pace;
  }
  size_t used = 0;
  try {
    pace.seconds = std::stod(how, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != how.size() || !(pace.seconds >= 0.0 && pace.seconds <= 86400.0)) {
    refuse(fmt::format("--pace is '{}': after '=' stands 'key' or the seconds of a halt, 0 to 86400", text));
  }
  return pace;
}

DebugLevel parse_debug(std::string text) {
  // The flag wins over our variable, ours over PyTorch's, whose values OFF, INFO and DETAIL mean the same.
  const char* source = "--debug";
  for (const char* name : {"MGP_DISTRIBUTED_DEBUG", "TORCH_DISTRIBUTED_DEBUG"}) {
    const char* value = std::getenv(name);
    if (text.empty() && value != nullptr && *value != '\0') {
      text = value;
      source = name;
    }
  }
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text.empty()) return DebugLevel::off;
  one_of(source, text, {"off", "info", "detail"});
  return text == "off" ? DebugLevel::off : text == "info" ? DebugLevel::info : DebugLevel::detail;
}

/// CLI11's message as one line that says what to do.
std::string explain(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& arguments) {
  std::string line = error.what();
  std::replace(line.begin(), line.end(), '\n', ' ');
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr) return line;
  for (const std::string& argument : arguments) {
    const std::string flag = argument.substr(0, argument.find('='));
    if (flag.rfind("--", 0) != 0 || app.get_option_no_throw(flag) != nullptr) continue;
    std::string nearest;
    size_t best = 4;  // further away than three edits is no suggestion
    for (const CLI::Option* option : app.get_options()) {
      const std::string candidate = "--" + (option->get_lnames().empty() ? "" : option->get_lnames().front());
      const size_t distance = edit_distance(flag, candidate);
      if (distance < best) {
        best = distance;
        nearest = candidate;
      }
    }
    return nearest.empty() ? fmt::format("unknown option {}; --help-all lists all", flag)
                           : fmt::format("unknown option {}; did you mean {}?", flag, nearest);
  }
  return line + "; --help-all lists all options";
}

/// The sizes that the user gave; applied on top of the preset in settle(), so kept in Options::model until then.
void keep_overrides(const RawOptions& raw, const CLI::App& app, ModelConfig& model) {
  const std::pair<const char*, int64_t> given[] = {
      {"--vocab-size", raw.vocab_size}, {"--seq-len", raw.seq_len}, {"--dim", raw.dim},        {"--heads", raw.heads},
      {"--layers", raw.layers},         {"--mlp-dim", raw.mlp_dim}, {"--classes", raw.classes}};
  for (const auto& [flag, value] : given) {
    if (app.get_option(flag)->count() > 0 && value < 1)
      refuse(fmt::format("{} is {}: must be at least 1", flag, value));
  }
  model.vocab_size = raw.vocab_size;
  model.seq_len = raw.seq_len;
  model.dim = raw.dim;
  model.heads = raw.heads;
  model.layers = raw.layers;
  model.mlp_dim = raw.mlp_dim;
  model.classes = raw.classes;
}

void check_values(const Options& o) {
  if (!o.preset.empty()) one_of("--preset", o.preset, {"tiny", "small", "base"});
  one_of("--model", o.model_kind, {"classifier", "mlp"});
  one_of("--data", o.data, {"fresh", "repeat"});
  if (!o.weights.empty()) one_of("--weights", o.weights, {"autocast", "low"});
  if (!o.cuda_graph_flag.empty()) one_of("--cuda-graph", o.cuda_graph_flag, {"off", "on"});
  one_of("--loss-scaling", o.loss_scaling, {"auto", "on", "off"});
  at_least<int64_t>("--scale-growth-interval", o.scaler.growth_interval, 1);
  if (!(o.scaler.initial_scale > 0.0 && o.scaler.initial_scale <= 0x1p100)) {
    refuse(fmt::format("--init-scale is {}: must be above 0 and at most 2^100", o.scaler.initial_scale));
  }
  at_least<int64_t>("--steps", o.steps, 0);
  at_least<int64_t>("--warmup-steps", o.warmup_steps, 0);
  at_least("--min-seconds", o.min_seconds, 0.0);
  if (o.min_seconds > 0 && o.steps == 0)
    refuse(fmt::format("--min-seconds {} needs --steps of at least 1", o.min_seconds));
  at_least<int64_t>("--log-every", o.log_every, 1);
  at_least<int64_t>("--accumulate", o.accumulate, 1);
  at_least<int64_t>("--save-every", o.save_every, 0);
  at_least<int64_t>("--comm-timeout", o.comm_timeout, 1);
  at_least<int64_t>("--lr-warmup-steps", o.lr.warmup, 0);
  at_least("--weight-decay", o.adamw.weight_decay, 0.0);
  at_least("--clip-norm", o.clip_norm, 0.0);
  if (!(o.dropout >= 0.0 && o.dropout < 1.0)) refuse(fmt::format("--dropout is {}: must be in [0, 1)", o.dropout));
  for (const double value : {o.lr.lr, o.adamw.weight_decay, o.clip_norm, o.min_seconds}) {
    if (!std::isfinite(value)) refuse("--lr, --weight-decay, --clip-norm and --min-seconds must be finite numbers");
  }
  if (o.verify && o.dropout > 0)
    refuse(fmt::format("--verify needs --dropout 0, not {}: masks differ by rank", o.dropout));
  if (o.verify && o.steps == 0) refuse("--verify needs --steps of at least 1, not 0");
  if (o.save_every > 0 && !o.save && !o.save_sharded) {
    refuse(fmt::format("--save-every {} needs --save [FILE.pt]", o.save_every));
  }
  if (o.resume && !o.save && !o.save_sharded) {
    refuse("--resume needs --save [FILE.pt], the file to resume from and to write");
  }
  if (o.resume && !o.load.empty()) refuse("--resume and --load both name a checkpoint: give one of them");
  if (o.world != 0 && !o.predict)
    refuse(fmt::format("--world {} goes with --predict; a launcher sets the ranks", o.world));
  if (o.world < 0) refuse(fmt::format("--world is {}: must be at least 1", o.world));
}

}  // namespace

SyntheticTokens::Mode Options::data_mode() const {
  return data == "repeat" ? SyntheticTokens::Mode::repeat : SyntheticTokens::Mode::fresh;
}

std::string help_text(const TrainerInfo& trainer, bool all, const ExtraFlags& extra) {
  Options options;
  options.trainer = trainer;
  RawOptions raw;
  CLI::App app(trainer.summary, trainer.name);
  declare(app, options, raw, all);
  if (extra) extra(app);
  return app.help();
}

void parse_options(int argc, char** argv, const TrainerInfo& trainer, Options& options, const ExtraFlags& extra) {
  options.trainer = trainer;
  options.lr.lr = kPresetLr;  // unless --lr is given
  RawOptions raw;
  CLI::App app(trainer.summary, trainer.name);
  declare(app, options, raw, /*all=*/true);
  if (extra) extra(app);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  options.command = fmt::format("{} {}", trainer.name, fmt::join(arguments, " "));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    refuse(explain(error, app, arguments));
  }
  if (raw.help || raw.help_all) {
    if (detect_launch().rank == 0) fmt::print("{}", help_text(trainer, raw.help_all, extra));
    throw HelpShown{};
  }
  for (const auto& flag : {"--batch-size", "--global-batch-size"}) {
    const int64_t value = std::string(flag) == "--batch-size" ? options.batch_size : options.global_batch_size;
    if (app.get_option(flag)->count() > 0) at_least<int64_t>(flag, value, 1);
  }
  if (app.get_option("--world")->count() > 0) at_least("--world", options.world, 1);
  if (app.get_option("--lr")->count() > 0) at_least("--lr", options.lr.lr, 0.0);
  if (options.batch_size > 0 && options.global_batch_size > 0) {
    refuse(fmt::format("--batch-size {} and --global-batch-size {} both set the batch: give one of them",
                       options.batch_size, options.global_batch_size));
  }
  if (raw.precision.empty()) raw.precision = trainer.compares_precisions ? "all" : "fp32";
  options.all_precisions = trainer.compares_precisions && raw.precision == "all";
  options.precision = options.all_precisions ? Precision::fp32 : parse_precision(raw.precision);
  options.debug = parse_debug(raw.debug);
  one_of("--lr-schedule", raw.lr_schedule, {"constant", "cosine"});
  options.lr.kind = raw.lr_schedule == "cosine" ? LrSchedule::Kind::cosine : LrSchedule::Kind::constant;
  options.lr.total = options.steps;
  for (const std::string& text : raw.inject) options.inject.push_back(parse_injection(text));
  if (app.get_option("--save")->count() > 0) {
    options.save = raw.save.empty() ? trainer.full_state_file() : raw.save;
  }
  if (app.get_option("--pace")->count() > 0) options.pace = parse_pace(raw.pace, trainer);
  keep_overrides(raw, app, options.model);
  check_values(options);
}

}  // namespace mgp

// The run's banner, position and loop; run_save.cpp holds its checkpoints, run_finish.cpp its end.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include "common/counter_random.hpp"
#include "common/device.hpp"
#include "common/device_memory.hpp"
#include "common/error.hpp"
#include "common/nvtx.hpp"
#include "common/run_state.hpp"
#include "common/safetensors.hpp"
#include "common/sharded_checkpoint.hpp"
#include "common/text.hpp"
#include "common/watchdog.hpp"

namespace mgp {
namespace {

// Ctrl-C asks the loop to end after the step (all ranks together); a second one ends the process at once.
std::atomic<int> stop_signals{0};

void on_stop_signal(int signal_number) {
  if (stop_signals.fetch_add(1) > 0) _exit(128 + signal_number);
}

}  // namespace

// ── banner ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Run::Run(const Options& options, const Launch& launch, at::Device device, Communicator* world,
         const MemoryPattern& pattern, std::vector<CallPrediction> calls)
    : state_(std::make_unique<State>(options, launch, device, world)) {
  State& s = *state_;
  s.memory = predict_memory(options, pattern);
  s.calls = std::move(calls);
  const int threads = at::get_num_threads();
  s.devices = world != nullptr ? world->devices() : std::vector<DeviceFacts>{describe_device(launch, device, threads)};
  say(launch, banner(options, launch, s.devices, world != nullptr ? world->wire() : "none"));
  say(launch, memory_table(s.memory) + choices_text(options, pattern) + call_table(s.calls, options.world));
  s.refuse_if_too_large(pattern);
  if (launch.share_gpu && launch.local_size > 1) {  // the banner has said it
    s.warnings.push_back(fmt::format("{} ranks share one GPU: times mean nothing", launch.local_size));
  }

  at::manual_seed(options.seed);  // LibTorch seeds its generators at random
  for (const int signal_number : {SIGINT, SIGTERM}) std::signal(signal_number, on_stop_signal);
  if (!options.metrics.empty() && launch.rank == 0) {
    s.metrics = std::make_unique<MetricsFile>(options.metrics, /*append=*/!options.load.empty());
  }
  s.memory_mark = device_memory(device).allocated;
  const DeviceFacts& mine = s.devices[world != nullptr ? static_cast<size_t>(launch.rank) : 0];
  s.gpu = std::make_unique<NvmlSampler>(mine.uuid, mine.pci);
  s.begin_watching();
  s.report.begin(options, launch, device, s.devices);
  s.started = std::chrono::steady_clock::now();  // --min-seconds is about training, not about meeting the others
}

Run::~Run() {
  if (state_->trace && state_->world != nullptr) state_->world->observe(nullptr);
}

void Run::State::refuse_if_too_large(const MemoryPattern& pattern) const {
  // Judged over the facts of all ranks, so that all ranks come to the same answer.
  for (const DeviceFacts& facts : devices) {
    // Ranks that share a GPU (or a host's memory) share what is free of it.
    const int64_t sharers = launch.share_gpu || !device.is_cuda() ? launch.local_size : 1;
    const int64_t available = facts.free_bytes / sharers;
    if (facts.free_bytes <= 0 || memory.peak() <= available) continue;
    const int64_t rows = largest_batch(options, pattern, available);
    throw UsageError(fmt::format("{} rows per rank need about {} but rank {} ({} on {}) has {} of free memory: {}",
                                 options.batch_size, human_bytes(static_cast<double>(memory.peak())), facts.rank,
                                 facts.device, facts.host, human_bytes(static_cast<double>(available)),
                                 rows > 0 ? fmt::format("--batch-size {} would fit", rows)
                                          : "not even one row fits; choose a smaller --preset"));
  }
}

// ── position ──────────────────────────────────────────────────────────────────────────────────────────────────────────

std::vector<std::string> Run::load(AdamW& optimizer, LossScaler& scaler) {
  State& s = *state_;
  if (!s.options.load.empty()) {
    const FullState file = load_checkpoint(s.options.load);
    check_full_state(file, s.options.model, storage_dtype(s.options.precision), s.options.load);
    if (file.training.step > s.options.steps) {
      throw UsageError(fmt::format("--load {}: it was saved at step {}, after --steps {}", s.options.load,
                                   file.training.step, s.options.steps));
    }
    restore(file, optimizer, s.layout);
    if (file.training.loss_scale) scaler.restore(*file.training.loss_scale, file.training.good_steps);
    restore_rng(file.training, s.device);
    s.loaded = file.training;
    if (file.training.step > 0 && s.options.data == "fresh" &&
        (file.training.seed != s.options.seed || file.training.global_batch_size != s.options.global_batch_size)) {
      const std::string note = fmt::format(
          "{} was trained with seed {} and {} rows a step, this run goes on with seed {} and {} "
          "rows: its data is another stream",
          s.options.load, file.training.seed, file.training.global_batch_size, s.options.seed,
          s.options.global_batch_size);
      say(s.launch, "note: " + note + "\n");
      s.warnings.push_back(note);
    }
    say(s.launch, fmt::format("loaded {} at step {}\n", s.options.load, file.training.step));
  }
  if (s.records()) s.record.initial_parameters = s.whole(optimizer.masters());
  s.step_began = Moment::record(s.device);
  return s.loaded.bucket_order;
}

void Run::set_layout(ShardLayout* layout) { state_->layout = layout; }

int64_t Run::first_step() const { return state_->loaded.step + 1; }

bool Run::wants(int64_t step) const { return (step <= state_->options.steps || state_->go_on) && !state_->stop; }

double Run::learning_rate(int64_t step) const { return state_->options.lr.at(step); }

void Run::measure_memory(const std::string& kind) {
  State& s = *state_;
  const int64_t now = device_memory(s.device).allocated;
  s.measured_memory.emplace_back(kind, now - s.memory_mark);
  s.memory_mark = now;
}

// ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

void Run::State::warn(const std::string& line) {
  std::fprintf(stderr, "warning: %s\n", line.c_str());
  warnings.push_back(line);
}

void Run::State::inject(int64_t step) const {
  for (const Injection& fault : options.inject) {
    if (fault.rank != launch.rank || fault.step != step) continue;
    std::fprintf(stderr, "[rank %d] injected fault: %s in step %lld\n", launch.rank, fault.kind.c_str(),
                 static_cast<long long>(step));
    if (fault.kind == "exit") _exit(kExitFailed);
    if (fault.kind == "segv") std::raise(SIGSEGV);
    if (fault.kind == "throw") throw RunError(fmt::format("injected failure in step {}", step));
    if (fault.kind == "stall") std::this_thread::sleep_for(std::chrono::hours(24));
  }
}

bool Run::State::stop_asked() const { return stop_signals.load() > 0; }

void Run::before_step(int64_t step) {
  State& s = *state_;
  s.end_phase();  // init, or what came between two steps
  s.current_step = step;
  if (step == first_step()) s.gpu->start();  // its means are about training, not about getting ready
  if (!s.options.profile.empty() && step == first_step() + s.options.warmup_steps) s.start_profile();
  nvtx_push(fmt::format("step {}", step).c_str());
  if (s.world != nullptr) s.world->watchdog().set_step(step);
  s.inject(step);
  // Dropout masks are a function of (seed, step, rank): a resumed run draws the same ones.
  if (s.options.dropout > 0)
    at::manual_seed(counter_hash(s.options.seed, static_cast<uint64_t>(step)) + static_cast<uint64_t>(s.launch.rank));
  if (!s.options.dump_batches.empty() && s.launch.rank == 0) {
    const SyntheticTokens data(s.options.model, s.options.seed, s.options.global_batch_size, s.options.data_mode(),
                               at::kCPU);
    const Batch batch = data.rows(step, {0, s.options.global_batch_size});
    s.batches.emplace_back(fmt::format("step_{}.tokens", step), batch.tokens);
    s.batches.emplace_back(fmt::format("step_{}.labels", step), batch.labels);
  }
}

void Run::inject_inf(int64_t step, at::Tensor& loss) const {
  for (const Injection& fault : state_->options.inject) {
    if (fault.kind == "inf" && fault.rank == state_->launch.rank && fault.step == step) loss = loss * INFINITY;
  }
}

void Run::gradients_ready(int64_t step, const NamedTensors& parameters) {
  State& s = *state_;
  if (step != first_step() || (!s.records() && s.options.dump_gradients.empty())) return;
  NamedTensors gradients;
  for (const auto& [name, parameter] : parameters) {
    gradients.emplace_back(name, parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter));
  }
  gradients = s.whole(gradients);
  if (!s.options.dump_gradients.empty() && s.launch.rank == 0) {
    write_safetensors(s.options.dump_gradients, gradients, {{"step", std::to_string(step)}});
  }
  if (s.records()) s.record.first_gradients = std::move(gradients);
}

void Run::after_step(int64_t step, const at::Tensor& loss_sum, const at::Tensor& norm, const LossScaler& scaler,
                     const StepTimes* times) {
  State& s = *state_;
  s.end_phase();
  nvtx_pop();
  PendingStep pending;
  pending.step = step;
  pending.loss = loss_sum.detach();
  pending.norm = norm.detach();
  pending.scale = scaler.numbers();
  if (s.options.cuda_graph) {  // the next replay writes into the same tensors
    for (at::Tensor* number : {&pending.loss, &pending.norm, &pending.scale}) {
      if (number->defined()) *number = number->clone();
    }
  }
  pending.learning_rate = learning_rate(step);
  pending.began = s.step_began;
  pending.ended = Moment::record(s.device);
  if (times != nullptr) pending.times = *times;
  if (s.metrics) {  // rank 0, and only where somebody reads them
    pending.allocated_bytes = device_memory(s.device).allocated;
    pending.resident_bytes = resident_bytes();
  }
  if (s.trace) s.trace->span("step", fmt::format("step {}", step), pending.began, pending.ended);
  if (s.world != nullptr) pending.ledger = s.world->ledger().rows();
  s.step_began = pending.ended;
  s.pending.push_back(std::move(pending));

  const bool last = step == s.options.steps;
  if (step == first_step() || step % s.options.log_every == 0 || last) s.flush(step);
  if (s.profiling && step >= first_step() + s.options.warmup_steps + kProfiledSteps - 1) s.write_profile();
  if (s.halts_after("step")) {
    s.halt("step");
    s.step_began = Moment::record(s.device);
  }
}

/// Reads the numbers of the steps since the last line: the only place in the loop where the host waits for the device.
void Run::State::flush(int64_t step) {
  // One tensor for all steps of the interval and three flags: one all-reduce, one copy to the host.
  std::vector<at::Tensor> numbers;
  for (const PendingStep& p : pending) numbers.push_back(p.loss.to(at::kDouble).reshape({1}));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  const bool time_left = launch.rank == 0 && elapsed.count() < options.min_seconds;  // rank 0's clock decides for all
  for (const bool flag : {stop_asked(), time_left, saving && saving->busy()}) {
    numbers.push_back(at::full({1}, flag ? 1.0 : 0.0, at::TensorOptions().dtype(at::kDouble).device(device)));
  }
  at::Tensor losses = at::cat(numbers);  // [steps + 3]
  if (world != nullptr) world->all_reduce(losses, ReduceOp::sum, {"loss", Purpose::bookkeeping}).wait();
  std::vector<at::Tensor> norms;
  for (const PendingStep& p : pending) norms.push_back(p.norm.to(at::kDouble).reshape({1}));
  losses = losses.cpu();
  const at::Tensor norms_cpu = at::cat(norms).cpu();
  std::vector<at::Tensor> scales;  // [2] each: scale, found_inf
  for (const PendingStep& p : pending) scales.push_back(p.scale);
  const at::Tensor scales_cpu = scales.front().defined() ? at::stack(scales).cpu() : at::Tensor();  // [steps, 2]

  const int64_t count = static_cast<int64_t>(pending.size());
  for (int64_t i = 0; i < count; ++i) {
    PendingStep& p = pending[static_cast<size_t>(i)];
    // Marks inside a CUDA graph are recorded anew by each replay: they tell of the last step alone.
    if (i + 1 < count && p.times.wait_ended.captured()) p.times = StepTimes{};
    const double scale = scales_cpu.defined() ? scales_cpu[i][0].item<double>() : NAN;
    const bool skipped = scales_cpu.defined() && scales_cpu[i][1].item<double>() != 0.0;
    StepNumbers n = report.read(p, losses[i].item<double>(), norms_cpu[i].item<double>(), scale, skipped);
    if (records()) {
      record.losses.push_back(n.loss);
      record.norms.push_back(n.grad_norm);
      record.skipped.push_back(skipped);
      if (scales_cpu.defined())
        record.lowest_scale = record.losses.size() == 1 ? scale : std::min(record.lowest_scale, scale);
    }
    if (metrics) metrics->step(n);
  }
  pending.clear();
  const std::optional<GpuSample> sample = options.log_gpu ? gpu->latest() : std::nullopt;
  say(launch, report.progress_line(options.log_gpu ? "  " + (sample ? to_text(*sample) : "GPU -") : ""));
  if (trace) trace->resolve();
  stop = losses[count].item<double>() > 0.0;
  go_on = losses[count + 1].item<double>() > 0.0;
  if (losses[count + 2].item<double>() == 0.0) finish_save();  // --async-save: nobody writes any more
  if (stop) say(launch, fmt::format("stopping after step {}: a rank was asked to (SIGINT or SIGTERM)\n", step));
  step_began = Moment::record(device);
}

}  // namespace mgp

#include "common/run.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "common/counter_random.hpp"
#include "common/device.hpp"
#include "common/error.hpp"
#include "common/metrics.hpp"
#include "common/report.hpp"
#include "common/safetensors.hpp"
#include "common/text.hpp"
#include "common/watchdog.hpp"

#if MGP_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#endif

namespace mgp {
namespace {

// Ctrl-C asks the loop to end after the step (all ranks together); a second one ends the process at once.
std::atomic<int> stop_signals{0};

void on_stop_signal(int signal_number) {
  if (stop_signals.fetch_add(1) > 0) _exit(128 + signal_number);
}

at::Tensor to_cpu(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU).contiguous().clone(); }

int64_t allocated_bytes([[maybe_unused]] at::Device device) {
#if MGP_WITH_CUDA
  if (device.is_cuda()) {
    at::globalContext().lazyInitDevice(device.type());  // the allocator has no statistics before that
    return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].current;
  }
#endif
  return 0;
}

}  // namespace

void say(const Launch& launch, const std::string& text) {
  if (launch.rank != 0) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

struct Run::State {
  const Options options;
  const Launch launch;
  const at::Device device;
  Communicator* const world;  // null in a trainer of one process
  MemoryPrediction memory;
  std::vector<CallPrediction> calls;
  std::vector<DeviceFacts> devices;

  TrainingState loaded;           // step 0 unless --load
  TrainingRecord record;
  std::vector<PendingStep> pending;  // steps whose numbers are still on the device
  Moment step_began;
  Report report;
  std::unique_ptr<MetricsFile> metrics;
  NamedTensors batches;           // --dump-batches, rank 0
  std::vector<std::pair<std::string, int64_t>> measured_memory;
  int64_t memory_mark = 0;
  int64_t saved_step = -1;
  bool save_failed = false;
  std::string drifted;            // with --verify: which ranks ended with other parameters
  bool stop = false;

  State(const Options& o, const Launch& l, at::Device d, Communicator* w) : options(o), launch(l), device(d), world(w) {}

  bool records() const { return options.verify; }
  void inject(int64_t step) const;
  void refuse_if_too_large(const MemoryPattern& pattern) const;
  void flush(int64_t step);
  void write_checkpoint(int64_t step, const AdamW& optimizer, const std::vector<std::string>& bucket_order);
};

// ── banner ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Run::Run(const Options& options, const Launch& launch, at::Device device, Communicator* world, const MemoryPattern& pattern,
         std::vector<CallPrediction> calls)
    : state_(std::make_unique<State>(options, launch, device, world)) {
  State& s = *state_;
  s.memory = predict_memory(options, pattern);
  s.calls = std::move(calls);
  const int threads = at::get_num_threads();
  s.devices = world != nullptr ? world->devices() : std::vector<DeviceFacts>{describe_device(launch, device, threads)};
  say(launch, banner(options, launch, s.devices, world != nullptr ? world->wire() : "none"));
  say(launch, memory_table(s.memory) + call_table(s.calls, options.world));
  s.refuse_if_too_large(pattern);

  at::manual_seed(options.seed);  // LibTorch seeds its generators at random
  for (const int signal_number : {SIGINT, SIGTERM}) std::signal(signal_number, on_stop_signal);
  if (!options.metrics.empty() && launch.rank == 0) {
    s.metrics = std::make_unique<MetricsFile>(options.metrics, /*append=*/!options.load.empty());
  }
  s.memory_mark = allocated_bytes(device);
  s.report.begin(options, launch, device, s.devices);
}

Run::~Run() = default;

void Run::State::refuse_if_too_large(const MemoryPattern& pattern) const {
  // Judged over the facts of all ranks, so that all ranks come to the same answer.
  for (const DeviceFacts& facts : devices) {
    // Ranks that share a GPU (or a host's memory) share what is free of it.
    const int64_t sharers = launch.share_gpu || !device.is_cuda() ? launch.local_size : 1;
    const int64_t available = facts.free_bytes / sharers;
    if (facts.free_bytes <= 0 || memory.peak() <= available) continue;
    const int64_t rows = largest_batch(options, pattern, available);
    throw UsageError(fmt::format(
        "{} rows per rank need about {} but rank {} ({} on {}) has {} of free memory: {}", options.batch_size,
        human_bytes(static_cast<double>(memory.peak())), facts.rank, facts.device, facts.host,
        human_bytes(static_cast<double>(available)),
        rows > 0 ? fmt::format("--batch-size {} would fit", rows) : "not even one row fits; choose a smaller --preset"));
  }
}

// ── position ──────────────────────────────────────────────────────────────────────────────────────────────────────────

std::vector<std::string> Run::load(AdamW& optimizer) {
  State& s = *state_;
  if (!s.options.load.empty()) {
    const FullState file = load_full_state(s.options.load);
    check_full_state(file, s.options.model, storage_dtype(s.options.precision), s.options.load);
    if (file.training.step > s.options.steps) {
      throw UsageError(fmt::format("--load {}: it was saved at step {}, after --steps {}", s.options.load,
                                   file.training.step, s.options.steps));
    }
    restore(file, optimizer);
    restore_rng(file.training, s.device);
    s.loaded = file.training;
    if (file.training.step > 0 && s.options.data == "fresh" &&
        (file.training.seed != s.options.seed || file.training.global_batch_size != s.options.global_batch_size)) {
      say(s.launch, fmt::format("note: {} was trained with seed {} and {} rows a step, this run goes on with seed {} and {} "
                                "rows: its data is another stream\n",
                                s.options.load, file.training.seed, file.training.global_batch_size, s.options.seed,
                                s.options.global_batch_size));
    }
    say(s.launch, fmt::format("loaded {} at step {}\n", s.options.load, file.training.step));
  }
  if (s.records()) {
    for (const auto& [name, tensor] : optimizer.parameters()) s.record.initial_parameters.emplace_back(name, to_cpu(tensor));
  }
  s.step_began = Moment::record(s.device);
  return s.loaded.bucket_order;
}

int64_t Run::first_step() const { return state_->loaded.step + 1; }

bool Run::wants(int64_t step) const { return step <= state_->options.steps && !state_->stop; }

double Run::learning_rate(int64_t step) const { return state_->options.lr.at(step); }

void Run::measure_memory(const std::string& kind) {
  State& s = *state_;
  const int64_t now = allocated_bytes(s.device);
  s.measured_memory.emplace_back(kind, now - s.memory_mark);
  s.memory_mark = now;
}

// ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

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

void Run::before_step(int64_t step) {
  State& s = *state_;
  if (s.world != nullptr) s.world->watchdog().set_step(step);
  s.inject(step);
  // Dropout masks are a function of (seed, step, rank): a resumed run draws the same ones.
  if (s.options.dropout > 0) at::manual_seed(counter_hash(s.options.seed, static_cast<uint64_t>(step)) + static_cast<uint64_t>(s.launch.rank));
  if (!s.options.dump_batches.empty() && s.launch.rank == 0) {
    const SyntheticTokens data(s.options.model, s.options.seed, s.options.global_batch_size, s.options.data_mode(), at::kCPU);
    const Batch batch = data.rows(step, {0, s.options.global_batch_size});
    s.batches.emplace_back(fmt::format("step_{}.tokens", step), batch.tokens);
    s.batches.emplace_back(fmt::format("step_{}.labels", step), batch.labels);
  }
}

void Run::gradients_ready(int64_t step, const NamedTensors& parameters) {
  State& s = *state_;
  if (step != first_step() || (!s.records() && s.options.dump_gradients.empty())) return;
  NamedTensors gradients;
  for (const auto& [name, parameter] : parameters) {
    gradients.emplace_back(name, parameter.grad().defined() ? to_cpu(parameter.grad()) : to_cpu(at::zeros_like(parameter)));
  }
  if (!s.options.dump_gradients.empty() && s.launch.rank == 0) {
    write_safetensors(s.options.dump_gradients, gradients, {{"step", std::to_string(step)}});
  }
  if (s.records()) s.record.first_gradients = std::move(gradients);
}

void Run::after_step(int64_t step, const at::Tensor& loss_sum, const at::Tensor& norm, const StepTimes* times) {
  State& s = *state_;
  PendingStep pending;
  pending.step = step;
  pending.loss = loss_sum.detach();
  pending.norm = norm.detach();
  pending.learning_rate = learning_rate(step);
  pending.began = s.step_began;
  pending.ended = Moment::record(s.device);
  if (times != nullptr) pending.times = *times;
  if (s.world != nullptr) pending.ledger = s.world->ledger().rows();
  s.step_began = pending.ended;
  s.pending.push_back(std::move(pending));

  const bool last = step == s.options.steps;
  if (step == first_step() || step % s.options.log_every == 0 || last) s.flush(step);
}

/// Reads the numbers of the steps since the last line: the only place in the loop where the host waits for the device.
void Run::State::flush(int64_t step) {
  // One tensor for all steps of the interval and the stop flag: one all-reduce, one copy to the host.
  std::vector<at::Tensor> numbers;
  for (const PendingStep& p : pending) numbers.push_back(p.loss.to(at::kDouble).reshape({1}));
  numbers.push_back(at::full({1}, stop_signals.load() > 0 ? 1.0 : 0.0, at::TensorOptions().dtype(at::kDouble).device(device)));
  at::Tensor losses = at::cat(numbers);  // [steps + 1]
  if (world != nullptr) world->all_reduce(losses, ReduceOp::sum, {"loss", Purpose::bookkeeping}).wait();
  numbers.pop_back();
  for (at::Tensor& number : numbers) number = at::Tensor();
  std::vector<at::Tensor> norms;
  for (const PendingStep& p : pending) norms.push_back(p.norm.to(at::kDouble).reshape({1}));
  losses = losses.cpu();
  const at::Tensor norms_cpu = at::cat(norms).cpu();

  const int64_t count = static_cast<int64_t>(pending.size());
  for (int64_t i = 0; i < count; ++i) {
    StepNumbers n = report.read(pending[static_cast<size_t>(i)], losses[i].item<double>(), norms_cpu[i].item<double>());
    if (records()) {
      record.losses.push_back(n.loss);
      record.norms.push_back(n.grad_norm);
    }
    if (metrics) metrics->step(n);
  }
  pending.clear();
  say(launch, report.progress_line());
  stop = losses[count].item<double>() > 0.0;
  if (stop) say(launch, fmt::format("stopping after step {}: a rank was asked to (SIGINT or SIGTERM)\n", step));
  step_began = Moment::record(device);
}

// ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────

void Run::State::write_checkpoint(int64_t step, const AdamW& optimizer, const std::vector<std::string>& bucket_order) {
  saved_step = step;
  if (launch.rank != 0) return;
  TrainingState training;
  training.step = step;
  training.seed = options.seed;
  training.global_batch_size = options.global_batch_size;
  training.next_sample = options.data == "repeat" ? 0 : step * options.global_batch_size;
  training.data = options.data;
  training.precision = to_string(options.precision);
  training.bucket_order = bucket_order;
  capture_rng(training, device);
  // The others wait in their next collective meanwhile: no deadline runs while a disk is slow.
  std::optional<Watchdog::Pause> pause;
  if (world != nullptr) pause.emplace(world->watchdog());
  try {
    save_full_state(*options.save, options.model, optimizer, training);
    say(launch, fmt::format("saved {} at step {}\n", *options.save, step));
  } catch (const std::exception& error) {
    // Days of training are worth more than one file: the run goes on, the exit code tells (trial B34).
    save_failed = true;
    std::fprintf(stderr, "warning: checkpoint not written, the run goes on: %s\n", error.what());
  }
}

void Run::save_if_due(int64_t step, const AdamW& optimizer, const std::vector<std::string>& bucket_order) {
  State& s = *state_;
  if (s.options.save && s.options.save_every > 0 && step % s.options.save_every == 0) {
    s.write_checkpoint(step, optimizer, bucket_order);
    s.step_began = Moment::record(s.device);
  }
}

void Run::save_final(const AdamW& optimizer, const std::vector<std::string>& bucket_order) {
  State& s = *state_;
  const int64_t step = std::max(s.loaded.step, s.report.last_step());
  if (s.options.save && s.saved_step != step) s.write_checkpoint(step, optimizer, bucket_order);
}

// ── end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

void Run::expect_equal_ranks(const NamedTensors& parameters) {
  State& s = *state_;
  if (s.world == nullptr || s.options.debug != DebugLevel::detail) return;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  s.world->expect_same("parameters", hash_tensors(tensors));
}

void Run::training_ended(const NamedTensors& parameters) {
  State& s = *state_;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) {
    tensors.push_back(tensor);
    if (s.records()) s.record.final_parameters.emplace_back(name, to_cpu(tensor));
  }
  const uint64_t hash = hash_tensors(tensors);
  try {
    if (s.world != nullptr) s.world->expect_same("parameters", hash);  // the ranks may never drift apart
  } catch (const RunError& error) {
    if (!s.options.verify) throw;
    s.drifted = error.what();  // the proof goes on and says where the difference began; the verdict is settled
  }
  s.report.set_parameter_hash(hash, s.drifted.empty());
  if (!s.options.dump_batches.empty() && s.launch.rank == 0) {
    write_safetensors(s.options.dump_batches, s.batches, {{"global_batch_size", std::to_string(s.options.global_batch_size)}});
  }
}

int Run::finish(const std::function<Verdict(const TrainingRecord&)>& prove) {
  State& s = *state_;
  const std::vector<std::string> memory =
      s.world != nullptr ? s.world->gather_text("memory", memory_row(s.launch, s.device))
                         : std::vector<std::string>{memory_row(s.launch, s.device)};
  std::vector<LedgerRow> ledger;
  if (s.world != nullptr) ledger = s.world->ledger().rows();
  say(s.launch, s.report.memory_report(s.memory, s.measured_memory, memory));
  bool ledger_equal = true;
  if (s.world != nullptr) say(s.launch, s.report.ledger_report(s.calls, ledger, ledger_equal));
  say(s.launch, s.report.summary());
  if (s.metrics) s.metrics->run(s.report.run_object(s.memory, memory, ledger));

  int code = s.save_failed ? kExitFailed : kExitDone;
  if (s.options.verify && s.stop) {
    say(s.launch, "--verify was left out: the run was stopped\n");
  } else if (s.options.verify) {
    std::string outcome;
    if (s.launch.rank == 0) {
      // The others sleep in gather_text; deadlines stand still, since one device takes as long as it takes.
      std::optional<Watchdog::Pause> pause;
      if (s.world != nullptr) pause.emplace(s.world->watchdog());
      const Verdict verdict = prove(s.record);
      say(s.launch, verdict.report());
      if (!ledger_equal) say(s.launch, "NOT EQUAL: the ledger differs from the prediction\n");
      if (!s.drifted.empty()) say(s.launch, fmt::format("NOT EQUAL: {}\n", s.drifted));
      outcome = verdict.passed() && ledger_equal && s.drifted.empty() ? "equal" : "different";
    }
    if (s.world != nullptr) outcome = s.world->gather_text("verdict", outcome).front();
    if (outcome != "equal") code = kExitVerify;
  }
  return code;
}

// ── main ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

std::optional<int> answer_and_stop(const Options& options, const Launch& launch, const MemoryPattern& pattern,
                                   const std::vector<CallPrediction>& calls) {
  if (options.environment) {
    say(launch, environment_report(launch));
    return kExitDone;
  }
  if (options.predict) {
    say(launch, table(options.trainer.summary, to_rows(settings(options)), /*head=*/false) +
                    memory_table(predict_memory(options, pattern)) + call_table(calls, options.world));
    return kExitDone;
  }
  return std::nullopt;
}

int run_main(int (*trainer)(int, char**), int argc, char** argv) {
  int rank = 0;
  try {
    rank = detect_launch().rank;
    return trainer(argc, argv);
  } catch (const HelpShown&) {
    return kExitDone;
  } catch (const UsageError& error) {
    if (rank == 0 || error.every_rank()) {
      std::fprintf(stderr, "error: %s\n", error.what());
    } else {
      // Rank 0 finds the same mistake and says it. A launcher ends everything as soon as one rank ends, so wait for that.
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    return kExitUsage;
  } catch (const std::exception& error) {
    std::string line = error.what();
    line.erase(std::min(line.find("\nException raised from"), line.size()));  // LibTorch appends its own stack
    end_process(nullptr, fmt::format("rank {} failed: {}", rank, line), kExitFailed);
  }
}

}  // namespace mgp

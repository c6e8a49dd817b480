// The end of a run: report, proof, exit code.
#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/error.hpp"
#include "common/run_state.hpp"
#include "common/safetensors.hpp"
#include "common/watchdog.hpp"

namespace mgp {
namespace {

uint64_t hash_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return hash_tensors(tensors);
}

}  // namespace

// ── end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

void Run::expect_equal_ranks(const NamedTensors& parameters) {
  State& s = *state_;
  if (s.world == nullptr || s.options.debug != DebugLevel::detail) return;
  s.world->expect_same("parameters", hash_of(parameters));
}

void Run::State::check_equal(const std::string& what, uint64_t hash) {
  try {
    if (world != nullptr) world->expect_same(what, hash);  // the ranks may never drift apart
  } catch (const RunError& error) {
    if (!options.verify) throw;
    drifted = error.what();  // the proof goes on and says where the difference began; the verdict is settled
  }
}

void Run::expect_equal_replicas(const NamedTensors& replicas) {
  State& s = *state_;
  if (replicas.empty()) return;
  const uint64_t hash = hash_of(replicas);
  s.check_equal("replicated parameters", hash);
  if (s.launch.world_size == 1 || !s.drifted.empty()) return;
  say(s.launch, fmt::format("replicated parameters: {} tensors, equal on all {} ranks ({:016x})\n", replicas.size(),
                            s.launch.world_size, hash));
}

void Run::training_ended(const NamedTensors& parameters) {
  State& s = *state_;
  const NamedTensors gathered = s.layout != nullptr ? s.layout->gather(parameters) : parameters;
  if (s.records()) {
    for (const auto& [name, tensor] : gathered) s.record.final_parameters.emplace_back(name, copy_on_cpu(tensor));
  }
  const uint64_t hash = hash_of(gathered);
  if (s.layout != nullptr) {
    s.report.set_parameter_hash(hash, /*ranks_equal=*/true, /*sharded=*/true);
  } else {
    s.check_equal("parameters", hash);
    s.report.set_parameter_hash(hash, s.drifted.empty());
  }
  if (!s.options.dump_batches.empty() && s.launch.rank == 0) {
    write_safetensors(s.options.dump_batches, s.batches,
                      {{"global_batch_size", std::to_string(s.options.global_batch_size)}});
  }
}

RunNumbers Run::numbers() const {
  RunNumbers numbers = state_->report.numbers();
  const MemoryRow memory = parse_memory_row(memory_row(state_->launch, state_->device));
  numbers.peak_allocated = memory.peak_allocated;
  numbers.peak_reserved = memory.peak_reserved;
  numbers.utilization = state_->gpu->summary().mean_utilization.value_or(NAN);
  return numbers;
}

int Run::finish(const std::function<Verdict(const TrainingRecord&)>& prove) {
  State& s = *state_;
  s.gpu->stop();
  s.write_trace();
  if (!s.options.profile.empty() && !s.profiled) s.abandon_profile();
  const std::vector<std::string> memory = s.from_all("memory", memory_row(s.launch, s.device));
  std::vector<std::string> gpu_lines, gpu_objects;  // of each rank, on GPUs
  if (s.device.is_cuda()) {
    const GpuSummary gpu = s.gpu->summary();
    gpu_lines = s.from_all("gpu", to_text(gpu));
    gpu_objects = s.from_all("gpu json", serialize(gpu));
  }
  std::vector<LedgerRow> ledger;
  if (s.world != nullptr) ledger = s.world->ledger().rows();
  say(s.launch, s.report.memory_report(s.memory, s.measured_memory, memory));
  bool ledger_equal = true;
  if (s.world != nullptr) say(s.launch, s.report.ledger_report(s.calls, ledger, ledger_equal));
  for (size_t rank = 0; rank < gpu_lines.size(); ++rank) {
    say(s.launch, fmt::format("rank {}: {}\n", rank, gpu_lines[rank]));
  }
  say(s.launch, s.report.summary());
  if (s.metrics)
    s.metrics->run(s.report.run_object(s.memory, s.measured_memory, memory, gpu_objects, ledger, s.warnings));

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
    outcome = s.from_all("verdict", outcome).front();
    if (outcome != "equal") code = kExitVerify;
  }
  return code;
}

}  // namespace mgp

// What a person can watch of a run: phases with their ranges and spans, the halts of --pace, --trace, --profile.
#include <fmt/format.h>
#include <poll.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "common/atomic_file.hpp"
#include "common/device_memory.hpp"
#include "common/error.hpp"
#include "common/nvtx.hpp"
#include "common/run_state.hpp"
#include "common/text.hpp"
#include "common/watchdog.hpp"

namespace mgp {

// ── phases ────────────────────────────────────────────────────────────────────────────────────────────────────────────

void Run::State::begin_watching() {
  if (!options.trace.empty()) {
    trace = std::make_unique<Trace>(launch.rank, device);
    if (world != nullptr) world->observe([this](const PastCall& call) { trace->communication(call); });
  }
  begin_phase("init");
}

void Run::phase(const char* name) {
  state_->end_phase();
  state_->begin_phase(name);
}

void Run::span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended,
               at::Device device) {
  if (state_->trace) state_->trace->span(row, name, began, ended, device);
}

void Run::State::begin_phase(const std::string& name) {
  phase = name;
  nvtx_push(name.c_str());
  if (trace) phase_began = Moment::record(device);
}

void Run::State::end_phase() {
  if (phase.empty()) return;
  const std::string name = std::exchange(phase, "");
  nvtx_pop();
  if (trace) {
    const Moment ended = Moment::record(device);
    // A span with one end inside of a CUDA graph and one outside of it has no length.
    if (phase_began.captured() == ended.captured()) {
      trace->span("compute", name, phase_began, ended);
      // The allocator works on the host, ahead of the device: its peak is shown where the phase runs, not where the host
      // was.
      trace_memory(phase_began);
    }
  }
  if (halts_after(name)) halt(name);
}

void Run::State::trace_memory(const Moment& at) {
  if (device.is_cuda()) trace->counter("memory allocated, bytes", at, static_cast<double>(phase_peak(device)));
}

void Run::State::write_trace() {
  if (!trace) return;
  trace_memory(Moment::record(device));  // what was allocated after the last phase
  const std::vector<int64_t> offsets = world != nullptr ? clock_offsets(*world) : std::vector<int64_t>{0};
  const std::vector<std::string> ranks = from_all("trace", trace->serialize());
  if (launch.rank != 0) return;
  std::vector<std::string> names;
  for (const DeviceFacts& facts : devices) {
    names.push_back(fmt::format("rank {} ({}, {}, pid {})", facts.rank, facts.host, facts.device, facts.pid));
  }
  try {
    const std::string text = trace_file(ranks, names, offsets);
    AtomicFile file(options.trace);
    file.write(text.data(), text.size());
    file.commit();
    say(launch, fmt::format("trace written to {}: open it in ui.perfetto.dev\n", options.trace));
  } catch (const std::exception& error) {
    save_failed = true;
    warn(fmt::format("trace not written: {}", error.what()));
  }
}

// ── --pace ────────────────────────────────────────────────────────────────────────────────────────────────────────────

bool Run::State::halts_after(const std::string& name) const {
  const std::vector<std::string>& names = options.pace.phases;
  return std::find(names.begin(), names.end(), name) != names.end();
}

void Run::unit_event(const char* what, const std::string& unit) {
  State& s = *state_;
  if (s.trace) {
    const Moment now = Moment::record(s.device);
    Moment& came = s.whole_units[unit];
    if (std::string(what) == "free" && came.valid()) s.trace->span("whole units", unit, came, now);
    came = now;
  }
  if (s.halts_after(what)) s.halt(fmt::format("{} {}", what, unit));
}

namespace {

/// Memory of one rank while it stands still, as text between ranks.
struct Standstill {
  int64_t allocated = 0, reserved = 0;  ///< of LibTorch's allocator
  int64_t device_used = 0;              ///< on the whole GPU, by CUDA
  int64_t nvml_device = -1, nvml_process = -1;
  int64_t host_resident = 0;
};

Standstill parse_standstill(const std::string& text) {
  Standstill s;
  std::istringstream(text) >> s.allocated >> s.reserved >> s.device_used >> s.nvml_device >> s.nvml_process >>
      s.host_resident;
  return s;
}

std::string mib(int64_t bytes) { return with_commas((bytes + (1 << 19)) >> 20); }

}  // namespace

std::string Run::State::standstill_report(const std::string& after, const std::vector<std::string>& rows) const {
  std::string text = fmt::format("halt after {} of step {}: all ranks stand still\n", after, current_step);
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const Standstill mine = parse_standstill(rows[rank]);
    const DeviceFacts& facts = devices[rank];
    if (!device.is_cuda()) {
      text += fmt::format("  rank {}, pid {}: top should show about {} MiB resident\n", facts.rank, facts.pid,
                          mib(mine.host_resident));
      continue;
    }
    // What the driver has given away beyond the allocators of this run: contexts, kernels, NCCL; other programs as well.
    int64_t reserved = 0;
    int64_t ranks_here = 0;
    for (size_t other = 0; other < rows.size(); ++other) {
      if (devices[other].uuid != facts.uuid || devices[other].host != facts.host) continue;
      reserved += parse_standstill(rows[other]).reserved;
      ++ranks_here;
    }
    const int64_t beyond = (mine.device_used - reserved) / ranks_here;
    text += fmt::format(
        "  rank {}, pid {}, GPU {}: nvidia-smi should show about {} MiB = {} in tensors + {} cached + {} of CUDA "
        "context, kernels and NCCL; the whole GPU {} MiB{}\n",
        facts.rank, facts.pid, facts.physical >= 0 ? std::to_string(facts.physical) : "?", mib(mine.reserved + beyond),
        mib(mine.allocated), mib(mine.reserved - mine.allocated), mib(beyond), mib(mine.device_used),
        mine.nvml_process >= 0  ? fmt::format(" (NVML says {} and {})", mib(mine.nvml_process), mib(mine.nvml_device))
        : mine.nvml_device >= 0 ? fmt::format(" (NVML says {})", mib(mine.nvml_device))
                                : "");
  }
  return text;
}

void Run::State::halt(const std::string& after) {
  synchronize_device(device);
  if (world != nullptr) world->barrier("halt of --pace");
  release_cached_memory(device);
  if (world != nullptr) world->barrier("cached memory given back");  // before anybody reads the GPU's memory
  const DeviceMemory now = device_memory(device);
  const std::optional<GpuSample> sample = gpu->now();
  const std::string mine = fmt::format("{} {} {} {} {} {}", now.allocated, now.reserved, used_device_bytes(device),
                                       sample ? sample->device_bytes.value_or(-1) : -1,
                                       sample ? sample->process_bytes.value_or(-1) : -1, resident_bytes());
  say(launch, standstill_report(after, from_all("halt", mine)));
  std::optional<Watchdog::Pause> pause;  // no deadline runs while a person looks
  if (world != nullptr) pause.emplace(world->watchdog());
  if (launch.rank == 0) wait_at_halt();
  from_all("go on", "");
}

void Run::State::wait_at_halt() {
  if (!halts_wait) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.pace.seconds);
  if (options.pace.key) say(launch, "  press Enter to go on\n");
  while (!stop_asked()) {  // Ctrl-C ends the halt, and the run after this step
    if (!options.pace.key) {
      if (std::chrono::steady_clock::now() >= until) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, 100) <= 0) continue;
    char key = 0;
    if (::read(STDIN_FILENO, &key, 1) == 1) {
      if (key == '\n') return;
      continue;
    }
    halts_wait = false;
    say(launch, "  the keyboard has gone (end of standard input): the halts no longer wait\n");
    return;
  }
}

// ── --profile ─────────────────────────────────────────────────────────────────────────────────────────────────────────

namespace profiler = torch::autograd::profiler;

void Run::State::start_profile() {
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(profiler::ActivityType::CUDA);
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  synchronize_device(device);  // what was started before is not part of it
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  profiling = true;
}

void Run::State::abandon_profile() {
  if (profiling) {
    profiling = false;
    (void)profiler::disableProfiler();
  }
  say(launch,
      fmt::format("no profile written: the run ended before step {}, the last of the {} after --warmup-steps {}\n",
                  loaded.step + options.warmup_steps + kProfiledSteps, kProfiledSteps, options.warmup_steps));
}

void Run::State::write_profile() {
  profiling = false;
  profiled = true;
  synchronize_device(device);
  const std::unique_ptr<profiler::ProfilerResult> result = profiler::disableProfiler();
  const std::string path =
      launch.rank == 0 ? options.profile : with_part(options.profile, fmt::format("rank{}", launch.rank));
  const std::string part = path + ".part";
  result->save(part);
  if (std::rename(part.c_str(), path.c_str()) != 0) {
    save_failed = true;
    warn(fmt::format("profile not written: {}: {}", path, std::strerror(errno)));
    return;
  }
  say(launch, fmt::format("profile of {} steps written to {}\n", kProfiledSteps, path));
}

}  // namespace mgp

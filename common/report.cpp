#include "common/report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/device_memory.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

/// Peak resident host memory of this process in bytes (VmHWM).
int64_t host_peak_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word == "VmHWM:") {
      int64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

}  // namespace

std::vector<std::vector<std::string>> to_rows(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : pairs) rows.push_back({name, value});
  return rows;
}

std::string banner(const Options& options, const Launch& launch, const std::vector<DeviceFacts>& devices,
                   const std::string& wire) {
  std::string text = table(options.trainer.summary, to_rows(settings(options)), /*head=*/false);
  text += fmt::format("world {}, launched by {}{}, wire {}\n", launch.world_size, launch.launcher,
                      launch.matched.empty() ? "" : " (" + launch.matched + ")", wire);
  std::vector<std::vector<std::string>> rows = {
      {"rank", "pid", "host", "device", "nvidia-smi", "uuid", "name", "memory", "threads"}};
  for (const DeviceFacts& d : devices) {
    rows.push_back({std::to_string(d.rank), std::to_string(d.pid), d.host, d.device,
                    d.physical >= 0 ? "GPU " + std::to_string(d.physical) : "-", d.uuid.empty() ? "-" : d.uuid, d.name,
                    human_bytes(static_cast<double>(d.total_bytes)), std::to_string(d.threads)});
  }
  text += table("devices", rows, /*head=*/true);
  if (launch.share_gpu && launch.local_size > 1) {
    text +=
        fmt::format("{} ranks share one GPU: the collectives are real, the times mean nothing\n", launch.local_size);
  }
  return text;
}

std::string environment_report(const Launch& launch) {
  std::string text = table("environment", to_rows(environment_lines()), /*head=*/false);
  text += fmt::format("launcher {}: rank {} of {}, local rank {} of {}{}\n", launch.launcher, launch.rank,
                      launch.world_size, launch.local_rank, launch.local_size,
                      launch.matched.empty() ? "" : " (" + launch.matched + ")");
  return text;
}

std::string memory_row(const Launch& launch, at::Device device) {
  const DeviceMemory memory = device_memory(device);
  return fmt::format("{} {} {} {}", launch.rank, memory.peak_allocated, memory.peak_reserved, host_peak_bytes());
}

MemoryRow parse_memory_row(const std::string& text) {
  MemoryRow row;
  std::istringstream(text) >> row.rank >> row.peak_allocated >> row.peak_reserved >> row.host_peak;
  return row;
}

void Report::begin(const Options& options, const Launch& launch, at::Device device,
                   const std::vector<DeviceFacts>& devices) {
  options_ = options;
  launch_ = launch;
  cuda_ = device.is_cuda();
  devices_ = devices;
  peak_tflops_ = cuda_ ? peak_tflops(devices.at(0).name, to_string(options.precision)) : 0;
  started_ = std::chrono::steady_clock::now();
  began_ = std::chrono::system_clock::now();
}

StepNumbers Report::read(const PendingStep& p, double loss, double norm, double loss_scale, bool skipped) {
  StepNumbers n;
  n.step = p.step;
  n.loss = loss;
  n.grad_norm = norm;
  n.learning_rate = p.learning_rate;
  n.loss_scale = loss_scale;
  n.skipped = skipped;
  n.allocated_bytes = p.allocated_bytes;
  n.resident_bytes = p.resident_bytes;
  n.ms = Moment::milliseconds(p.began, p.ended);
  if (p.times.wait_ended.valid()) {
    n.exposed_ms = std::max(0.0, Moment::milliseconds(p.times.wait_began, p.times.wait_ended));
    n.lead_ms = Moment::milliseconds(p.times.first_call_began, p.times.backward_ended);
    tail_label_ = p.times.last_label;
    reduction_ = p.times.reduction;
    if (!p.times.gather_waits.empty()) n.gather_ms = 0.0;
    for (const auto& [began, ended] : p.times.gather_waits) {
      n.gather_ms += std::max(0.0, Moment::milliseconds(began, ended));
    }
    tail_bytes_ = p.times.last_bytes;
  }
  std::vector<LedgerRow> calls;
  for (const LedgerRow& row : difference(p.ledger, previous_ledger_)) {
    if (row.purpose != Purpose::training) continue;
    n.comm_calls += row.calls;
    n.comm_bytes += row.payload_bytes;
    calls.push_back(row);
  }
  previous_ledger_ = p.ledger;
  step_ledgers_.push_back(calls);
  const double seconds = n.ms / 1000.0;
  if (seconds > 0) {
    n.tokens_per_second = static_cast<double>(options_.global_batch_size * options_.model.seq_len) / seconds;
    n.tflops = flops_per_step(options_.model, options_.global_batch_size) / launch_.world_size / seconds / 1e12;
    if (peak_tflops_ > 0) n.mfu = n.tflops / peak_tflops_;
  }
  steps_.push_back(n);
  last_ = n;
  return n;
}

template <typename Member>
double Report::median(Member member) const {
  std::vector<double> values;
  const int64_t first = steps_.empty() ? 0 : steps_.front().step;
  for (int pass = 0; pass < 2 && values.empty(); ++pass) {
    for (const StepNumbers& n : steps_) {
      if ((pass == 1 || n.step >= first + options_.warmup_steps) && !std::isnan(n.*member)) values.push_back(n.*member);
    }
  }
  if (values.empty()) return NAN;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

std::string Report::progress_line(const std::string& more) const {
  const double step_ms = median(&StepNumbers::ms);
  std::string line =
      fmt::format("step {:>5}/{}  loss {:.6f}  grad norm {:.4f}  lr {:.2e}  {:.2f} ms  {} tokens/s  {:.2f} TFLOP/s",
                  last_.step, options_.steps, last_.loss, last_.grad_norm, last_.learning_rate, last_.ms,
                  with_commas(static_cast<int64_t>(last_.tokens_per_second)), last_.tflops);
  if (!std::isnan(last_.loss_scale)) {
    line += fmt::format("  scale {}{}", last_.loss_scale, last_.skipped ? " (skipped: overflow)" : "");
  }
  if (!std::isnan(last_.mfu)) line += fmt::format("  MFU {:.1f}%", 100.0 * last_.mfu);
  if (!std::isnan(last_.exposed_ms)) line += fmt::format("  exposed {:.2f} ms", last_.exposed_ms);
  line += more + fmt::format("  ETA {}\n",
                             human_seconds(static_cast<double>(std::max<int64_t>(options_.steps - last_.step, 0)) *
                                           step_ms / 1000.0));
  return line;
}

RunNumbers Report::numbers() const {
  RunNumbers numbers;
  numbers.ms = median(&StepNumbers::ms);
  numbers.tokens_per_second = median(&StepNumbers::tokens_per_second);
  numbers.loss_scale = last_.loss_scale;
  for (const StepNumbers& n : steps_) {
    numbers.losses.push_back(n.loss);
    numbers.skipped += n.skipped ? 1 : 0;
  }
  return numbers;
}

std::string Report::loss_scale_line() const {
  if (std::isnan(last_.loss_scale)) return "";
  std::string skipped;
  int64_t count = 0;
  for (const StepNumbers& n : steps_) {
    if (!n.skipped) continue;
    if (++count <= 8) skipped += fmt::format("{}{}", count == 1 ? ": steps " : ", ", n.step);
  }
  return fmt::format("loss scale {} at first, {} at last; {} of {} steps skipped{}{}\n", steps_.front().loss_scale,
                     last_.loss_scale, count, steps_.size(), skipped, count > 8 ? ", ..." : "");
}

std::string Report::summary() const {
  if (steps_.empty()) return "no step was taken\n";
  const double ms = median(&StepNumbers::ms);
  double lowest = steps_.back().ms, highest = lowest;
  const int64_t first = steps_.front().step;
  for (const StepNumbers& n : steps_) {
    if (n.step < first + options_.warmup_steps) continue;
    lowest = std::min(lowest, n.ms);
    highest = std::max(highest, n.ms);
  }
  std::string text = fmt::format(
      "step time {:.2f} ms median ({:.2f} to {:.2f}), {} tokens/s, {:.2f} TFLOP/s per rank\n", ms, lowest, highest,
      with_commas(static_cast<int64_t>(median(&StepNumbers::tokens_per_second))), median(&StepNumbers::tflops));
  if (!options_.pace.phases.empty()) text += "with --pace: halts within a step are part of its time\n";
  text += loss_scale_line();
  const double exposed = median(&StepNumbers::exposed_ms);
  if (!std::isnan(exposed)) {
    const double lead = median(&StepNumbers::lead_ms);
    text += fmt::format(
        "communication: the first {} began {:.2f} ms {} backward ended; exposed {:.2f} ms a step ({:.1f}%)\n",
        reduction_, std::abs(lead), lead > 0 ? "before" : "AFTER", exposed, ms > 0 ? 100.0 * exposed / ms : 0.0);
    const double gather = median(&StepNumbers::gather_ms);
    if (!std::isnan(gather)) {
      text += fmt::format("parameters: the computation waited {:.2f} ms a step for gathers ({:.1f}%)\n", gather,
                          ms > 0 ? 100.0 * gather / ms : 0.0);
    }
    text += fmt::format("exposed tail: {} ({})\n", tail_label_, human_bytes(static_cast<double>(tail_bytes_)));
  }
  text += fmt::format("parameters after step {}: hash {:016x}{}\n", last_.step, parameter_hash_,
                      sharded_                 ? ", gathered from all ranks"
                      : !ranks_equal_          ? ", NOT equal on all ranks"
                      : launch_.world_size > 1 ? fmt::format(", equal on all {} ranks", launch_.world_size)
                                               : "");
  return text;
}

nlohmann::json Report::run_object(const MemoryPrediction& predicted,
                                  const std::vector<std::pair<std::string, int64_t>>& measured_kinds,
                                  const std::vector<std::string>& rank_memory,
                                  const std::vector<std::string>& rank_gpus, const std::vector<LedgerRow>& ledger,
                                  const std::vector<std::string>& warnings) const {
  using nlohmann::json;
  json object = {{"kind", "run"}, {"schema", 1}, {"trainer", options_.trainer.name}, {"command", options_.command}};
  for (const auto& [name, value] : environment_lines()) object["environment"][name] = value;
  for (const auto& [name, value] : settings(options_)) object["settings"][name] = value;
  for (const DeviceFacts& facts : devices_) object["devices"].push_back(json::parse(serialize(facts)));
  object["began"] = fmt::format("{:%FT%TZ}", std::chrono::floor<std::chrono::seconds>(began_));
  object["warnings"] = warnings;
  object["weights"] = options_.weights;
  object["cuda_graph"] = options_.cuda_graph;
  object["checkpoint_activations"] = options_.model.checkpoint_activations;
  object["world_size"] = launch_.world_size;
  object["launcher"] = launch_.launcher;
  object["precision"] = to_string(options_.precision);
  object["effective_batch"] = options_.global_batch_size;
  object["parameters"] = parameter_count(options_.model);
  object["steps"] = steps_.size();
  if (!std::isnan(last_.loss_scale)) {
    object["loss_scale_last"] = last_.loss_scale;
    object["steps_skipped"] = std::count_if(steps_.begin(), steps_.end(), [](const auto& n) { return n.skipped; });
  }
  object["ms_median"] = median(&StepNumbers::ms);
  object["exposed_ms_median"] = median(&StepNumbers::exposed_ms);
  object["exposed_gather_ms_median"] = median(&StepNumbers::gather_ms);
  object["tokens_per_second_median"] = median(&StepNumbers::tokens_per_second);
  object["tflops_median"] = median(&StepNumbers::tflops);
  object["mfu_median"] = median(&StepNumbers::mfu);
  object["seconds_total"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  object["memory_predicted"] = {{"parameters", predicted.parameters},
                                {"optimizer", predicted.optimizer},
                                {"communication_buffers", predicted.communication_buffers},
                                {"gradients", predicted.gradients},
                                {"activations", predicted.activations},
                                {"workspace", predicted.workspace},
                                {"peak", predicted.peak()}};
  for (const std::string& text : rank_memory) {
    const MemoryRow row = parse_memory_row(text);
    object["memory_measured"].push_back({{"rank", row.rank},
                                         {"peak_allocated", row.peak_allocated},
                                         {"peak_reserved", row.peak_reserved},
                                         {"host_peak", row.host_peak}});
  }
  // Only what the allocator has seen can be measured. Gradients, activations and workspace come and go together: "rest".
  if (cuda_ && !rank_memory.empty()) {
    json kinds = json::object();
    int64_t rest = parse_memory_row(rank_memory.front()).peak_allocated;
    for (const auto& [kind, bytes] : measured_kinds) {
      std::string key = kind;
      std::replace(key.begin(), key.end(), ' ', '_');
      kinds[key] = bytes;
      rest -= bytes;
    }
    kinds["rest"] = rest;
    object["memory_measured_by_kind"] = std::move(kinds);
  }
  for (const std::string& text : rank_gpus) object["gpu"].push_back(json::parse(text));
  for (const LedgerRow& row : ledger) {
    object["ledger"].push_back({{"group", row.group},
                                {"call", row.call},
                                {"purpose", row.purpose == Purpose::training ? "training" : "bookkeeping"},
                                {"calls", row.calls},
                                {"payload_bytes", row.payload_bytes},
                                {"seconds", row.seconds}});
  }
  object["parameter_hash"] = fmt::format("{:016x}", parameter_hash_);
  return object;
}

}  // namespace mgp

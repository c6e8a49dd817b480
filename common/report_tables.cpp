// The tables at the end of a run: what was predicted beside what was measured.
#include <fmt/format.h>

#include "common/report.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

std::string ratio_text(double measured, double predicted) {
  return predicted > 0 ? fmt::format("{:+.1f}%", 100.0 * (measured / predicted - 1.0)) : "";
}

LedgerRow sum_of(const std::vector<LedgerRow>& rows, const std::string& call) {
  LedgerRow total;
  for (const LedgerRow& row : rows) {
    if (row.call != call) continue;
    total.calls += row.calls;
    total.payload_bytes += row.payload_bytes;
  }
  return total;
}

}  // namespace

std::string Report::memory_report(const MemoryPrediction& p, const std::vector<std::pair<std::string, int64_t>>& kinds,
                                  const std::vector<std::string>& rank_rows) const {
  std::vector<std::vector<std::string>> rows;
  const auto mib = [](double bytes) { return fmt::format("{:.1f}", bytes / (1024.0 * 1024.0)); };
  if (cuda_) {
    // Only what the allocator has seen can be measured: on a CPU there is no such thing, so no second column there.
    rows.push_back({"kind (MiB, rank 0)", "predicted", "measured", "difference"});
    int64_t known = 0;
    for (const auto& [kind, measured] : kinds) {
      const int64_t predicted = kind == "parameters"  ? p.parameters
                                : kind == "optimizer" ? p.optimizer
                                                      : p.communication_buffers;
      rows.push_back({kind, mib(static_cast<double>(predicted)), mib(static_cast<double>(measured)),
                      ratio_text(static_cast<double>(measured), static_cast<double>(predicted))});
      known += measured;
    }
    const int64_t allocated = parse_memory_row(rank_rows.at(0)).peak_allocated;
    const double rest = static_cast<double>(p.activations + p.gradients + p.workspace);
    rows.push_back({"activations, gradients, workspace", mib(rest), mib(static_cast<double>(allocated - known)),
                    ratio_text(static_cast<double>(allocated - known), rest)});
    rows.push_back({"peak", mib(static_cast<double>(p.peak())), mib(static_cast<double>(allocated)),
                    ratio_text(static_cast<double>(allocated), static_cast<double>(p.peak()))});
  }
  std::string text = rows.empty() ? "" : table("memory, predicted and measured", rows, true);
  std::vector<std::vector<std::string>> ranks = {
      cuda_ ? std::vector<std::string>{"rank", "peak allocated MiB", "peak reserved MiB", "host peak MiB"}
            : std::vector<std::string>{"rank", "host peak MiB (program and libraries included)"}};
  for (const std::string& text_row : rank_rows) {
    const MemoryRow row = parse_memory_row(text_row);
    ranks.push_back({std::to_string(row.rank)});
    if (cuda_) {
      ranks.back().push_back(mib(static_cast<double>(row.peak_allocated)));
      ranks.back().push_back(mib(static_cast<double>(row.peak_reserved)));
    }
    ranks.back().push_back(mib(static_cast<double>(row.host_peak)));
  }
  return text + table("peak memory by rank", ranks, true);
}

std::string Report::ledger_report(const std::vector<CallPrediction>& predicted, const std::vector<LedgerRow>& measured,
                                  bool& equal) const {
  std::vector<std::vector<std::string>> rows = {
      {"per step", "predicted calls", "measured", "predicted bytes", "measured", ""}};
  equal = true;
  // A resumed run has no first step of the other kind: its buckets were saved.
  const bool has_first = !steps_.empty() && steps_.front().step == 1;
  for (const CallPrediction& call : predicted) {
    for (size_t i = 0; i < step_ledgers_.size(); ++i) {
      const LedgerRow row = sum_of(step_ledgers_[i], call.call);
      const int64_t calls = has_first && i == 0 ? call.first_step_calls : call.calls;
      const bool same = row.calls == calls && row.payload_bytes == call.payload_bytes;
      if (i == 0 || (has_first && i == 1) || !same) {
        const int64_t step = steps_[i].step;
        const std::string label = i == 0 && has_first ? "step 1"
                                  : same              ? fmt::format("steps {}...", step)
                                                      : fmt::format("step {}", step);
        rows.push_back({label + " " + call.call, std::to_string(calls), std::to_string(row.calls),
                        with_commas(call.payload_bytes), with_commas(row.payload_bytes), same ? "equal" : "DIFFERENT"});
      }
      equal = equal && same;
    }
  }
  std::string text = predicted.empty() ? "" : table("wire, predicted and measured", rows, true);
  std::vector<std::vector<std::string>> all = {{"group", "call", "for", "calls", "payload bytes", "seconds"}};
  for (const LedgerRow& row : measured) {
    all.push_back({row.group, row.call, row.purpose == Purpose::training ? "training" : "bookkeeping",
                   std::to_string(row.calls), with_commas(row.payload_bytes), fmt::format("{:.3f}", row.seconds)});
  }
  text += table("byte ledger of rank 0, whole run", all, true);
  if (options_.cuda_graph) text += "calls inside the CUDA graph are counted with each replay, and not timed\n";
  return text;
}

}  // namespace mgp

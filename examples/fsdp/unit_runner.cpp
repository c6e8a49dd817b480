#include "examples/fsdp/unit_runner.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "common/activation_checkpoint.hpp"
#include "common/error.hpp"
#include "common/model.hpp"

namespace mgp {

// ── hooks into backward ───────────────────────────────────────────────────────────────────────────────────────────────

/// Called by autograd when `.grad` of one parameter is complete in this backward (on its device thread, under the compute
/// stream; on a CPU on the thread that called backward, so MPI stays on one thread).
class UnitRunner::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(UnitRunner& runner, size_t unit, size_t parameter) : runner_(runner), unit_(unit), parameter_(parameter) {}
  void operator()(const torch::autograd::Variable&) override { runner_.gradient_ready(unit_, parameter_); }

 private:
  UnitRunner& runner_;
  size_t unit_, parameter_;
};

/// Stands behind a unit's output: backward reaches it before anything of the unit, which must be gathered by then.
struct UnitRunner::BeforeBackward : torch::autograd::Function<BeforeBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& y, int64_t runner,
                            int64_t unit) {
    context->saved_data["runner"] = runner;
    context->saved_data["unit"] = unit;
    return y.view_as(y);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* const runner = reinterpret_cast<UnitRunner*>(context->saved_data["runner"].toInt());
    runner->before_backward(static_cast<size_t>(context->saved_data["unit"].toInt()));
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

UnitRunner::UnitRunner(std::vector<std::unique_ptr<Unit>> units, ShardStrategy strategy, int64_t max_inflight,
                       Communicator& world)
    : units_(std::move(units)),
      strategy_(strategy),
      max_inflight_(max_inflight),
      world_(world),
      states_(units_.size()) {
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t v = 0; v < u; ++v) {
      for (const at::Tensor& tied : units_[u]->parameters()) {
        const std::vector<at::Tensor>& others = units_[v]->parameters();
        if (std::none_of(others.begin(), others.end(), [&](const at::Tensor& other) { return other.is_same(tied); }))
          continue;
        throw RunError(
            fmt::format("units {} and {} share a parameter: one would free what the other needs; put both uses "
                        "into one unit",
                        units_[v]->name(), units_[u]->name()));
      }
    }
  }
  while (first_trained_ < units_.size() && !units_[first_trained_]->trained()) ++first_trained_;
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::vector<at::Tensor>& parameters = units_[u]->parameters();
    arrived_.emplace_back(parameters.size(), false);
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (!parameters[p].requires_grad()) continue;  // frozen: nothing will come
      torch::autograd::impl::set_post_acc_grad_hooks(parameters[p], std::make_unique<Hook>(*this, u, p));
    }
  }
}

UnitRunner::~UnitRunner() {
  // The hooks point at this object; the parameters may live longer.
  for (const auto& unit : units_) {
    for (const at::Tensor& parameter : unit->parameters()) {
      if (parameter.requires_grad()) torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    }
  }
}

// ── gathering ─────────────────────────────────────────────────────────────────────────────────────────────────────────

int64_t UnitRunner::alive() const {
  return std::count_if(states_.begin(), states_.end(), [](const State& s) { return s.begun; });
}

void UnitRunner::start_gather(size_t index) {
  State& state = states_[index];
  if (state.begun) return;
  state.begun = true;
  events_.push_back({"gather", index});
  units_[index]->start_gather();
}

/// The parameters of the unit can be used from here on.
void UnitRunner::use(size_t index) {
  start_gather(index);
  State& state = states_[index];
  if (!state.gathered) {
    const Moment began = Moment::record(world_.device());
    units_[index]->finish_gather();
    times_.gather_waits.emplace_back(began, Moment::record(world_.device()));
    state.gathered = true;
    if (watch_) watch_("gather", units_[index]->name());
  }
  events_.push_back({"use", index});
}

/// Begins gathers ahead of the computation. This must come before the unit's kernels are queued: the communication stream
/// waits for what the compute stream has queued so far, and would wait for the unit.
void UnitRunner::prefetch(int64_t from, int64_t direction) {
  for (int64_t next = from; next >= 0 && next < static_cast<int64_t>(units_.size()); next += direction) {
    if (states_[static_cast<size_t>(next)].begun) continue;
    if (strategy_ == ShardStrategy::full && alive() >= max_inflight_) return;
    if (direction < 0 && next == 0) return;  // the embedding's backward needs its indices, not its weights
    if (direction < 0 && !needs_backward(static_cast<size_t>(next))) return;
    start_gather(static_cast<size_t>(next));
    if (strategy_ != ShardStrategy::full) return;  // one ahead; none is freed, so nothing is to be limited
  }
}

void UnitRunner::free(size_t index) {
  State& state = states_[index];
  if (!state.begun) return;
  state.begun = state.gathered = false;
  events_.push_back({"free", index});
  units_[index]->free();
  if (watch_) watch_("free", units_[index]->name());
}

// ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

void UnitRunner::begin_step() {
  events_.clear();
  times_ = StepTimes{};
  times_.reduction = strategy_ == ShardStrategy::none ? "all-reduce" : "reduce-scatter";
  for (State& state : states_) state.begun = state.gathered = state.reduced = false;
}

void UnitRunner::begin_microbatch(bool last) {
  last_ = last;
  in_backward_ = false;
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::vector<at::Tensor>& parameters = units_[u]->parameters();
    states_[u].missing = static_cast<size_t>(std::count_if(
        parameters.begin(), parameters.end(), [](const at::Tensor& parameter) { return parameter.requires_grad(); }));
    arrived_[u].assign(parameters.size(), false);
  }
}

at::Tensor UnitRunner::forward(size_t index, const std::function<at::Tensor(const at::Tensor&)>& block,
                               const at::Tensor& x) {
  start_gather(index);
  // In backward a forward is the second run of --checkpoint-activations: the next unit is the one before.
  const auto here = static_cast<int64_t>(index);
  in_backward_ ? prefetch(here - 1, -1) : prefetch(here + 1, +1);
  use(index);
  at::Tensor y = block(x);
  // The last unit's backward comes at once, and so does that of a unit which runs a second time.
  const bool stays = in_backward_ || index + 1 == units_.size();
  if (strategy_ == ShardStrategy::full && !stays) free(index);
  if (!y.requires_grad()) return y;
  return BeforeBackward::apply(y, reinterpret_cast<int64_t>(this), static_cast<int64_t>(index));
}

void UnitRunner::before_backward(size_t index) {
  in_backward_ = true;
  // No gradient tells when a frozen parameter is done. The unit's backward has passed when that of the one before begins.
  const bool frees = strategy_ == ShardStrategy::full || strategy_ == ShardStrategy::grad;
  if (frees && index + 1 < units_.size() && units_[index + 1]->has_frozen()) free(index + 1);
  if (index == 0 && strategy_ == ShardStrategy::full) return;
  start_gather(index);
  prefetch(static_cast<int64_t>(index) - 1, -1);
  use(index);
}

void UnitRunner::gradient_ready(size_t unit, size_t parameter) {
  if (arrived_[unit][parameter]) return;  // a parameter that backward visits twice counts once
  arrived_[unit][parameter] = true;
  if (--states_[unit].missing > 0) return;
  if (last_ && strategy_ != ShardStrategy::optimizer) reduce(unit);
  // A weight is used in backward where its gradient is made. All are there: nothing needs the unit any more. But a frozen
  // weight may still be waiting to pass the gradient on.
  const bool frees = strategy_ == ShardStrategy::full || strategy_ == ShardStrategy::grad;
  if (frees && !units_[unit]->has_frozen()) free(unit);
  world_.progress();
}

void UnitRunner::reduce(size_t index) {
  if (states_[index].reduced || !units_[index]->trained()) return;
  states_[index].reduced = true;
  if (!times_.first_call_began.valid()) times_.first_call_began = Moment::record(world_.device());
  events_.push_back({"reduce", index});
  units_[index]->start_reduce();
}

void UnitRunner::end_microbatch() {
  times_.backward_ended = Moment::record(world_.device());
  in_backward_ = false;
  if (strategy_ == ShardStrategy::full || strategy_ == ShardStrategy::grad) {
    for (size_t u = 0; u < units_.size(); ++u) free(u);
  }
  if (!last_) return;
  // Backward's order, on every rank: units with a parameter that got no gradient, and all of ZeRO-1.
  for (size_t u = units_.size(); u-- > 0;) reduce(u);
  times_.wait_began = Moment::record(world_.device());
  for (size_t u = units_.size(); u-- > 0;) {
    if (units_[u]->trained()) units_[u]->finish_reduce();
  }
  times_.wait_ended = Moment::record(world_.device());
  times_.last_label = units_[first_trained_]->name();
  times_.last_bytes = units_[first_trained_]->gathered_bytes();
}

std::string UnitRunner::event_text() const {
  std::string text;
  for (const UnitEvent& event : events_) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", event.what, units_[event.unit]->name());
  }
  return text;
}

// ── the model in units ────────────────────────────────────────────────────────────────────────────────────────────────

at::Tensor forward_in_units(ModelImpl& model, UnitRunner& runner, const ModelConfig& config, const at::Tensor& tokens) {
  const auto run = [&](auto& parts) {
    // tokens [B, T] -> [B, T, C]
    at::Tensor x = runner.forward(
        0, [&](const at::Tensor& ids) { return embed(*parts.embedding, *parts.position, ids); }, tokens);
    for (size_t i = 0; i < parts.layers.size(); ++i) {
      const auto layer = parts.layers[i];
      // With --checkpoint-activations the gather stands inside, so that it is made for the second run too.
      const auto gathered = [&runner, layer, i](const at::Tensor& in) {
        return runner.forward(
            i + 1, [&layer](const at::Tensor& input) { return layer->forward(input); }, in);
      };
      const bool again = config.checkpoint_activations && runner.needs_backward(i + 1);
      x = again ? checkpointed(gathered, x, config.dropout > 0) : gathered(x);  // [B, T, C]
    }
    return runner.forward(
        parts.layers.size() + 1, [&](const at::Tensor& in) { return classify(*parts.norm, *parts.head, in); }, x);
  };
  if (auto* classifier = dynamic_cast<TransformerClassifier*>(&model)) return run(*classifier);
  return run(dynamic_cast<MlpModel&>(model));
}

std::vector<CallPrediction> predict_unit_calls(const std::vector<UnitSize>& units, ShardStrategy strategy,
                                               int64_t accumulate, int64_t gather_bytes, int64_t reduce_bytes) {
  const auto count = static_cast<int64_t>(units.size());
  int64_t all = 0, trained = 0, reduces = 0;
  for (const UnitSize& unit : units) {
    all += unit.elements;
    trained += unit.trained;
    if (unit.trained > 0) ++reduces;
  }
  const std::string less_frozen = trained < all ? " less frozen" : "";
  // full: each unit before its forward; before backward, which ends at the first trained unit, all but the head (still
  // there) and the embedding (not needed).
  int64_t gathers = 0, gathered = 0;
  std::string formula;
  if (strategy == ShardStrategy::full) {
    gathers = accumulate * count;
    gathered = accumulate * all;
    bool needed = units.front().trained > 0;
    for (size_t u = 1; u + 1 < units.size(); ++u) {
      needed = needed || units[u].trained > 0;
      if (!needed) continue;
      gathers += accumulate;
      gathered += accumulate * units[u].elements;
    }
    formula = units.front().trained > 0
                  ? "2P less embedding and head, padded, each microbatch"
                  : "P, and again from the first trained unit to the head, padded, each microbatch";
  } else if (strategy == ShardStrategy::grad) {
    gathers = accumulate * count;
    gathered = accumulate * all;
    formula = "P, padded, each microbatch";
  } else if (strategy == ShardStrategy::optimizer) {
    gathers = count;
    gathered = all;
    formula = "P, padded, once a step";
  }
  std::vector<CallPrediction> calls;
  if (gathers > 0) {
    calls.push_back(
        {"all_gather", gathers, gathers, gathered * gather_bytes, fmt::format("{} x {} bytes", formula, gather_bytes)});
  }
  calls.push_back({strategy == ShardStrategy::none ? "all_reduce" : "reduce_scatter", reduces, reduces,
                   trained * reduce_bytes,
                   fmt::format("P{}, padded, once a step x {} bytes", less_frozen, reduce_bytes)});
  return calls;
}

}  // namespace mgp

// When units are gathered, freed and reduced: the life of a sharded step.
//
//   forward   gather 0 | unit 0 | free 0 ... gather U-1 | unit U-1 (stays: its backward comes at once)
//             while unit k computes, the all-gather of unit k+1 is already under way
//   backward  unit U-1 | reduce U-1, free U-1 | gather U-2 (begun one unit earlier) | unit U-2 | ... | unit 0 | reduce 0
//
// A unit is gathered before its forward by forward() itself, and before its backward by a node of the autograd graph
// behind its output. A hook on each parameter counts its gradients down: the last one starts the reduce-scatter and frees
// the unit. No gradient waits for the end of backward, and no more than --max-inflight units are whole at a time.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "common/model.hpp"
#include "common/predict.hpp"
#include "common/run.hpp"
#include "examples/fsdp/unit.hpp"

namespace mgp {

/// What happened to a unit, for the reader (--debug info) and the tests.
struct UnitEvent {
  std::string what;  ///< "gather", "use", "free", "reduce"
  size_t unit = 0;
};

class UnitRunner {
 public:
  /// `max_inflight`: units that are gathered or being gathered at the same time with ShardStrategy::full; 1 turns
  /// prefetching off. A tied parameter (used twice) belongs in one unit: throws RunError where two units hold the same.
  UnitRunner(std::vector<std::unique_ptr<Unit>> units, ShardStrategy strategy, int64_t max_inflight,
             Communicator& world);
  ~UnitRunner();
  UnitRunner(const UnitRunner&) = delete;
  UnitRunner& operator=(const UnitRunner&) = delete;

  /// `watch` is told when a unit is there to be used ("gather") and when it has been freed ("free"): for --pace.
  void watch(std::function<void(const char* what, const std::string& unit)> watch) { watch_ = std::move(watch); }

  /// Before the first forward of a step: whatever stayed gathered is old since the optimizer's step.
  void begin_step();
  /// Before a forward. Only the last backward of a step reduces; earlier ones leave whole gradients behind.
  void begin_microbatch(bool last);

  /// y = block(x) with the parameters of unit `index` gathered around it. Units are called in order.
  at::Tensor forward(size_t index, const std::function<at::Tensor(const at::Tensor&)>& block, const at::Tensor& x);

  /// After backward. Of the last microbatch: reduces what a hook never reported, then makes the compute stream wait for
  /// all reductions; the gradients of the shards are there.
  void end_microbatch();

  /// Whether backward comes to this unit: it or one before it is trained.
  bool needs_backward(size_t index) const { return index >= first_trained_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const StepTimes& times() const { return times_; }
  /// What happened since begin_step() in one line, for --debug info: "gather embedding, gather layer 0, use embedding, free embedding, ...".
  std::string event_text() const;

 private:
  class Hook;
  struct BeforeBackward;
  struct State {
    bool begun = false;     // gather started
    bool gathered = false;  // and waited for
    bool reduced = false;
    size_t missing = 0;  // gradients still to come in this backward
  };

  void start_gather(size_t index);
  void use(size_t index);
  void free(size_t index);
  void prefetch(int64_t from, int64_t direction);
  void before_backward(size_t index);
  void gradient_ready(size_t unit, size_t parameter);
  void reduce(size_t index);
  int64_t alive() const;

  std::vector<std::unique_ptr<Unit>> units_;
  const ShardStrategy strategy_;
  const int64_t max_inflight_;
  Communicator& world_;
  std::vector<State> states_;
  std::vector<std::vector<bool>> arrived_;
  size_t first_trained_ = 0;  // backward ends there: what lies before is frozen
  bool last_ = true;
  bool in_backward_ = false;
  std::vector<UnitEvent> events_;
  StepTimes times_;
  std::function<void(const char*, const std::string&)> watch_;
};

/// The model's forward with its parts as units: tokens [B, T] -> logits [B, classes].
at::Tensor forward_in_units(ModelImpl& model, UnitRunner& runner, const ModelConfig& config, const at::Tensor& tokens);

/// Calls and payload bytes of one step, from the configuration alone. `gather_bytes`, `reduce_bytes`: of one element in the
/// all-gathers and in the reduce-scatters.
std::vector<CallPrediction> predict_unit_calls(const std::vector<UnitSize>& units, ShardStrategy strategy,
                                               int64_t accumulate, int64_t gather_bytes, int64_t reduce_bytes);

}  // namespace mgp

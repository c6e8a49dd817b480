#include "examples/ddp/naive_reduce.hpp"

#include <fmt/format.h>

#include "common/precision.hpp"

namespace mgp {

void reduce_gradients_one_by_one(const NamedTensors& parameters, Communicator& world, StepTimes& times) {
  times.backward_ended = Moment::record(world.device());
  times.wait_began = times.backward_ended;
  bool first = true;
  for (const auto& [name, parameter] : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);  // unused here, perhaps used on another rank
    gradient = gradient.to(sum_dtype(gradient.scalar_type()));  // --weights low: summed in fp32; else the same tensor
    Work work = world.all_reduce(gradient, ReduceOp::sum, {name});
    work.wait();  // at once: the next all-reduce does not start before this one has ended
    if (first) times.first_call_began = work.began();
    first = false;
    times.last_label = name;
    times.last_bytes = static_cast<int64_t>(gradient.nbytes());
  }
  times.wait_ended = Moment::record(world.device());
}

CallPrediction predict_naive_calls(const ModelConfig& config, int64_t element_bytes) {
  CallPrediction prediction;
  prediction.call = "all_reduce";
  prediction.calls = static_cast<int64_t>(parameter_shapes(config).size());
  prediction.first_step_calls = prediction.calls;
  prediction.payload_bytes = parameter_count(config) * element_bytes;
  prediction.formula = fmt::format("P x {} bytes, one call per parameter, once a step", element_bytes);
  return prediction;
}

}  // namespace mgp

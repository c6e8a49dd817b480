// Data parallel training without the tricks: one all-reduce per parameter, after backward. Kept because the difference to
// gradient_reducer.hpp is the lesson: the sums are the same, the time is not.
#pragma once

#include "common/communicator.hpp"
#include "common/model_config.hpp"
#include "common/named_tensors.hpp"
#include "common/predict.hpp"
#include "common/run.hpp"

namespace mgp {

/// Sums every gradient over the ranks, in place, one call after the other. Nothing is hidden: backward has ended, and each
/// call pays its own latency. A parameter without a gradient takes part with zeros. Fills `times`.
void reduce_gradients_one_by_one(const NamedTensors& parameters, Communicator& world, StepTimes& times);

/// One call per parameter; the bytes of all gradients, without the padding of buckets.
CallPrediction predict_naive_calls(const ModelConfig& config, int64_t element_bytes);

}  // namespace mgp

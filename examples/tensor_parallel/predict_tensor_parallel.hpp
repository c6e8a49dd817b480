// What tensor parallel needs, from the configuration alone: memory of the largest rank, calls and bytes of a step.
#pragma once

#include <vector>

#include "common/predict.hpp"

namespace mgp {

/// Bytes on rank 0, which holds the most where sizes do not divide. Parameters of the layers, their gradients and moments,
/// and the hidden activations go down with the ranks; embedding, head and residual stream are whole on every rank. Where
/// attention runs in the math kernel backward's temporaries are those of all of C: a little too much.
MemoryPrediction predict_tensor_parallel_memory(const Options& options);

/// One all-reduce of [b, T, C] for each f and each g: 2 a layer and backward pass in the MLP model, 4 in the classifier; with
/// --checkpoint-activations each g once more.
std::vector<CallPrediction> predict_tensor_parallel_calls(const Options& options);

}  // namespace mgp

// The one container in which parameters, gradients and optimizer moments travel: names in a fixed order.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

namespace mgp {

/// Tensors with their full names ("encoder.layers.3.linear1.weight"), in the model's registration order.
/// The order is the same on every rank: collectives over a list rely on it.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace mgp

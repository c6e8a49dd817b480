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

/// A copy on the CPU that shares nothing with `tensor`.
inline at::Tensor copy_on_cpu(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU).contiguous().clone(); }

/// The same without waiting: from a GPU into pinned memory, complete once the device has passed this point of the current
/// stream (Moment::record() after it tells).
inline at::Tensor host_copy(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(tensor.is_cuda());
  at::Tensor copy = at::empty(tensor.sizes(), options);
  copy.copy_(tensor.detach(), /*non_blocking=*/true);
  return copy;
}

inline NamedTensors copies_on_cpu(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) copies.emplace_back(name, copy_on_cpu(tensor));
  return copies;
}

}  // namespace mgp

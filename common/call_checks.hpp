// The checks before each call, and how calls are written in messages. Internal to common/.
#pragma once

#include <string>

#include "common/wire.hpp"

namespace mgp {

/// Throws RunError unless both tensors fit the call of rank `rank` in a group of `size`: defined, on `device`, of a
/// type that both wires can reduce, contiguous, of the right sizes, overlapping only where the call allows it; and the
/// peer is a rank.
void check_call(const Call& call, const std::string& group, int rank, int size, at::Device device);

/// "f32[64,3]"
std::string shape_text(const at::Tensor& tensor);

/// "world all_reduce 'bucket 0' f32[262144]"
std::string describe(const Call& call, const std::string& group);

/// What must be equal on all ranks: "all_reduce avg f32 10", without the label.
std::string signature(const Call& call);

}  // namespace mgp

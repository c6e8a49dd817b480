// Activation checkpointing: a block keeps only its input in forward and runs again in backward.
//
// Idea      Backward of a block needs the tensors that its forward made: 16 of [B, T, C] in an encoder layer. Here they
//           are dropped when the block ends and made again when backward comes to it. Of all blocks the inputs stay, 1
//           of [B, T, C] each, and of one block at a time everything. Price: each block's forward runs twice, a third
//           more arithmetic. (Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174.)
// How       One node of the autograd graph stands for the whole block. When backward reaches it, the block runs again
//           with gradients on, and a backward of its own, nested in the outer one, goes through it. That one
//           accumulates the gradients of the block's parameters, so their hooks fire there, once, as without
//           checkpointing.
// Same      The second run must compute what the first did. So it gets the autocast state that the first run had, and
//           dropout draws the same numbers; both are put back afterwards. Gradients are equal bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace mgp {

/// A part of a model: an activation, usually [B, T, C], to the next. It may be called after the function that made it
/// has returned, and a second time, so it owns what it needs (a shared_ptr to a layer) and changes nothing outside.
using Block = std::function<at::Tensor(const at::Tensor&)>;

/// block(x), with a graph that keeps x and nothing else. Without gradients (at::NoGradGuard) just block(x).
///
/// `draws_random_numbers`: whether the block uses the default generator of x's device (dropout > 0). Then the state
/// that it has now is kept beside x for the second run. There is no default: a block whose dropout is forgotten here
/// would get gradients of another function, silently. With false no generator is touched.
///
/// Parameters that the block uses get their gradients through it, whether x itself needs one or not; they are no inputs
/// here (as inputs, their hooks would fire twice). A block whose output is used several times runs again once.
///
/// Under autocast the cache of casts is off in the block. Forward's copies of all weights would stay in it to the end
/// of the scope, and older versions of LibTorch then hand a copy that was made without gradients to uses that need
/// them. A weight that a block uses twice is cast twice.
///
/// Throws RunError while a CUDA graph is captured if the block draws random numbers (the state cannot be read then). In
/// backward: RunError for create_graph, and for gradients of chosen tensors (torch::autograd::grad), which this cannot
/// serve; c10::Error for a second backward without retain_graph, as everywhere in LibTorch (with it, the block runs
/// once more). What the block throws comes through, and leaves autocast and generator as they were.
at::Tensor checkpointed(const Block& block, const at::Tensor& x, bool draws_random_numbers);

}  // namespace mgp

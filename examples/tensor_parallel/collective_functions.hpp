// The two functions that tensor parallel is made of: f and g of Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).
//
// Between them stand a column-parallel and a row-parallel layer, and each rank computes its own part of the hidden
// values. What goes in and what comes out is whole on every rank:
//
//             x [.., C] ── f ──> column-parallel ──> hidden [.., F/n] ──> row-parallel ──> partial [.., C] ── g ──> y [.., C]
//   forward               copy                                                                          all-reduce
//   backward           all-reduce                                                                          copy
//
// Each is the other's transpose: n ranks read x, so its gradient is the sum of n; the sum y is read once, so each of its
// terms has the same gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "common/communicator.hpp"

namespace mgp {

/// f: x as it is; in backward its gradient is summed over the ranks of `tp`. Put it before a column-parallel layer, and use
/// its result there alone: the gradient is summed in place. The gradient travels in the dtype of x. `tp` must live until
/// backward has run. `label` names the calls.
at::Tensor copy_to_ranks(const at::Tensor& x, Communicator& tp, const std::string& label);

/// g: the sum of `partial` over the ranks of `tp`, in place; in backward the gradient goes through as it is. Put it after
/// a row-parallel layer. `partial` must be contiguous and no view.
at::Tensor sum_over_ranks(const at::Tensor& partial, Communicator& tp, const std::string& label);

}  // namespace mgp

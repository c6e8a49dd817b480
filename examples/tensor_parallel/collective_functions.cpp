#include "examples/tensor_parallel/collective_functions.hpp"

#include <torch/csrc/autograd/custom_function.h>

namespace mgp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// f. A Function keeps IValues beside its tensors, and a communicator is none: its address is a number.
class CopyToRanks : public torch::autograd::Function<CopyToRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Communicator* tp, const std::string& label) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    context->saved_data["label"] = label;
    return x;  // [.., C], nothing is copied and nothing is sent
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto* tp = reinterpret_cast<Communicator*>(context->saved_data["tp"].toInt());
    // This rank's part of the hidden values asked for this change of x; the other ranks' parts ask for others.
    const at::Tensor gradient = gradients[0].contiguous();  // [.., C], fresh from the matmul's backward
    tp->all_reduce(gradient, ReduceOp::sum, {context->saved_data["label"].toStringRef() + ", f"}).wait();
    return {gradient, {}, {}};
  }
};

/// g.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial, Communicator* tp,
                            const std::string& label) {
    context->mark_dirty({partial});  // the sum takes the place of its term: [.., C] is not copied
    tp->all_reduce(partial, ReduceOp::sum, {label + ", g"}).wait();
    return partial;  // [.., C], the same bits on every rank
  }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    return {gradients[0], {}, {}};  // [.., C]: whole on every rank already
  }
};

}  // namespace

at::Tensor copy_to_ranks(const at::Tensor& x, Communicator& tp, const std::string& label) {
  return CopyToRanks::apply(x, &tp, label);
}

at::Tensor sum_over_ranks(const at::Tensor& partial, Communicator& tp, const std::string& label) {
  return SumOverRanks::apply(partial, &tp, label);
}

}  // namespace mgp

#include "examples/tensor_parallel/parallel_linear.hpp"

#include "examples/tensor_parallel/collective_functions.hpp"

namespace mgp {

at::Tensor enter_parallel(const at::Tensor& x, const TensorParallel& tp, const std::string& label) {
  return copy_to_ranks(x.to(tp.compute_dtype), *tp.group, label);  // [.., C]
}

ColumnParallelLinear::ColumnParallelLinear(int64_t in, int64_t mine, const at::TensorOptions& options,
                                           const TensorParallel& parallel, std::string name)
    : tp(parallel), label(std::move(name)) {
  weight = register_parameter("weight", at::empty({mine, in}, options));
  bias = register_parameter("bias", at::empty({mine}, options));
}

at::Tensor ColumnParallelLinear::forward(const at::Tensor& x) const {
  return at::linear(enter_parallel(x, tp, label), weight, bias);  // [.., in] -> [.., mine]
}

RowParallelLinear::RowParallelLinear(int64_t mine, int64_t out, const at::TensorOptions& options,
                                     const TensorParallel& parallel, std::string name)
    : tp(parallel), label(std::move(name)) {
  weight = register_parameter("weight", at::empty({out, mine}, options));
  bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor RowParallelLinear::forward(const at::Tensor& h) const {
  const at::Tensor partial = at::linear(h, weight);                  // [.., mine] -> [.., out], a term of the sum
  const at::Tensor sum = sum_over_ranks(partial, *tp.group, label);  // [.., out]
  return sum + bias;  // after the sum: inside of it n ranks would add n biases
}

}  // namespace mgp

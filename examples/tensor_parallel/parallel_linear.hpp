// Linear layers that are cut over ranks. In pairs: the first cuts its outputs, the second its inputs, and in between
// nobody needs what the others have (Shoeybi et al., arXiv 1909.08053, section 3).
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "common/communicator.hpp"

namespace mgp {

/// What the layers of one tensor-parallel group share.
struct TensorParallel {
  Communicator* group = nullptr;              ///< the ranks that hold one model together
  at::ScalarType compute_dtype = at::kFloat;  ///< of the matmuls: what travels has this dtype, under autocast too
};

/// y = x W^T + b, of which this rank computes `mine` of the outputs: rows of W and elements of b. The rows may be any, and
/// their number may differ by rank. Begins with f.
struct ColumnParallelLinear : torch::nn::Module {
  ColumnParallelLinear(int64_t in, int64_t mine, const at::TensorOptions& options, const TensorParallel& tp,
                       std::string label);
  at::Tensor forward(const at::Tensor& x) const;  ///< [.., in] -> [.., mine]
  at::Tensor weight;                              ///< [mine, in]
  at::Tensor bias;                                ///< [mine]
  TensorParallel tp;
  std::string label;  ///< of its all-reduce
};

/// y = h W^T + b, where this rank holds `mine` of the inputs: columns of W, and those elements of h. Ends with g; the bias
/// is whole on every rank and added once, to the sum (trial B38).
struct RowParallelLinear : torch::nn::Module {
  RowParallelLinear(int64_t mine, int64_t out, const at::TensorOptions& options, const TensorParallel& tp,
                    std::string label);
  at::Tensor forward(const at::Tensor& h) const;  ///< [.., mine] -> [.., out]
  at::Tensor weight;                              ///< [out, mine]
  at::Tensor bias;                                ///< [out], the same on every rank
  TensorParallel tp;
  std::string label;
};

/// f on x in the dtype of the matmuls. Under autocast the matmul would cast x anyway, but behind f: its gradient would
/// travel in fp32, twice the bytes.
at::Tensor enter_parallel(const at::Tensor& x, const TensorParallel& tp, const std::string& label);

}  // namespace mgp

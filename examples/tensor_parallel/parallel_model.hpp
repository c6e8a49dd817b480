// The two models with their layers cut over ranks, under the parameter names of the whole ones.
//
//   cut         MLP: rows of the first matrix, columns of the second. Attention: whole heads (the rows of their q, k and v,
//               and the columns of out_proj that read them).
//   replicated  embeddings, norms, head, and the biases that are added to a sum. Every rank computes the same with them.
//
// Sizes need not divide: the first ranks get one column, or one head, more.
#pragma once

#include <vector>

#include "common/model.hpp"
#include "common/shards.hpp"
#include "examples/tensor_parallel/parallel_linear.hpp"

namespace mgp {

/// Throws UsageError if a rank would be left without a head or without a hidden value; names both numbers.
void check_parallel_sizes(const ModelConfig& config, int64_t ranks);

/// What `rank` of `ranks` holds of each parameter, in registration order.
std::vector<Piece> parallel_pieces(const ModelConfig& config, int64_t rank, int64_t ranks);

/// This rank's part of the model of `config` on `device`, with the initial values of the whole model, cut. The tensors have
/// the shapes of their parts. `tp` must outlive the model and its graphs.
Model make_parallel_model(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype,
                          const TensorParallel& tp);

/// `tensors` (one of each piece, in that order) that are parts, or those that every rank holds whole.
NamedTensors parts_of(const std::vector<Piece>& pieces, const NamedTensors& tensors);
NamedTensors replicas_of(const std::vector<Piece>& pieces, const NamedTensors& tensors);

/// The 2-norm over all gradients, [] on the device, the same on every rank: squares of `parts` are summed over the ranks,
/// those of `replicas` are counted once, not once a rank (trial B20).
at::Tensor parallel_gradient_norm(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& replicas,
                                  Communicator& tp);

}  // namespace mgp

// Tensors that are cut over the ranks: which elements a rank holds, and how a whole tensor comes together again.
//
// A piece is a range of a parameter's elements in row-major order. That is enough for both ways of sharding: a range of a
// flat buffer that holds many parameters (FSDP1), and rows of dimension 0 (FSDP2). Tensor parallel also cuts columns, and
// the rows of q, k and v each: there the parameter is equal blocks, and a piece is the same range of each.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/communicator.hpp"
#include "common/model_config.hpp"
#include "common/named_tensors.hpp"

namespace mgp {

/// Elements [first, first + count) of each block of a parameter, count > 0. One block is the whole parameter; a matrix
/// of R rows as R blocks is cut by columns.
struct Piece {
  ParameterShape of;  ///< name and shape of the whole parameter
  int64_t first = 0;
  int64_t count = 0;
  int64_t blocks = 1;  ///< divides the number of elements; the same on all ranks
  int64_t numel() const { return blocks * count; }
  bool is_whole() const { return numel() == of.numel(); }
};

/// Which pieces each rank holds. All calls but cut() and the accessors are collective.
class ShardLayout {
 public:
  /// `parameters`: all of the model in registration order. `mine`: this rank's pieces, at most one of each parameter, in
  /// any order. Together the ranks must hold every element; several ranks may hold the same ones (replicas).
  /// `dtype`: of the tensors that will be gathered, since a rank without a piece cannot tell.
  ShardLayout(const std::vector<ParameterShape>& parameters, std::vector<Piece> mine, at::ScalarType dtype,
              Communicator& world);

  const std::vector<Piece>& mine() const { return mine_; }

  /// Local tensors, one of each piece of mine() in that order, to whole ones in the CPU memory of rank 0, in registration
  /// order; empty elsewhere. One parameter at a time, so that a device never holds more than the largest (trial B32).
  NamedTensors gather(const NamedTensors& local);

  const std::vector<ParameterShape>& parameters() const { return parameters_; }
  /// The same for parameters()[parameter] alone; undefined on ranks other than 0.
  at::Tensor gather_one(size_t parameter, const NamedTensors& local);

  /// This rank's elements of a whole tensor, for mine()[index], flat: [blocks * count].
  at::Tensor cut(size_t index, const at::Tensor& whole) const;

  /// Elements [first, first + count) of each block of a parameter; count 0: none.
  struct Range {
    int64_t first = 0, count = 0;
  };
  /// Blocks of parameters()[parameter], see Piece. Not collective.
  int64_t blocks(size_t parameter) const { return blocks_.at(parameter); }
  /// What each rank holds of parameters()[parameter], by rank. Not collective.
  const std::vector<Range>& ranges(size_t parameter) const { return ranges_.at(parameter); }
  /// Which of mine() is of parameters()[parameter], -1 if none.
  int64_t index_in_mine(size_t parameter) const { return index_of_.at(parameter); }

 private:
  std::vector<ParameterShape> parameters_;
  std::vector<Piece> mine_;
  at::ScalarType dtype_;
  std::vector<int64_t> index_of_;           // parameter -> index into mine_, -1: none
  std::vector<std::vector<Range>> ranges_;  // [parameter][rank]
  std::vector<int64_t> blocks_;             // [parameter]
  Communicator& world_;
};

/// The 2-norm over gradients of which each rank holds its own pieces: sqrt of the sum of squares over all ranks, a 0-dim
/// tensor on the device, the same on every rank (trial B19). Padding must not be among the gradients.
at::Tensor sharded_gradient_norm(const std::vector<at::Tensor>& gradients, Communicator& world);

}  // namespace mgp

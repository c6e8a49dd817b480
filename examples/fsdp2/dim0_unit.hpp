// A unit the FSDP2 way: each parameter is cut by itself, into blocks of rows of dimension 0, as torch.chunk cuts.
//
//   linear1.weight [10, C] on 4 ranks: rows 3, 3, 3, 1     norm1.weight [5]: 2, 2, 1, 0     (the last shards may be empty)
//
// A shard is an ordinary tensor with its parameter's name and fewer rows. The price are two copies a unit: the shards of all
// parameters go into one send buffer (equal blocks, padded), and what the all-gather brings is copied out to where each
// parameter lies. (torch/distributed/fsdp/_fully_shard in PyTorch: copy-in, all-gather, copy-out.)
#pragma once

#include "examples/fsdp/unit.hpp"

namespace mgp {

/// Rows [first, first + count) of dimension 0 that `rank` of `ranks` holds; count may be 0.
struct RowRange {
  int64_t first = 0, count = 0;
};
RowRange row_range(int64_t rows, int64_t rank, int64_t ranks);

class Dim0Unit : public Unit {
 public:
  /// Parameters are cut over `group`. With `replicas` (HSDP, may be null) the same shard lies on one rank of each group, and
  /// gradients are summed over these too, after the reduce-scatter. Dtypes and initial values as in FlatUnit.
  Dim0Unit(UnitParameters parameters, Communicator& group, Communicator* replicas, at::ScalarType master,
           at::ScalarType compute, uint64_t seed);

  void start_gather() override;
  void finish_gather() override;
  void free() override;
  void start_reduce() override;
  void finish_reduce() override;
  std::string layout() const override;
  int64_t gathered_bytes() const override;

  /// Elements of the gathered unit, padding included: each parameter is padded to equal blocks.
  static int64_t padded_numel(const std::vector<ParameterShape>& shapes, int64_t ranks);

 private:
  /// One parameter of the unit. Its whole form has room for equal blocks; the padding lies behind the last row.
  struct Cut {
    at::Tensor whole;    // [n * block], dtype of the computation; its memory comes and goes
    int64_t block = 0;   // elements of one rank's block
    int64_t offset = 0;  // of the block in a rank's part of the buffers; trained parameters come first
    RowRange rows;       // this rank's
    at::Tensor shard;    // [rows, ...], fp32 or fp64; undefined without rows
  };

  Communicator& group_;
  Communicator* replicas_;
  const int64_t ranks_, rank_;
  const at::ScalarType compute_;
  std::vector<Cut> cuts_;
  int64_t length_ = 0;   // S: elements of one rank's part of the buffers, all blocks
  int64_t trained_ = 0;  // R: those of them that have gradients
  at::Tensor received_;  // [n, S]: from start_gather() to finish_gather()
  at::Tensor gradient_;  // [R], fp32 or fp64
  Work gather_, reduce_;
};

}  // namespace mgp

// A unit the FSDP1 way: all its parameters lie one after the other in one flat tensor, which is cut into equal ranges.
//
//   parameters   | norm1.weight | norm1.bias |      in_proj_weight      | ... | linear2.bias | padding |
//   ranks        |        rank 0        |        rank 1        |        rank 2        |    rank 3     |
//
// A cut may fall inside a parameter. That makes the collectives as simple as can be (one tensor, no copies before the
// all-gather, the output is the parameters), and everything else harder: a piece is no tensor with a shape that somebody
// knows, so optimizer state, norms and checkpoints must think in ranges. (Zhao et al., "PyTorch FSDP", arXiv 2304.11277.)
#pragma once

#include "examples/fsdp/unit.hpp"

namespace mgp {

class FlatUnit : public Unit {
 public:
  /// Shards are in `master` (fp32, fp64), gathered parameters in `compute` (bf16 and fp16 with --weights low). The shard's
  /// initial values are made here, and only these. The module's tensors become views of this unit's flat tensor.
  FlatUnit(UnitParameters parameters, Communicator& world, ShardStrategy strategy, at::ScalarType master,
           at::ScalarType compute, uint64_t seed);

  void start_gather() override;
  void finish_gather() override;
  void free() override;
  void start_reduce() override;
  void finish_reduce() override;
  std::string layout() const override;
  int64_t gathered_bytes() const override;

  /// Elements of a rank's range for a unit of `numel` elements: a multiple of 32, so that every range begins at a multiple of
  /// 64 bytes in each dtype.
  static int64_t shard_numel(int64_t numel, int64_t ranks);
  /// Elements of the whole flat tensor of these parameters, padding included.
  static int64_t padded_numel(const std::vector<ParameterShape>& shapes, int64_t ranks);

 private:
  Communicator& world_;
  const bool sharded_;          // false for ShardStrategy::none: this rank holds everything
  const int64_t ranks_, rank_;  // among which the flat tensor is cut, and which of them this one is
  int64_t length_ = 0;          // S: elements of this rank's range
  std::vector<int64_t> first_;  // of each parameter in the flat tensor
  at::Tensor flat_;             // [n * S], dtype of the computation; its memory comes and goes
  at::Tensor shard_;            // [S], fp32 or fp64: this rank's range
  at::Tensor gradient_;         // [S]: its gradient
  Work gather_, reduce_;
};

}  // namespace mgp

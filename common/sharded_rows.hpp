// From pieces to rows: the files of a sharded checkpoint hold whole rows of dimension 0, but a flat buffer (FSDP1) is
// cut anywhere.
#pragma once

#include <array>
#include <vector>

#include "common/communicator.hpp"
#include "common/named_tensors.hpp"
#include "common/shards.hpp"

namespace mgp {

/// The tensors of one kind that a rank holds: one of each piece of ShardLayout::mine(), in that order.
inline constexpr size_t kShardKinds = 3;  ///< masters, exp_avg, exp_avg_sq
using ShardKinds = std::array<const NamedTensors*, kShardKinds>;

/// Whole rows of a parameter: [rows, ...] of each kind, beginning at row `first`.
struct RowBlock {
  size_t parameter = 0;  ///< index into ShardLayout::parameters()
  int64_t first = 0;
  std::array<at::Tensor, kShardKinds> kinds;
};

/// Which elements of each parameter each rank saves, [parameter][rank]: the ranges of `layout` without what several
/// ranks hold, so that they cover each element once. The same on every rank.
std::vector<std::vector<ShardLayout::Range>> ranges_to_save(const ShardLayout& layout);

/// This rank's rows of each parameter of which it has any: the rows whose first element it saves. Views where no row is
/// torn, else CPU tensors. Collective: one all_gather of all fragments of torn rows (less than a row for each
/// parameter, rank and kind), none if no row is torn. `types`: dtype of each kind, the same on all ranks, known to
/// ranks without pieces too.
std::vector<RowBlock> rows_to_save(const ShardLayout& layout, const ShardKinds& local,
                                   const std::array<at::ScalarType, kShardKinds>& types, Communicator& world);

}  // namespace mgp

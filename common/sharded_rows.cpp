#include "common/sharded_rows.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "common/error.hpp"

namespace mgp {
namespace {

using Range = ShardLayout::Range;

/// The first row that begins at or after `element`.
int64_t row_from(int64_t element, int64_t row) { return (element + row - 1) / row; }

/// The elements at the beginning of a range that belong to a row which begins on another rank.
int64_t fragment_length(const Range& range, int64_t row) {
  return std::min(row_from(range.first, row) * row - range.first, range.count);
}

at::Tensor as_bytes(const at::Tensor& flat) { return flat.view(at::kByte); }

/// The fragments of all ranks, in the same order on each: by parameter, then by kind.
class Fragments {
 public:
  Fragments(const ShardLayout& layout, const std::vector<std::vector<Range>>& ranges,
            const std::array<at::ScalarType, kShardKinds>& types, int ranks)
      : places_(ranges.size(), std::vector<int64_t>(static_cast<size_t>(ranks))) {
    std::vector<int64_t> bytes(static_cast<size_t>(ranks));
    int64_t element = 0;
    for (const at::ScalarType type : types) element += static_cast<int64_t>(at::elementSize(type));
    for (size_t p = 0; p < ranges.size(); ++p) {
      const int64_t row = layout.parameters()[p].row_numel();
      for (size_t rank = 0; rank < bytes.size(); ++rank) {
        places_[p][rank] = bytes[rank];
        bytes[rank] += fragment_length(ranges[p][rank], row) * element;
      }
    }
    longest_ = *std::max_element(bytes.begin(), bytes.end());
  }

  bool none() const { return longest_ == 0; }
  int64_t longest() const { return longest_; }
  /// Bytes before the fragment of this parameter in the buffer of that rank.
  int64_t place(size_t parameter, size_t rank) const { return places_[parameter][rank]; }

 private:
  std::vector<std::vector<int64_t>> places_;
  int64_t longest_ = 0;
};

}  // namespace

std::vector<std::vector<Range>> ranges_to_save(const ShardLayout& layout) {
  std::vector<std::vector<Range>> result;
  for (size_t p = 0; p < layout.parameters().size(); ++p) {
    if (layout.blocks(p) != 1) throw RunError("rows of " + layout.parameters()[p].name + ": it is not cut by rows");
    const std::vector<Range>& held = layout.ranges(p);
    std::vector<size_t> order(held.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return held[a].first < held[b].first; });
    result.emplace_back(held.size());
    int64_t covered = 0;
    for (const size_t rank : order) {
      const int64_t end = held[rank].first + held[rank].count;
      if (end <= covered) continue;
      result.back()[rank] = {covered, end - covered};  // ShardLayout has checked that there are no gaps
      covered = end;
    }
  }
  return result;
}

std::vector<RowBlock> rows_to_save(const ShardLayout& layout, const ShardKinds& local,
                                   const std::array<at::ScalarType, kShardKinds>& types, Communicator& world) {
  const at::NoGradGuard no_grad;
  const auto me = static_cast<size_t>(world.rank());
  const std::vector<std::vector<Range>> ranges = ranges_to_save(layout);
  const Fragments fragments(layout, ranges, types, world.size());

  // `count` elements of this rank, from element `first` of the whole parameter on.
  const auto own = [&](size_t kind, size_t p, int64_t first, int64_t count) {
    const auto i = static_cast<size_t>(layout.index_in_mine(p));
    return (*local[kind])[i].second.detach().flatten().narrow(0, first - layout.mine()[i].first, count).contiguous();
  };

  at::Tensor all;  // [ranks, longest] bytes
  if (!fragments.none()) {
    // As bytes, because the kinds need not have the same dtype.
    const at::Tensor mine = at::zeros({fragments.longest()}, at::TensorOptions(at::kByte).device(world.device()));
    for (size_t p = 0; p < ranges.size(); ++p) {
      const Range& range = ranges[p][me];
      const int64_t count = fragment_length(range, layout.parameters()[p].row_numel());
      int64_t place = fragments.place(p, me);
      for (size_t kind = 0; count > 0 && kind < kShardKinds; ++kind) {
        const at::Tensor bytes = as_bytes(own(kind, p, range.first, count));
        mine.narrow(0, place, bytes.numel()).copy_(bytes);
        place += bytes.numel();
      }
    }
    const at::Tensor gathered = at::empty({world.size() * fragments.longest()}, mine.options());
    world.all_gather(gathered, mine, {"torn rows", Purpose::bookkeeping}).wait();
    all = gathered.to(at::kCPU).view({world.size(), fragments.longest()});
  }

  std::vector<RowBlock> blocks;
  for (size_t p = 0; p < ranges.size(); ++p) {
    const ParameterShape& parameter = layout.parameters()[p];
    const int64_t row = parameter.row_numel();
    const Range& range = ranges[p][me];
    const int64_t end = range.first + range.count;
    const int64_t first_row = row_from(range.first, row), rows = row_from(end, row) - first_row;
    if (rows <= 0) continue;
    RowBlock block{p, first_row, {}};
    std::vector<int64_t> shape = parameter.shape;
    shape[0] = rows;
    const int64_t from = first_row * row, to = (first_row + rows) * row;
    for (size_t kind = 0; kind < kShardKinds; ++kind) {
      if (to <= end) {
        block.kinds[kind] = own(kind, p, from, to - from).view(shape);
        continue;
      }
      const at::Tensor whole = at::empty({to - from}, types[kind]);
      whole.narrow(0, 0, end - from).copy_(own(kind, p, from, end - from));
      int64_t bytes_before = 0;  // of a fragment's element in the kinds before this one
      for (size_t k = 0; k < kind; ++k) bytes_before += static_cast<int64_t>(at::elementSize(types[k]));
      for (size_t rank = 0; rank < ranges[p].size(); ++rank) {
        const Range& other = ranges[p][rank];
        const int64_t count = fragment_length(other, row);
        if (rank == me || count == 0 || other.first < end || other.first >= to) continue;
        const at::Tensor place = as_bytes(whole.narrow(0, other.first - from, count));
        place.copy_(
            all[static_cast<int64_t>(rank)].narrow(0, fragments.place(p, rank) + count * bytes_before, place.numel()));
      }
      block.kinds[kind] = whole.view(shape);
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

}  // namespace mgp

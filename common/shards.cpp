#include "common/shards.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "common/error.hpp"
#include "common/optimizer.hpp"

namespace mgp {

ShardLayout::ShardLayout(const std::vector<ParameterShape>& parameters, std::vector<Piece> mine, at::ScalarType dtype,
                         Communicator& world)
    : parameters_(parameters), mine_(std::move(mine)), dtype_(dtype), world_(world) {
  const auto size = static_cast<size_t>(world.size());
  index_of_.assign(parameters_.size(), -1);
  ranges_.assign(parameters_.size(), std::vector<Range>(size));
  blocks_.assign(parameters_.size(), 1);
  std::string text;  // "parameter blocks first count" of each piece
  for (size_t i = 0; i < mine_.size(); ++i) {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                    [&](const ParameterShape& p) { return p.name == mine_[i].of.name; });
    if (found == parameters_.end()) throw RunError(fmt::format("ShardLayout: {} is no parameter", mine_[i].of.name));
    const auto parameter = found - parameters_.begin();
    index_of_[static_cast<size_t>(parameter)] = static_cast<int64_t>(i);
    text += fmt::format("{} {} {} {} ", parameter, mine_[i].blocks, mine_[i].first, mine_[i].count);
  }
  const std::vector<std::string> all = world.gather_text("shard layout", text);
  for (size_t rank = 0; rank < size; ++rank) {
    std::istringstream words(all[rank]);
    size_t parameter = 0;
    int64_t blocks = 1;
    Range range;
    while (words >> parameter >> blocks >> range.first >> range.count) {
      ranges_.at(parameter)[rank] = range;
      blocks_[parameter] = blocks;
    }
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    std::vector<Range> sorted = ranges_[p];
    std::sort(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
    int64_t covered = 0;
    for (const Range& range : sorted) {
      if (range.first <= covered) covered = std::max(covered, range.first + range.count);
    }
    if (covered * blocks_[p] != parameters_[p].numel()) {
      throw RunError(fmt::format("ShardLayout: {} of {} elements of {} are held by a rank", covered * blocks_[p],
                                 parameters_[p].numel(), parameters_[p].name));
    }
  }
}

NamedTensors ShardLayout::gather(const NamedTensors& local) {
  NamedTensors whole;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const at::Tensor tensor = gather_one(p, local);
    if (tensor.defined()) whole.emplace_back(parameters_[p].name, tensor);
  }
  return whole;
}

at::Tensor ShardLayout::gather_one(size_t parameter, const NamedTensors& local) {
  const at::NoGradGuard no_grad;
  const auto me = static_cast<size_t>(world_.rank());
  const std::vector<Range>& ranges = ranges_[parameter];
  const int64_t blocks = blocks_[parameter];
  int64_t longest = 0;
  for (const Range& range : ranges) longest = std::max(longest, blocks * range.count);
  // NCCL and MPI gather equal lengths, so each rank sends as much as the longest piece.
  const auto options = at::TensorOptions().dtype(dtype_).device(world_.device());
  const at::Tensor mine = at::zeros({longest}, options);
  if (index_of_[parameter] >= 0) {
    mine.narrow(0, 0, blocks * ranges[me].count)
        .copy_(local[static_cast<size_t>(index_of_[parameter])].second.detach().flatten());
  }
  const at::Tensor all = at::empty({world_.size() * longest}, options);
  world_.all_gather(all, mine, {parameters_[parameter].name, Purpose::bookkeeping}).wait();
  if (me != 0) return {};
  const at::Tensor on_cpu = all.to(at::kCPU);
  const at::Tensor whole = at::empty({blocks, parameters_[parameter].numel() / blocks}, on_cpu.options());
  for (size_t rank = 0; rank < ranges.size(); ++rank) {
    const Range& range = ranges[rank];
    const at::Tensor piece = on_cpu.narrow(0, static_cast<int64_t>(rank) * longest, blocks * range.count);
    whole.narrow(1, range.first, range.count).copy_(piece.view({blocks, range.count}));
  }
  return whole.view(parameters_[parameter].shape);
}

at::Tensor ShardLayout::cut(size_t index, const at::Tensor& whole) const {
  const Piece& piece = mine_.at(index);
  const at::Tensor blocks = whole.detach().reshape({piece.blocks, piece.of.numel() / piece.blocks});
  return blocks.narrow(1, piece.first, piece.count).flatten();
}

at::Tensor sharded_gradient_norm(const std::vector<at::Tensor>& gradients, Communicator& world) {
  const at::NoGradGuard no_grad;
  // In fp64 on every rank, whatever the gradients are in: a rank without a piece does not know.
  const at::Tensor mine = gradient_norm(gradients);  // [], of this rank's pieces
  at::Tensor squares = mine.to(world.device(), at::kDouble).square();
  world.all_reduce(squares, ReduceOp::sum, {"squared gradient norm", Purpose::bookkeeping}).wait();
  return squares.sqrt().to(gradients.empty() ? at::kDouble : mine.scalar_type());
}

}  // namespace mgp

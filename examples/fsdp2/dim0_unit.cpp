#include "examples/fsdp2/dim0_unit.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "common/model.hpp"

namespace mgp {

namespace {

int64_t block_numel(const ParameterShape& shape, int64_t ranks) {
  return row_range(shape.shape.front(), 0, ranks).count * shape.row_numel();  // rank 0's block is as long as any
}

}  // namespace

RowRange row_range(int64_t rows, int64_t rank, int64_t ranks) {
  const int64_t block = (rows + ranks - 1) / ranks;
  const int64_t first = std::min(rank * block, rows);
  return {first, std::min(block, rows - first)};
}

int64_t Dim0Unit::padded_numel(const std::vector<ParameterShape>& shapes, int64_t ranks) {
  int64_t numel = 0;
  for (const ParameterShape& shape : shapes) numel += ranks * block_numel(shape, ranks);
  return numel;
}

Dim0Unit::Dim0Unit(UnitParameters parameters, Communicator& group, Communicator* replicas, at::ScalarType master,
                   at::ScalarType compute, uint64_t seed)
    : Unit(std::move(parameters)),
      group_(group),
      replicas_(replicas),
      ranks_(group.size()),
      rank_(group.rank()),
      compute_(compute) {
  const at::NoGradGuard no_grad;
  const auto on_device = at::TensorOptions().device(group_.device());
  // What is trained lies in front: frozen parameters travel with the all-gather and not with the reduce-scatter.
  for (size_t p = 0; p < whole_.shapes.size(); ++p) {
    if (whole_.tensors[p].requires_grad()) trained_ += block_numel(whole_.shapes[p], ranks_);
  }
  int64_t next_trained = 0;
  length_ = trained_;
  for (size_t p = 0; p < whole_.shapes.size(); ++p) {
    const ParameterShape& shape = whole_.shapes[p];
    Cut cut;
    cut.block = block_numel(shape, ranks_);
    int64_t& next = whole_.tensors[p].requires_grad() ? next_trained : length_;
    cut.offset = next;
    next += cut.block;
    cut.rows = row_range(shape.shape.front(), rank_, ranks_);
    if (cut.rows.count > 0) {
      std::vector<int64_t> local = shape.shape;
      local.front() = cut.rows.count;
      const int64_t row = shape.row_numel();
      cut.shard = at::empty(local, on_device.dtype(master));  // [rows, ...]
      cut.shard.copy_(initial_value(shape, seed, cut.rows.first * row, cut.rows.count * row).view(local));
      pieces_.push_back({shape, cut.rows.first * row, cut.rows.count * row});
      shards_.emplace_back(shape.name, cut.shard);
    }
    cut.whole = at::empty({ranks_ * cut.block}, on_device.dtype(compute));  // [n * block]
    whole_.tensors[p].set_data(cut.whole.narrow(0, 0, shape.numel()).view(shape.shape));
    resize_memory(cut.whole, 0);
    cuts_.push_back(std::move(cut));
  }
  gradient_ = at::zeros({trained_}, on_device.dtype(master));  // [R]
  for (const Cut& cut : cuts_) {
    if (!cut.shard.defined()) continue;
    if (cut.offset >= trained_) {
      gradients_.emplace_back();
      continue;
    }
    gradients_.push_back(gradient_.narrow(0, cut.offset, cut.shard.numel()).view(cut.shard.sizes()));  // [rows, ...]
  }
}

void Dim0Unit::start_gather() {
  const at::NoGradGuard no_grad;
  for (const Cut& cut : cuts_) {
    resize_memory(cut.whole, cut.whole.numel() * static_cast<int64_t>(cut.whole.element_size()));
  }
  // Copy-in: this rank's blocks one after the other, rounded with --weights low. What pads a block is never looked at.
  const auto options = at::TensorOptions().dtype(compute_).device(group_.device());
  const at::Tensor send = at::empty({length_}, options);  // [S]
  std::vector<at::Tensor> places, shards;
  for (const Cut& cut : cuts_) {
    if (!cut.shard.defined()) continue;
    places.push_back(send.narrow(0, cut.offset, cut.shard.numel()).view(cut.shard.sizes()));
    shards.push_back(cut.shard);
  }
  if (!places.empty()) at::_foreach_copy_(places, shards);
  received_ = at::empty({ranks_, length_}, options);  // [n, S]
  gather_ = group_.all_gather(received_.view({-1}), send, {whole_.name});
}

void Dim0Unit::finish_gather() {
  const at::NoGradGuard no_grad;
  gather_.wait();
  gather_ = Work();
  // Copy-out: the blocks of one parameter from all ranks lie behind each other, and with them its rows in order.
  std::vector<at::Tensor> places, blocks;
  for (const Cut& cut : cuts_) {
    places.push_back(cut.whole.view({ranks_, cut.block}));         // [n, block]
    blocks.push_back(received_.narrow(1, cut.offset, cut.block));  // [n, block]
  }
  at::_foreach_copy_(places, blocks);
  received_ = at::Tensor();
}

void Dim0Unit::free() {
  for (const Cut& cut : cuts_) resize_memory(cut.whole, 0);
}

void Dim0Unit::start_reduce() {
  const at::NoGradGuard no_grad;
  // Zeros, for the padding and for parameters that got no gradient: sums of old memory could be NaN.
  at::Tensor send = at::zeros({ranks_, trained_}, gradient_.options());  // [n, R]
  std::vector<at::Tensor> places, rows;
  for (size_t p = 0; p < cuts_.size(); ++p) {
    at::Tensor& gradient = whole_.tensors[p].mutable_grad();
    if (gradient.defined()) {
      const Cut& cut = cuts_[p];
      const at::Tensor flat = gradient.flatten();                       // [numel]
      const at::Tensor blocks = send.narrow(1, cut.offset, cut.block);  // [n, block]
      const int64_t full = flat.numel() / cut.block;                    // ranks whose block is full
      if (full > 0) {
        places.push_back(blocks.narrow(0, 0, full));
        rows.push_back(flat.narrow(0, 0, full * cut.block).view({full, cut.block}));
      }
      if (const int64_t rest = flat.numel() - full * cut.block; rest > 0) {
        places.push_back(blocks.select(0, full).narrow(0, 0, rest));
        rows.push_back(flat.narrow(0, full * cut.block, rest));
      }
    }
    gradient = at::Tensor();
  }
  if (!places.empty()) at::_foreach_copy_(places, rows);
  reduce_ = group_.reduce_scatter(gradient_, send.view({-1}), ReduceOp::sum, {whole_.name});
}

void Dim0Unit::finish_reduce() {
  reduce_.wait();
  reduce_ = Work();
  // HSDP: the sum over the ranks of my group meets those of the other groups. 1/n of the bytes of a plain all-reduce.
  if (replicas_ != nullptr) replicas_->all_reduce(gradient_, ReduceOp::sum, {whole_.name}).wait();
  hand_out_gradients();
}

int64_t Dim0Unit::gathered_bytes() const { return ranks_ * length_ * static_cast<int64_t>(c10::elementSize(compute_)); }

std::string Dim0Unit::layout() const {
  std::string text =
      fmt::format("{}: {} parameters, each cut by rows over {} ranks\n", whole_.name, cuts_.size(), ranks_);
  for (const ParameterShape& shape : whole_.shapes) {
    std::vector<int64_t> rows;
    for (int64_t rank = 0; rank < ranks_; ++rank) rows.push_back(row_range(shape.shape.front(), rank, ranks_).count);
    text += fmt::format("  {} {}: rows {}\n", shape.name, shape.shape, fmt::join(rows, ", "));
  }
  return text;
}

}  // namespace mgp

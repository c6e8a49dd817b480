#include "examples/fsdp/flat_unit.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "common/model.hpp"

namespace mgp {

int64_t FlatUnit::shard_numel(int64_t numel, int64_t ranks) {
  constexpr int64_t kAlignment = 32;
  const int64_t share = (numel + ranks - 1) / ranks;
  return (share + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t FlatUnit::padded_numel(const std::vector<ParameterShape>& shapes, int64_t ranks) {
  return ranks * shard_numel(parameter_count(shapes), ranks);
}

FlatUnit::FlatUnit(UnitParameters parameters, Communicator& world, ShardStrategy strategy, at::ScalarType master,
                   at::ScalarType compute, uint64_t seed)
    : Unit(std::move(parameters)),
      world_(world),
      sharded_(strategy != ShardStrategy::none),
      ranks_(sharded_ ? world.size() : 1),
      rank_(sharded_ ? world.rank() : 0) {
  const at::NoGradGuard no_grad;
  int64_t numel = 0;
  for (const ParameterShape& shape : whole_.shapes) {
    first_.push_back(numel);
    numel += shape.numel();
  }
  length_ = shard_numel(numel, ranks_);
  const auto on_device = at::TensorOptions().device(world_.device());
  shard_ = at::zeros({length_}, on_device.dtype(master));                     // [S]
  gradient_ = at::zeros({trained() ? length_ : 0}, on_device.dtype(master));  // [S]

  // This rank's pieces: where its range [begin, begin + S) meets the ranges of the parameters.
  const int64_t begin = rank_ * length_;
  for (size_t p = 0; p < whole_.shapes.size(); ++p) {
    const int64_t from = std::max(begin, first_[p]);
    const int64_t to = std::min(begin + length_, first_[p] + whole_.shapes[p].numel());
    if (from >= to) continue;
    pieces_.push_back({whole_.shapes[p], from - first_[p], to - from});
    shards_.emplace_back(whole_.shapes[p].name, shard_.narrow(0, from - begin, to - from));         // [count]
    gradients_.push_back(trained() ? gradient_.narrow(0, from - begin, to - from) : at::Tensor());  // [count]
    shards_.back().second.copy_(initial_value(whole_.shapes[p], seed, pieces_.back().first, pieces_.back().count));
  }

  flat_ = at::empty({ranks_ * length_}, on_device.dtype(compute));  // [n * S]
  for (size_t p = 0; p < whole_.shapes.size(); ++p) {
    whole_.tensors[p].set_data(flat_.narrow(0, first_[p], whole_.shapes[p].numel()).view(whole_.shapes[p].shape));
  }
  resize_memory(flat_, 0);
}

void FlatUnit::start_gather() {
  const at::NoGradGuard no_grad;
  resize_memory(flat_, gathered_bytes());
  const at::Tensor mine = shard_.to(flat_.scalar_type());  // rounded with --weights low; else the shard itself
  if (sharded_) {
    gather_ = world_.all_gather(flat_, mine, {whole_.name});
  } else {
    flat_.copy_(mine);
  }
}

void FlatUnit::finish_gather() {
  gather_.wait();
  gather_ = Work();
}

void FlatUnit::free() { resize_memory(flat_, 0); }

void FlatUnit::start_reduce() {
  const at::NoGradGuard no_grad;
  // The padding is sent too, as zeros: it must not carry NaNs of old memory.
  at::Tensor send = at::empty({ranks_ * length_}, gradient_.options());  // [n * S]
  std::vector<at::Tensor> views, fresh;
  for (size_t p = 0; p < whole_.tensors.size(); ++p) {
    at::Tensor view = send.narrow(0, first_[p], whole_.shapes[p].numel()).view(whole_.shapes[p].shape);
    at::Tensor& gradient = whole_.tensors[p].mutable_grad();
    if (gradient.defined()) {
      views.push_back(view);
      fresh.push_back(gradient);
    } else {
      view.zero_();
    }
    gradient = at::Tensor();
  }
  if (!fresh.empty()) at::_foreach_copy_(views, fresh);  // one kernel for all; low-precision gradients become fp32
  const int64_t used = first_.back() + whole_.shapes.back().numel();
  send.narrow(0, used, send.numel() - used).zero_();
  if (sharded_) {
    reduce_ = world_.reduce_scatter(gradient_, send, ReduceOp::sum, {whole_.name});
  } else {
    gradient_.copy_(send);
    reduce_ = world_.all_reduce(gradient_, ReduceOp::sum, {whole_.name});
  }
}

void FlatUnit::finish_reduce() {
  reduce_.wait();
  reduce_ = Work();
  hand_out_gradients();
}

int64_t FlatUnit::gathered_bytes() const { return ranks_ * length_ * static_cast<int64_t>(flat_.element_size()); }

std::string FlatUnit::layout() const {
  std::string text = fmt::format("{}: flat [{}], {} elements a rank\n", whole_.name, flat_.numel(), length_);
  for (size_t p = 0; p < whole_.shapes.size(); ++p) {
    const int64_t end = first_[p] + whole_.shapes[p].numel();
    text += fmt::format("  [{}, {}) {} {}: ranks {} to {}\n", first_[p], end, whole_.shapes[p].name,
                        whole_.shapes[p].shape, first_[p] / length_, (end - 1) / length_);
  }
  const int64_t used = first_.back() + whole_.shapes.back().numel();
  return text + fmt::format("  [{}, {}) padding\n", used, flat_.numel());
}

}  // namespace mgp

#include "common/optimizer.hpp"

#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "common/model_config.hpp"
#include "common/precision.hpp"

namespace mgp {

bool AdamWOptions::is_frozen(const std::string& name) const {
  return std::any_of(frozen.begin(), frozen.end(), [&](const std::string& start) {
    return name == start || name.starts_with(start + ".");  // layer 1 is not layer 10
  });
}

AdamW::AdamW(const NamedTensors& parameters, const AdamWOptions& options) : AdamW(parameters, parameters, options) {}

namespace {

std::vector<int64_t> dims_of(const NamedTensors& parameters) {
  std::vector<int64_t> dims;
  for (const auto& [name, parameter] : parameters) dims.push_back(parameter.dim());
  return dims;
}

}  // namespace

AdamW::AdamW(const NamedTensors& parameters, const NamedTensors& masters, const AdamWOptions& options)
    : AdamW(parameters, masters, dims_of(parameters), options) {}

AdamW::AdamW(const NamedTensors& pieces, const std::vector<int64_t>& dims, const AdamWOptions& options)
    : AdamW(pieces, pieces, dims, options) {}

AdamW::AdamW(const NamedTensors& parameters, const NamedTensors& masters, const std::vector<int64_t>& dims,
             const AdamWOptions& options)
    : parameters_(parameters),
      masters_(masters),
      has_masters_(!masters.empty() && !masters.front().second.is_same(parameters.front().second)),
      options_(options) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    const at::Tensor& master = masters_[i].second;
    const bool frozen = options.is_frozen(name);
    for (std::vector<at::Tensor>* moments : {&exp_avg_, &exp_avg_sq_}) {
      moments->push_back(frozen ? at::zeros({}, master.options().requires_grad(false)).expand(master.sizes())
                                : at::zeros_like(master));
    }
    // One count for each parameter, on its device: the fused kernel reads it there, so the host never has to know it.
    steps_.push_back(at::zeros({}, parameter.options().dtype(at::kFloat).requires_grad(false)));
    if (frozen) {
      frozen_.parameters.push_back(parameter);
      frozen_.masters.push_back(master);
      continue;
    }
    Group& group = group_of(has_weight_decay(name, dims[i]) ? options.weight_decay : 0.0, master.device());
    group.parameters.push_back(parameter);
    group.masters.push_back(master);
    group.exp_avg.push_back(exp_avg_.back());
    group.exp_avg_sq.push_back(exp_avg_sq_.back());
    group.steps.push_back(steps_.back());
  }
}

AdamW::Group& AdamW::group_of(double weight_decay, at::Device device) {
  for (Group& group : groups_) {
    if (group.weight_decay == weight_decay && group.masters.front().device() == device) return group;
  }
  groups_.push_back({weight_decay, {}, {}, {}, {}, {}});
  return groups_.back();
}

LearningRate::LearningRate(at::Device device, bool on_device) {
  if (on_device) on_device_ = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
}

void LearningRate::set(double value) {
  value_ = value;
  if (on_device_.defined()) on_device_.fill_(value);
}

void AdamW::step(const LearningRate& lr, const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  // The kernel reads a learning rate on the device as fp32. Rounded here too, a step is the same bits either way.
  if (masters_.empty()) return;  // a rank may hold no piece at all
  const bool is_double = masters_.front().second.scalar_type() == at::kDouble;
  const double number = is_double ? lr.value() : static_cast<float>(lr.value());
  for (Group& group : groups_) {
    std::optional<at::Tensor> skip;
    if (found_inf.defined()) skip = found_inf.to(group.masters.front().device());  // the same tensor where it is there
    std::vector<at::Tensor> gradients;
    gradients.reserve(group.parameters.size());
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor& gradient = group.parameters[i].grad();
      gradients.push_back(gradient.defined() ? gradient : at::zeros_like(group.masters[i]));
    }
    at::_foreach_add_(group.steps, 1);  // the kernel reads the count of the step it makes
    const auto adamw = [&](const auto& rate) {
      at::_fused_adamw_(group.masters, gradients, group.exp_avg, group.exp_avg_sq, /*max_exp_avg_sqs=*/{}, group.steps,
                        rate, options_.beta1, options_.beta2, group.weight_decay, options_.eps, /*amsgrad=*/false,
                        /*maximize=*/false, /*grad_scale=*/{}, skip);
    };
    lr.on_device().defined() ? adamw(lr.on_device()) : adamw(number);
    // A skipped step does not count: bias correction would be wrong from then on.
    if (skip) {
      at::_foreach_sub_(group.steps, std::vector<at::Tensor>(group.steps.size(), *skip));
    }
  }
  if (!has_masters_) return;
  for (Group& group : groups_) at::_foreach_copy_(group.parameters, group.masters);
}

void AdamW::publish_masters() {
  if (!has_masters_) return;
  const at::NoGradGuard no_grad;
  for (Group& group : groups_) at::_foreach_copy_(group.parameters, group.masters);
  if (!frozen_.masters.empty()) at::_foreach_copy_(frozen_.parameters, frozen_.masters);
}

void AdamW::zero_grad() {
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
}

namespace {

NamedTensors with_names(const NamedTensors& parameters, const std::vector<at::Tensor>& tensors) {
  NamedTensors named;
  named.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) named.emplace_back(parameters[i].first, tensors[i]);
  return named;
}

}  // namespace

NamedTensors AdamW::exp_avg() const { return with_names(parameters_, exp_avg_); }
NamedTensors AdamW::exp_avg_sq() const { return with_names(parameters_, exp_avg_sq_); }
at::Tensor AdamW::step_count() const {
  for (const Group& group : groups_) return group.steps.front();
  return steps_.empty() ? at::Tensor() : steps_.front();
}
NamedTensors AdamW::steps() const { return with_names(parameters_, steps_); }

double LrSchedule::at(int64_t step) const {
  if (step <= warmup) return lr * static_cast<double>(step) / static_cast<double>(warmup);
  if (kind == Kind::constant) return lr;
  // From 0 just after the warm-up to 1 at `total`, and 1 from there on.
  const double length = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / length);
  constexpr double pi = 3.14159265358979323846;
  return lr * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + std::cos(pi * progress)));
}

namespace {

/// The 2-norm of one CPU tensor, in pieces. LibTorch adds fp32 squares up in a few running sums on the CPU: over the 24
/// million elements of an embedding that loses 1 %. Norms of rows of 1,024 elements lose nothing and cost no more.
void add_norms_of_pieces(const at::Tensor& gradient, at::ScalarType dtype, std::vector<at::Tensor>& norms) {
  constexpr int64_t row = 1024;
  const at::Tensor flat = gradient.flatten();  // [n]
  const int64_t whole = flat.numel() - flat.numel() % row;
  if (whole > 0) norms.push_back(at::linalg_vector_norm(flat.slice(0, 0, whole).view({-1, row}), 2, 1, false, dtype));
  if (whole < flat.numel()) norms.push_back(at::linalg_vector_norm(flat.slice(0, whole), 2, 0, true, dtype));
}

}  // namespace

void widen_gradients(const NamedTensors& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> low, wide;
  int64_t bytes = 0;
  const auto convert = [&] {
    if (!low.empty()) at::_foreach_copy_(wide, low);
    low.clear();
    wide.clear();
    bytes = 0;
  };
  for (const auto& [name, parameter] : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.scalar_type() == sum_dtype(gradient.scalar_type())) continue;
    low.push_back(gradient);
    wide.push_back(at::empty_like(gradient, gradient.options().dtype(sum_dtype(gradient.scalar_type()))));
    gradient = wide.back();
    bytes += static_cast<int64_t>(low.back().nbytes());
    // A few kernels instead of one: both copies of all gradients would stand in memory at the same time otherwise.
    if (bytes > (int64_t{32} << 20)) convert();
  }
  convert();
}

at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) {
  if (gradients.empty()) return at::zeros({}, at::kFloat);
  const at::NoGradGuard no_grad;
  // bf16 gradients are squared and summed in fp32: bf16 has 8 bits, and adding to a sum 256 times larger does nothing.
  const auto dtype = sum_dtype(gradients.front().scalar_type());
  if (gradients.front().is_cpu()) {
    std::vector<at::Tensor> norms;  // of pieces, [k] each
    for (const at::Tensor& gradient : gradients) add_norms_of_pieces(gradient, dtype, norms);
    if (norms.empty()) return at::zeros({}, dtype);
    return at::linalg_vector_norm(at::cat(norms).to(at::kDouble)).to(dtype);  // []
  }
  const std::vector<at::Tensor> norms = at::_foreach_norm(gradients, 2, dtype);  // [] each, in a few kernels for all
  return at::linalg_vector_norm(at::stack(norms));                               // [n] -> []
}

void clip_gradients(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double clip_norm) {
  if (clip_norm <= 0.0 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  // A factor of 1 is multiplied too: asking whether it is 1 would make the host wait for the device.
  const at::Tensor factor = at::clamp_max(clip_norm / (norm + 1e-6), 1.0);  // []
  std::vector<at::Tensor> scaled = gradients;                               // handles of the same tensors, not copies
  at::_foreach_mul_(scaled, factor);
}

std::vector<at::Tensor> gradients_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

}  // namespace mgp

#include "common/loss_scaler.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "common/communicator.hpp"

namespace mgp {

LossScaler::LossScaler(bool enabled, const LossScaleOptions& options, at::Device device)
    : enabled_(enabled), growth_interval_(options.growth_interval) {
  if (!enabled_) return;
  scale_ = at::full({}, options.initial_scale, at::TensorOptions().dtype(at::kFloat).device(device));
  good_steps_ = at::zeros({}, at::TensorOptions().dtype(at::kInt).device(device));
  found_inf_ = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
}

at::Tensor LossScaler::scale(const at::Tensor& loss) const { return enabled_ ? loss * scale_.to(loss.dtype()) : loss; }

void LossScaler::unscale(std::vector<at::Tensor> gradients, Communicator* world) {
  if (!enabled_) return;
  const at::NoGradGuard no_grad;
  found_inf_.zero_();
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);  // [], as GradScaler rounds it
  // One call for each device: the kernel takes tensors of one. A model that is cut has gradients on several, and then the
  // inverse goes there and the flag comes back, as in PyTorch's GradScaler.
  while (!gradients.empty()) {
    const at::Device device = gradients.front().device();
    const auto others = std::stable_partition(gradients.begin(), gradients.end(),
                                              [&](const at::Tensor& gradient) { return gradient.device() == device; });
    std::vector<at::Tensor> here(gradients.begin(), others);
    gradients.erase(gradients.begin(), others);
    at::Tensor found = device == found_inf_.device() ? found_inf_ : at::zeros({}, found_inf_.options().device(device));
    at::_amp_foreach_non_finite_check_and_unscale_(here, found, inverse.to(device));
    if (!found.is_same(found_inf_)) found_inf_.copy_(at::maximum(found_inf_, found.to(found_inf_.device())));
  }
  // The wait is on the device: what follows in this stream sees the maximum, never a value that is still on its way
  // (trial B15).
  if (world != nullptr) world->all_reduce(found_inf_, ReduceOp::max, {"found_inf", Purpose::bookkeeping}).wait();
  numbers_ = at::stack({scale_, found_inf_});
}

void LossScaler::update() {
  if (!enabled_) return;
  const at::NoGradGuard no_grad;
  at::_amp_update_scale_(scale_, good_steps_, found_inf_, /*growth_factor=*/2.0, /*backoff_factor=*/0.5,
                         growth_interval_);
}

double LossScaler::current_scale() const { return enabled_ ? scale_.item<double>() : 1.0; }

int64_t LossScaler::good_steps() const { return enabled_ ? good_steps_.item<int64_t>() : 0; }

void LossScaler::restore(double scale, int64_t good_steps) {
  if (!enabled_) return;
  scale_.fill_(scale);
  good_steps_.fill_(good_steps);
}

}  // namespace mgp

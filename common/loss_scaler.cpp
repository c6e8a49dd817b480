#include "common/loss_scaler.hpp"

#include <ATen/core/grad_mode.h>

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
  if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf_, inverse);
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

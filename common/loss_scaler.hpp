// Dynamic loss scaling for fp16: small gradients survive, steps with an overflow are skipped, the host never waits.
//
// fp16 numbers below 6e-8 are zero, and many gradients are. So the loss is multiplied by a large scale before backward,
// and the gradients are divided by it before anybody looks at them (Micikevicius et al., arXiv 1710.03740, section 3.2).
// If a gradient has become inf or NaN the step is skipped and the scale halved; after many good steps it is doubled.
// The same algorithm and operators as torch.amp.GradScaler, which has no C++ form.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace mgp {

class Communicator;

struct LossScaleOptions {
  double initial_scale = 65536.0;
  int64_t growth_interval = 2000;  ///< good steps in a row after which the scale is doubled
};

/// One scale for all ranks. Order of a step: scale(loss).backward(), exchange, unscale(), norm, clip, optimizer step with
/// found_inf(), update(). Clipping before unscale() would compare scaled gradients with the limit (trial B17).
class LossScaler {
 public:
  /// With `enabled` false every call does nothing, so that the trainer reads the same in all precisions.
  LossScaler(bool enabled, const LossScaleOptions& options, at::Device device);

  bool enabled() const { return enabled_; }

  /// loss * scale, [].
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients by the scale, in place, and notes whether one of their elements was inf or NaN. `world` (may
  /// be null): every rank that holds a piece of the gradients; if one of them overflowed, all skip (trial B14). Call
  /// after the exchange has been waited for.
  void unscale(std::vector<at::Tensor> gradients, Communicator* world);

  /// 1 if the last unscale() met an inf or NaN, else 0: fp32, [], on the device. Undefined when not enabled.
  const at::Tensor& found_inf() const { return found_inf_; }

  /// Halves or doubles the scale. Call once a step, after the optimizer.
  void update();

  /// For the report: [2] = the scale that this step used, and found_inf; a copy on the device, made by unscale().
  /// Undefined when not enabled.
  const at::Tensor& numbers() const { return numbers_; }

  /// For the checkpoint; reading them waits for the device.
  double current_scale() const;
  int64_t good_steps() const;
  void restore(double scale, int64_t good_steps);

 private:
  bool enabled_;
  int64_t growth_interval_;
  at::Tensor scale_;       // fp32, []
  at::Tensor good_steps_;  // int32, []: steps without overflow since the scale last changed
  at::Tensor found_inf_;   // fp32, []
  at::Tensor numbers_;     // fp32, [2]
};

}  // namespace mgp

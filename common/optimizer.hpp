// AdamW in a few kernels for all parameters, learning-rate schedule, and clipping that never stops the host.
#pragma once

#include <string>
#include <vector>

#include "common/named_tensors.hpp"

namespace mgp {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  /// Parameters that are not trained, by name or by the parts that it begins with ("encoder.layers.1"): never stepped, and
  /// without moments.
  std::vector<std::string> frozen = {};
  bool is_frozen(const std::string& name) const;
};

/// The learning rate of a step: a number, or a number on the device. A CUDA graph repeats the launches that it captured with
/// the numbers that they had then; what stands on the device it reads anew in each replay.
class LearningRate {
 public:
  LearningRate(double value) : value_(value) {}  // NOLINT: a plain number is a learning rate
  LearningRate(at::Device device, bool on_device);
  /// The rate of the steps from now on; never waits for the device.
  void set(double value);
  double value() const { return value_; }
  const at::Tensor& on_device() const { return on_device_; }  ///< fp32, []; undefined: the number is all

 private:
  double value_ = 0.0;
  at::Tensor on_device_;
};

/// AdamW (Loshchilov, Hutter, arXiv 1711.05101) over at::_fused_adamw_: one multi-tensor kernel per group and chunk
/// instead of about ten kernels per parameter. Two groups for each device that holds parameters: with weight decay
/// (has_weight_decay) and without. The kernel takes tensors of one device; only a model that is cut has several.
class AdamW {
 public:
  AdamW(const NamedTensors& parameters, const AdamWOptions& options);

  /// With fp32 masters (lower_weights in model.hpp): steps are made on `masters`, and `parameters`, which the model
  /// computes with, get their rounded values after each step. A bf16 weight has 8 bits of mantissa: an update smaller
  /// than 1/256 of it would be lost. Gradients must be in the masters' dtype (widen_gradients, or DDP's buckets).
  AdamW(const NamedTensors& parameters, const NamedTensors& masters, const AdamWOptions& options);

  /// For pieces of parameters: flat ranges have lost the number of dimensions, on which weight decay hangs. `dims`: of each
  /// whole parameter.
  AdamW(const NamedTensors& pieces, const std::vector<int64_t>& dims, const AdamWOptions& options);

  /// One step with learning rate `lr` (rounded to fp32, but not in fp64), from the gradients in `.grad()`. A parameter without a gradient is stepped with
  /// zeros, so that all trainers agree on what an unused parameter means. `found_inf` (LossScaler; may be undefined): if
  /// it holds 1 on the device nothing changes, step counts included, and the host never knows.
  void step(const LearningRate& lr, const at::Tensor& found_inf = {});

  /// Drops all gradients (undefined, not zero): backward then stores fresh ones instead of adding.
  void zero_grad();

  const NamedTensors& parameters() const { return parameters_; }

  /// What is trained, saved and compared: the fp32 masters, or the parameters themselves where there are none.
  const NamedTensors& masters() const { return masters_; }
  /// Rounds the masters into the model's weights; nothing where they are the same tensors.
  void publish_masters();

  /// First and second moments, and step counts (fp32, 0-dim), by parameter name in registration order. Live tensors:
  /// a checkpoint is loaded by copying into them, but for frozen parameters, whose zeros have no memory of their own.
  NamedTensors exp_avg() const;
  NamedTensors exp_avg_sq() const;
  NamedTensors steps() const;
  /// The count of all that are trained; undefined without parameters.
  at::Tensor step_count() const;
  bool is_frozen(const std::string& name) const { return options_.is_frozen(name); }

 private:
  AdamW(const NamedTensors& parameters, const NamedTensors& masters, const std::vector<int64_t>& dims,
        const AdamWOptions& options);
  struct Group {
    double weight_decay;
    std::vector<at::Tensor> parameters, masters, exp_avg, exp_avg_sq, steps;
  };
  Group& group_of(double weight_decay, at::Device device);
  NamedTensors parameters_, masters_;
  bool has_masters_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_, steps_;  // in registration order
  std::vector<Group> groups_;                             // the same tensors, by weight decay
  Group frozen_{};                                        // parameters and masters alone
  AdamWOptions options_;
};

/// Learning rate of a step (counted from 1): linear warm-up over `warmup` steps, then constant, or a cosine that falls
/// to `min_ratio` x lr at step `total`.
struct LrSchedule {
  enum class Kind { constant, cosine };
  Kind kind = Kind::constant;
  double lr = 1e-3;
  int64_t warmup = 0;
  int64_t total = 0;
  double min_ratio = 0.1;
  double at(int64_t step) const;
};

/// The 2-norm over all gradients, a 0-dim tensor on their device: sqrt of the sum of squares, in fp32 (fp64 in fp64).
at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients);

/// Scales the gradients in place by min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does; the
/// factor stays on the device, so the host never waits. clip_norm <= 0 leaves them alone.
void clip_gradients(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double clip_norm);

/// --weights low: replaces bf16 and fp16 gradients by fp32 ones. Sums over microbatches, unscaling (fp16 would lose what the
/// loss scale saved), norm and optimizer work in fp32 then. Does nothing for fp32 and fp64. Call after each backward.
void widen_gradients(const NamedTensors& parameters);

/// The defined gradients of `parameters`, in order.
std::vector<at::Tensor> gradients_of(const NamedTensors& parameters);

}  // namespace mgp

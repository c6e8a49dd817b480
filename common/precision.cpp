#include "common/precision.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <cstdlib>

#include "common/error.hpp"

namespace mgp {

Precision parse_precision(const std::string& text) {
  if (text == "fp32") return Precision::fp32;
  if (text == "tf32") return Precision::tf32;
  if (text == "bf16") return Precision::bf16;
  if (text == "fp64") return Precision::fp64;
  throw UsageError("--precision '" + text + "' is unknown: use fp32, tf32, bf16 or fp64");
}

std::string to_string(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return "fp32";
    case Precision::tf32:
      return "tf32";
    case Precision::bf16:
      return "bf16";
    case Precision::fp64:
      return "fp64";
  }
  return "unknown";
}

at::ScalarType storage_dtype(Precision precision) {
  // bf16 keeps fp32 weights: an AdamW update is far smaller than the spacing of bf16 numbers around a weight.
  return precision == Precision::fp64 ? at::kDouble : at::kFloat;
}

void apply_precision(Precision precision) {
  // LibTorch's own default lets cuDNN use TF32 and keeps cuBLAS from it. Here fp32 means fp32 in both.
  const bool allow = precision == Precision::tf32;
  at::globalContext().setAllowTF32CuBLAS(allow);
  at::globalContext().setAllowTF32CuDNN(allow);
}

void apply_deterministic(at::DeviceType device_type) {
  // cuBLAS picks split-K sums by the workspace that a stream happens to have; a fixed one makes the choice repeatable.
  // NCCL picks ring or tree by size and topology, and each sums in another order.
  constexpr int keep_what_is_set = 0;
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", keep_what_is_set);
  setenv("NCCL_ALGO", "Ring", keep_what_is_set);
  setenv("NCCL_PROTO", "Simple", keep_what_is_set);

  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
  if (device_type != at::kCUDA) return;  // attention on the CPU sums in a fixed order already
  // The backward of the fused attention kernels adds with atomics, in whatever order the blocks finish.
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  context.setSDPUseMath(true);
}

Autocast::Autocast(at::Device device, Precision precision)
    : device_type_(device.type()), active_(precision == Precision::bf16) {
  if (!active_) return;
  enabled_before_ = at::autocast::is_autocast_enabled(device_type_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_type_);
  at::autocast::set_autocast_dtype(device_type_, at::kBFloat16);
  at::autocast::set_autocast_enabled(device_type_, true);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (!active_) return;
  // The bf16 copies of the weights are kept while a scope is open, so that a weight used twice is cast once. They must
  // go before the optimizer changes the weights (trial B92).
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
}

}  // namespace mgp

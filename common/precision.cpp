#include "common/precision.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include <cstdlib>

#include "common/error.hpp"

#if MGP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#endif

namespace mgp {

Precision parse_precision(const std::string& text) {
  if (text == "fp32") return Precision::fp32;
  if (text == "tf32") return Precision::tf32;
  if (text == "bf16") return Precision::bf16;
  if (text == "fp16") return Precision::fp16;
  if (text == "fp64") return Precision::fp64;
  throw UsageError("--precision '" + text + "' is unknown: use fp32, tf32, bf16, fp16 or fp64");
}

std::string to_string(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return "fp32";
    case Precision::tf32:
      return "tf32";
    case Precision::bf16:
      return "bf16";
    case Precision::fp16:
      return "fp16";
    case Precision::fp64:
      return "fp64";
  }
  return "unknown";
}

bool uses_autocast(Precision precision) { return precision == Precision::bf16 || precision == Precision::fp16; }

at::ScalarType compute_dtype(Precision precision) {
  if (precision == Precision::bf16) return at::kBFloat16;
  return precision == Precision::fp16 ? at::kHalf : storage_dtype(precision);
}

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

at::ScalarType storage_dtype(Precision precision) {
  // bf16 and fp16 keep fp32 weights: an AdamW update is far smaller than the spacing of bf16 numbers around a weight.
  return precision == Precision::fp64 ? at::kDouble : at::kFloat;
}

std::string why_not(Precision precision, [[maybe_unused]] at::Device device) {
  const bool tensor_cores = precision == Precision::tf32 || precision == Precision::fp16;
  if (!device.is_cuda()) return tensor_cores ? to_string(precision) + " needs a GPU with tensor cores" : "";
#if MGP_WITH_CUDA
  if (precision == Precision::tf32 || precision == Precision::bf16) {
    int major = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()));
    if (major < 8) {
      return fmt::format("{} needs compute capability 8.0, this GPU has {}.x", to_string(precision), major);
    }
  }
#endif
  return "";
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
    : device_type_(device.type()), active_(uses_autocast(precision)) {
  if (!active_) return;
  enabled_before_ = at::autocast::is_autocast_enabled(device_type_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_type_);
  at::autocast::set_autocast_dtype(device_type_, compute_dtype(precision));
  at::autocast::set_autocast_enabled(device_type_, true);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (!active_) return;
  // The low-precision copies of the weights are kept while a scope is open, so that a weight used twice is cast once. They must
  // go before the optimizer changes the weights (trial B92).
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
}

}  // namespace mgp

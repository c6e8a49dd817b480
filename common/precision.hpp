// Arithmetic of a run: what --precision means for matmuls, autocast and stored weights.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace mgp {

enum class Precision {
  fp32,  ///< true fp32 everywhere
  tf32,  ///< fp32 storage, matmuls rounded to 10-bit mantissas on the tensor cores (CUDA only)
  bf16,  ///< fp32 weights, matmuls and attention in bf16 under autocast
  fp16,  ///< the same in fp16, with a loss scale because small gradients would become zero (CUDA only)
  fp64   ///< exists to prove equality
};

Precision parse_precision(const std::string& text);  ///< throws UsageError
std::string to_string(Precision precision);

/// Whether matmuls and attention run under autocast, in another dtype than the weights are stored in.
bool uses_autocast(Precision precision);

/// dtype of matmuls and attention.
at::ScalarType compute_dtype(Precision precision);

/// dtype in which sums over many numbers of `dtype` are taken: fp32 for bf16 and fp16, else the same.
at::ScalarType sum_dtype(at::ScalarType dtype);

/// dtype in which parameters (with --weights low: their masters), gradients and moments are stored.
at::ScalarType storage_dtype(Precision precision);

/// Why `device` cannot compute in `precision`: one sentence, empty if it can. tf32 and bf16 need compute capability 8.0;
/// fp16 needs a GPU, because LibTorch's fp16 on CPUs is an emulation on most of them.
std::string why_not(Precision precision, at::Device device);

/// Sets the process-wide switches: TF32 on or off for cuBLAS and cuDNN. Call once, before the model is made.
void apply_precision(Precision precision);

/// Deterministic algorithms, cuBLAS workspace pinned (CUBLAS_WORKSPACE_CONFIG), NCCL algorithm pinned (NCCL_ALGO=Ring,
/// NCCL_PROTO=Simple unless set), and for CUDA attention by the math kernel (the fused ones add with atomics in
/// backward). Must run before CUDA and NCCL start.
void apply_deterministic(at::DeviceType device_type = at::kCUDA);

/// Autocast for one scope, as `with torch.autocast(...)` in Python. LibTorch has the switches but no guard; they are
/// thread-local, and weights that were cast stay cached until the outermost scope ends. Does nothing unless bf16 or fp16.
class Autocast {
 public:
  Autocast(at::Device device, Precision precision);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_type_;
  bool active_;
  bool enabled_before_ = false;
  at::ScalarType dtype_before_ = at::kFloat;
};

}  // namespace mgp

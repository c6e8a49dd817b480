// Small pieces of the NCCL wire: types, stream fences, and what the watchdog's thread must set up. Internal to common/;
// include where MGP_WITH_CUDA and MGP_WITH_NCCL are 1.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "common/communicator.hpp"

namespace mgp {

inline ncclDataType_t nccl_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ncclFloat64;
    case at::kFloat:
      return ncclFloat32;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kLong:
      return ncclInt64;
    case at::kInt:
      return ncclInt32;
    default:
      return ncclUint8;  // the communicator lets nothing else through
  }
}

inline ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return ncclSum;
    case ReduceOp::avg:
      return ncclAvg;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::min:
      return ncclMin;
  }
  return ncclSum;
}

/// An event that orders two streams; no times, so it is cheap. Inside a graph capture it becomes an edge of the graph.
class StreamFence {
 public:
  StreamFence() { C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~StreamFence() { (void)cudaEventDestroy(event_); }
  StreamFence(const StreamFence&) = delete;
  StreamFence& operator=(const StreamFence&) = delete;
  void record(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void block(cudaStream_t stream) { C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

/// The watchdog's thread asks about events. It must do so on this rank's device (another one would get a context of
/// some 500 MB), and without disturbing a graph capture on another thread, which by default forbids such questions
/// everywhere.
inline void enter_watching_thread(at::Device device) {
  thread_local bool entered = false;
  if (entered) return;
  entered = true;
  C10_CUDA_CHECK(cudaSetDevice(device.index()));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace mgp

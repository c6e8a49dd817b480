#include "common/timing.hpp"

#include "common/error.hpp"

#if MGP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace mgp {

#if MGP_WITH_CUDA

struct Moment::CudaEvent {
  explicit CudaEvent(c10::DeviceIndex index) : device(index) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault));  // default: with timing
  }
  ~CudaEvent() {
    // A node of a CUDA graph records this event at each replay, and nobody tells us when that graph is gone. Destroyed
    // under a graph, it crashes the driver; kept, it costs a few bytes for each capture.
    if (in_graph) return;
    // The driver may already be gone when a static object holds a Moment: nothing useful to do with an error here.
    (void)cudaEventDestroy(event);
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  c10::DeviceIndex device;
  cudaEvent_t event = nullptr;
  bool in_graph = false;
};

Moment Moment::record(c10::Device device) {
  Moment moment;
  moment.valid_ = true;
  if (!device.is_cuda()) {
    moment.host_ = std::chrono::steady_clock::now();
    return moment;
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  moment.event_ = std::make_shared<CudaEvent>(stream.device_index());
  const c10::cuda::CUDAGuard guard(stream.device_index());
  // Inside a CUDA graph the mark becomes a node that every replay records again ("external"). A plain record would make
  // an event that exists only while the graph is being captured and cannot be asked for its time.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream.stream(), &capture));
  moment.event_->in_graph = capture != cudaStreamCaptureStatusNone;
  const unsigned flags = moment.event_->in_graph ? cudaEventRecordExternal : cudaEventRecordDefault;
  C10_CUDA_CHECK(cudaEventRecordWithFlags(moment.event_->event, stream.stream(), flags));
  return moment;
}

bool Moment::captured() const { return event_ && event_->in_graph; }

bool Moment::passed() const {
  if (!event_) return valid_;
  const cudaError_t status = cudaEventQuery(event_->event);
  if (status == cudaSuccess) return true;
  (void)cudaGetLastError();  // "not ready" is an answer, not an error that the next check should find
  if (status != cudaErrorNotReady) C10_CUDA_CHECK(status);
  return false;
}

void Moment::synchronize() const {
  if (event_) C10_CUDA_CHECK(cudaEventSynchronize(event_->event));
}

double Moment::milliseconds(const Moment& earlier, const Moment& later) {
  if (!earlier.valid_ || !later.valid_) throw RunError("Moment::milliseconds: a moment was never recorded");
  if (static_cast<bool>(earlier.event_) != static_cast<bool>(later.event_)) {
    throw RunError("Moment::milliseconds: one moment is of a GPU stream, the other of the host clock");
  }
  if (!earlier.event_) return std::chrono::duration<double, std::milli>(later.host_ - earlier.host_).count();
  earlier.synchronize();
  later.synchronize();
  const c10::cuda::CUDAGuard guard(earlier.event_->device);
  float elapsed = 0.0F;
  C10_CUDA_CHECK(cudaEventElapsedTime(&elapsed, earlier.event_->event, later.event_->event));
  return elapsed;
}

#else  // without CUDA only the host clock is left

struct Moment::CudaEvent {};

Moment Moment::record(c10::Device) {
  Moment moment;
  moment.valid_ = true;
  moment.host_ = std::chrono::steady_clock::now();
  return moment;
}

bool Moment::captured() const { return false; }

bool Moment::passed() const { return valid_; }

void Moment::synchronize() const {}

double Moment::milliseconds(const Moment& earlier, const Moment& later) {
  if (!earlier.valid_ || !later.valid_) throw RunError("Moment::milliseconds: a moment was never recorded");
  return std::chrono::duration<double, std::milli>(later.host_ - earlier.host_).count();
}

#endif

}  // namespace mgp

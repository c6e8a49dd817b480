#include "examples/data_parallel/replica_exchange.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "common/device.hpp"
#include "common/error.hpp"
#include "examples/data_parallel/replica_options.hpp"

#if MGP_WITH_CUDA && MGP_WITH_NCCL
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/nccl_support.hpp"
#endif

namespace mgp {

#if MGP_WITH_CUDA && MGP_WITH_NCCL
namespace {
void check(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  throw RunError(
      fmt::format("{} over the replicas: NCCL: {} ({})", what, ncclGetErrorString(result), ncclGetLastError(nullptr)));
}
}  // namespace

struct ReplicaExchange::Communicators {
  std::vector<at::Device> devices;
  std::vector<ncclComm_t> comms;

  explicit Communicators(const std::vector<at::Device>& where) : devices(where), comms(where.size(), nullptr) {
    std::vector<int> indexes;
    for (const at::Device device : where) indexes.push_back(device.index());
    const c10::cuda::CUDAGuard back_afterwards(devices.front());  // NCCL sets each device in turn
    check(ncclCommInitAll(comms.data(), static_cast<int>(comms.size()), indexes.data()), "ncclCommInitAll");
  }
  ~Communicators() {
    for (ncclComm_t comm : comms) (void)ncclCommDestroy(comm);
  }

  /// call(i) for each device inside one group. On the current stream of each, behind the kernels that made the tensors.
  template <class Call>
  void group(const char* what, const Call& call) {
    check(ncclGroupStart(), what);
    ncclResult_t worst = ncclSuccess;
    for (size_t i = 0; i < devices.size(); ++i) {
      const c10::cuda::CUDAGuard guard(devices[i]);
      const ncclResult_t result = call(i, c10::cuda::getCurrentCUDAStream(devices[i].index()).stream());
      if (result != ncclSuccess) worst = result;
    }
    const ncclResult_t ended = ncclGroupEnd();  // also after a failure: the group must not stay open
    check(worst, what);
    check(ended, what);
  }
};
#else
struct ReplicaExchange::Communicators {};
#endif

ReplicaExchange::ReplicaExchange([[maybe_unused]] const std::vector<at::Device>& devices) {
#if MGP_WITH_CUDA && MGP_WITH_NCCL
  if (!on_distinct_gpus(devices)) return;
  check_nccl_version();
  communicators_ = std::make_unique<Communicators>(devices);
#endif
}

ReplicaExchange::~ReplicaExchange() = default;

void ReplicaExchange::refresh(const std::vector<NamedTensors>& replicas) {
  const at::NoGradGuard no_grad;
  for (size_t r = 1; r < replicas.size(); ++r) {
    for (size_t p = 0; p < replicas[r].size(); ++p) {
      const at::Tensor& source = replicas[0][p].second;
      if (!by_nccl()) replicas[r][p].second.copy_(source);  // between devices both streams wait, the host does not
      ++copies_;
      bytes_ += static_cast<int64_t>(source.nbytes());
    }
  }
#if MGP_WITH_CUDA && MGP_WITH_NCCL
  if (!by_nccl()) return;
  Communicators& nccl = *communicators_;
  nccl.group("broadcast", [&](size_t r, cudaStream_t stream) {
    ncclResult_t worst = ncclSuccess;
    for (const auto& [name, weight] : replicas[r]) {  // in place: the first device's values into everybody's
      const ncclResult_t result =
          ncclBroadcast(weight.data_ptr(), weight.data_ptr(), static_cast<size_t>(weight.numel()),
                        nccl_type(weight.scalar_type()), /*root=*/0, nccl.comms[r], stream);
      if (result != ncclSuccess) worst = result;
    }
    return worst;
  });
#endif
}

void ReplicaExchange::reduce(const std::vector<NamedTensors>& replicas) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> gradients(replicas.size());  // [replica][trained parameter]
  for (size_t p = 0; p < replicas[0].size(); ++p) {
    if (!replicas[0][p].second.requires_grad()) continue;
    // The first replica has rows whenever anybody has, so its dtype is right for all (--weights low widens it).
    const at::Tensor& first = replicas[0][p].second.grad();
    const at::ScalarType dtype = first.defined() ? first.scalar_type() : replicas[0][p].second.scalar_type();
    for (size_t r = 0; r < replicas.size(); ++r) {
      at::Tensor parameter = replicas[r][p].second;
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter, parameter.options().dtype(dtype));
      gradient = gradient.contiguous();  // it is already; NCCL sees addresses, not strides
      gradients[r].push_back(gradient);
    }
  }
  for (size_t r = 1; r < replicas.size(); ++r) {
    for (size_t p = 0; p < gradients[r].size(); ++p) {
      const at::Tensor& mine = gradients[r][p];
      // The loss of each replica was divided by the rows of the WHOLE batch: so a plain sum, and no mean.
      if (!by_nccl()) gradients[0][p].add_(mine.to(gradients[0][p].device()));
      ++copies_;
      bytes_ += static_cast<int64_t>(mine.nbytes());
    }
  }
#if MGP_WITH_CUDA && MGP_WITH_NCCL
  if (by_nccl()) {
    Communicators& nccl = *communicators_;
    nccl.group("reduce", [&](size_t r, cudaStream_t stream) {
      ncclResult_t worst = ncclSuccess;
      for (const at::Tensor& gradient : gradients[r]) {
        const ncclResult_t result =
            ncclReduce(gradient.data_ptr(), gradient.data_ptr(), static_cast<size_t>(gradient.numel()),
                       nccl_type(gradient.scalar_type()), ncclSum, /*root=*/0, nccl.comms[r], stream);
        if (result != ncclSuccess) worst = result;
      }
      return worst;
    });
  }
#endif
  // The others need theirs no more. NCCL runs on the stream that the memory belongs to: whoever gets it next comes later.
  for (size_t r = 1; r < replicas.size(); ++r) {
    for (const auto& [name, parameter] : replicas[r]) at::Tensor(parameter).mutable_grad() = at::Tensor();
  }
}

}  // namespace mgp

// Weights from the first replica to all, gradients from all to the first.
//
// On two or more GPUs, each with one replica, NCCL does both: a communicator for each device, all of them driven by this
// one thread, and so every exchange is one group call (without the group the first call would wait for partners that the
// same thread has yet to call). NCCL refuses to have one GPU twice, and knows no CPUs: there the tensors are copied and
// added one by one.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "common/named_tensors.hpp"

namespace mgp {

class ReplicaExchange {
 public:
  /// Makes the communicators where NCCL serves (a build without it copies between GPUs too). Throws RunError if NCCL
  /// fails.
  explicit ReplicaExchange(const std::vector<at::Device>& devices);
  ~ReplicaExchange();
  ReplicaExchange(const ReplicaExchange&) = delete;
  ReplicaExchange& operator=(const ReplicaExchange&) = delete;

  /// The weights of replicas[0] into those of all others. Replicas hold the same parameters in the same order.
  void refresh(const std::vector<NamedTensors>& replicas);

  /// The gradients of replicas[0] become the SUM over all; those of the others are dropped. A replica without rows has
  /// none and counts as zeros. Frozen parameters are left out.
  void reduce(const std::vector<NamedTensors>& replicas);

  bool by_nccl() const { return communicators_ != nullptr; }
  int64_t copies() const { return copies_; }  ///< tensors that went from one replica to another, so far
  int64_t bytes() const { return bytes_; }

 private:
  struct Communicators;  // hides NCCL's headers from the readers of this one
  std::unique_ptr<Communicators> communicators_;
  int64_t copies_ = 0, bytes_ = 0;
};

}  // namespace mgp

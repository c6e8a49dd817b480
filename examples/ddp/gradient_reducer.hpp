// The heart of data parallel training: gradients are averaged in buckets while backward is still running.
//
// One all-reduce per parameter would pay the latency of a collective 150 times; one all-reduce over everything could not
// start before backward ended. Buckets of some 25 MB are the middle: as soon as the last gradient of a bucket is there,
// its all-reduce starts on the communication stream, and backward goes on with the layers below (Li et al., VLDB 2020).
//
// The life of a bucket in one step:
//   backward writes fresh gradients -> the hook of each parameter counts down -> at zero ONE copy kernel moves them into the
//   flat buffer, `.grad` becomes a view of it, and the all-reduce starts -> wait() before clipping.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/communicator.hpp"
#include "common/model_config.hpp"
#include "common/named_tensors.hpp"
#include "common/precision.hpp"
#include "common/predict.hpp"
#include "common/run.hpp"

namespace mgp {

/// PyTorch's DDP starts with a first bucket of 1 MiB, so that the wire is busy early.
inline constexpr int64_t kFirstBucketBytes = 1 << 20;

/// Cuts parameters (their sizes in bytes, in the order in which gradients come) into buckets: the first is closed when it
/// has reached `first_bytes`, the others at `bucket_bytes`. A larger parameter has a bucket to itself and what was open.
/// Returns the indices into `bytes`, bucket by bucket.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<int64_t>& bytes, int64_t first_bytes,
                                                int64_t bucket_bytes);

/// all_reduce calls and bytes of one step, from the sizes of the model alone. Step 1 uses the order of registration
/// turned round, later steps the order in which gradients came, which differs under autocast (Options::autocast()).
CallPrediction predict_gradient_calls(const ModelConfig& config, Precision autocast, double bucket_mb);

class GradientReducer {
 public:
  /// Installs a hook on every parameter. `order`: parameter names in the order in which gradients come, from a checkpoint;
  /// empty before the first step of a fresh run. The memory of the buckets is allocated here once: when the observed order
  /// replaces the first guess after step 1, the same memory is cut anew.
  GradientReducer(const NamedTensors& parameters, Communicator& world, double bucket_mb,
                  const std::vector<std::string>& order = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Begins a step: the buckets are empty again. The gradients must have been dropped before (AdamW::zero_grad).
  void begin_step();

  /// Begins one backward pass. Only the last of a step may send; earlier ones add into the same buckets.
  void begin_backward(bool last);

  /// After backward of the last microbatch: reduces what a hook never reported (unused parameters, as zeros), then makes
  /// the compute stream wait for all buckets. What this wait takes is the exposed communication.
  void wait();

  /// Parameter names in the order in which gradients came (for the checkpoint); the same on all ranks.
  std::vector<std::string> order() const;

  const StepTimes& times() const { return times_; }
  size_t bucket_count() const { return buckets_.size(); }

 private:
  struct Bucket {
    std::vector<size_t> parameters;  // indices, in the order of the flat buffer
    at::Tensor flat;                 // [sum of numels, padding included]: a slice of storage_
    std::vector<at::Tensor> views;   // one per parameter, of its shape
    size_t missing = 0;              // gradients still to come in this backward
    bool filled = false;             // `.grad` of its parameters are the views
    Work work;
  };
  class Hook;

  void make_buckets();
  void gradient_ready(size_t parameter);
  void fill(Bucket& bucket);
  void send_full_buckets();
  void agree_on_order();

  NamedTensors parameters_;
  Communicator& world_;
  int64_t bucket_bytes_;
  at::Tensor storage_;  // [P + padding]: all buckets, one after the other
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // parameter -> bucket
  std::vector<size_t> arrival_;    // parameters in the order in which their gradients came in this backward
  std::vector<bool> arrived_;
  size_t next_to_send_ = 0;  // buckets go out strictly in order: the same order on every rank
  bool last_backward_ = true;
  std::vector<size_t> order_;  // in which the buckets are cut: a guess in step 1, then what was observed
  bool order_is_observed_ = false;
  bool cut_anew_ = false;  // the observed order is known, the buckets still follow the guess
  StepTimes times_;
};

}  // namespace mgp

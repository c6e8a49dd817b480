#include "examples/ddp/gradient_reducer.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "common/error.hpp"

namespace mgp {
namespace {

int64_t bucket_limit(double bucket_mb) { return static_cast<int64_t>(bucket_mb * 1024.0 * 1024.0); }

/// Each gradient starts on a 128-byte line of its bucket. Without that the 10 values of head.bias would shift all gradients
/// behind them, and the kernels over many tensors (copy, norm, clip, AdamW) read 16 bytes at once only where addresses
/// allow it. What is left over stays zero and takes part in the sums: at most 127 bytes a parameter.
int64_t slot_bytes(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/// Bytes of a parameter's slot. bf16 and fp16 gradients are summed in fp32, so they stand in the bucket as fp32.
int64_t slot_of(const at::Tensor& parameter) {
  return slot_bytes(parameter.numel() * static_cast<int64_t>(c10::elementSize(sum_dtype(parameter.scalar_type()))));
}

std::vector<int64_t> slots_in_order(const NamedTensors& parameters, const std::vector<size_t>& order) {
  std::vector<int64_t> bytes;
  for (const size_t index : order) bytes.push_back(slot_of(parameters[index].second));
  return bytes;
}

std::vector<size_t> reversed_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace

std::vector<std::vector<size_t>> assign_buckets(const std::vector<int64_t>& bytes, int64_t first_bytes,
                                                int64_t bucket_bytes) {
  std::vector<std::vector<size_t>> buckets;
  int64_t open_bytes = 0;
  bool open = false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!open) {
      buckets.emplace_back();
      open = true;
      open_bytes = 0;
    }
    buckets.back().push_back(i);
    open_bytes += bytes[i];
    const int64_t limit = buckets.size() == 1 ? first_bytes : bucket_bytes;
    if (open_bytes >= limit) open = false;
  }
  return buckets;
}

CallPrediction predict_gradient_calls(const ModelConfig& config, Precision autocast, double bucket_mb) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(storage_dtype(autocast)));
  const std::vector<ParameterShape> shapes = parameter_shapes(config);
  std::unordered_map<std::string, int64_t> bytes_of;
  std::vector<int64_t> registration, arrival;
  for (const ParameterShape& shape : shapes) {
    bytes_of[shape.name] = slot_bytes(shape.numel() * element_bytes);
    registration.push_back(bytes_of[shape.name]);
  }
  std::reverse(registration.begin(), registration.end());
  for (const std::string& name : gradient_arrival_order(config, uses_autocast(autocast))) {
    arrival.push_back(bytes_of.at(name));
  }

  const int64_t limit = bucket_limit(bucket_mb);
  const int64_t first = std::min(kFirstBucketBytes, limit);
  CallPrediction prediction;
  prediction.call = "all_reduce";
  prediction.first_step_calls = static_cast<int64_t>(assign_buckets(registration, first, limit).size());
  prediction.calls = static_cast<int64_t>(assign_buckets(arrival, first, limit).size());
  prediction.payload_bytes = std::accumulate(registration.begin(), registration.end(), int64_t{0});
  prediction.formula = fmt::format("P x {} bytes, each parameter padded to 128, in buckets of {} MiB, once a step",
                                   element_bytes, bucket_mb);
  return prediction;
}

// ── hooks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Called by autograd when `.grad` of one parameter is complete in this backward. It runs on autograd's device thread,
/// under the compute stream; on a CPU on the thread that called backward, so MPI stays on one thread.
class GradientReducer::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientReducer& reducer, size_t parameter) : reducer_(reducer), parameter_(parameter) {}
  void operator()(const torch::autograd::Variable&) override { reducer_.gradient_ready(parameter_); }

 private:
  GradientReducer& reducer_;
  size_t parameter_;
};

GradientReducer::GradientReducer(const NamedTensors& parameters, Communicator& world, double bucket_mb,
                                 const std::vector<std::string>& order)
    : parameters_(parameters), world_(world), bucket_bytes_(bucket_limit(bucket_mb)) {
  const at::ScalarType dtype = sum_dtype(parameters_.front().second.scalar_type());
  const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t elements = 0;
  for (const auto& [name, parameter] : parameters_) {
    if (parameter.scalar_type() != parameters_.front().second.scalar_type()) {
      throw RunError(fmt::format("GradientReducer: '{}' has another dtype than '{}'; a bucket holds one dtype", name,
                                 parameters_.front().first));
    }
    elements += slot_of(parameter) / element_size;
  }
  storage_ = at::zeros({elements}, parameters_.front().second.options().dtype(dtype).requires_grad(false));

  // Before the first backward nobody knows the order in which gradients come: the layers used last are registered last,
  // so the order of registration turned round is a good guess.
  order_ = reversed_order(parameters_.size());
  if (!order.empty()) {
    std::unordered_map<std::string, size_t> index_of;
    for (size_t i = 0; i < parameters_.size(); ++i) index_of[parameters_[i].first] = i;
    order_.clear();
    for (const std::string& name : order) {
      const auto found = index_of.find(name);
      if (found == index_of.end())
        throw RunError(fmt::format("GradientReducer: unknown parameter '{}' in the saved order", name));
      order_.push_back(found->second);
    }
    if (order_.size() != parameters_.size()) {
      throw RunError(fmt::format("GradientReducer: the saved order has {} names, the model {}", order_.size(),
                                 parameters_.size()));
    }
    order_is_observed_ = true;
  }
  make_buckets();

  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i].second, std::make_unique<Hook>(*this, i));
  }
}

GradientReducer::~GradientReducer() {
  // The hooks point at this object; the parameters may live longer.
  for (auto& [name, parameter] : parameters_) torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
}

/// Cuts storage_ into buckets that follow order_.
void GradientReducer::make_buckets() {
  buckets_.clear();
  bucket_of_.assign(parameters_.size(), 0);
  int64_t offset = 0;
  for (const std::vector<size_t>& members :
       assign_buckets(slots_in_order(parameters_, order_), std::min(kFirstBucketBytes, bucket_bytes_), bucket_bytes_)) {
    Bucket bucket;
    const int64_t begin = offset;
    for (const size_t position : members) {
      const size_t index = order_[position];
      const at::Tensor& parameter = parameters_[index].second;
      bucket.parameters.push_back(index);
      bucket.views.push_back(storage_.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
      bucket_of_[index] = buckets_.size();
      offset += slot_of(parameter) / static_cast<int64_t>(storage_.element_size());
    }
    bucket.flat = storage_.narrow(0, begin, offset - begin);
    buckets_.push_back(std::move(bucket));
  }
}

// ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

void GradientReducer::begin_step() {
  if (cut_anew_) {  // now, because no gradient lives in the old buckets any more
    make_buckets();
    cut_anew_ = false;
  }
  for (Bucket& bucket : buckets_) {
    bucket.filled = false;
    bucket.work = Work();
  }
  next_to_send_ = 0;
}

void GradientReducer::begin_backward(bool last) {
  last_backward_ = last;
  for (Bucket& bucket : buckets_) bucket.missing = bucket.parameters.size();
  arrival_.clear();
  arrived_.assign(parameters_.size(), false);
}

void GradientReducer::gradient_ready(size_t parameter) {
  if (arrived_[parameter]) return;  // a parameter that backward visits twice counts once
  arrived_[parameter] = true;
  arrival_.push_back(parameter);
  Bucket& bucket = buckets_[bucket_of_[parameter]];
  if (--bucket.missing == 0) {
    if (!bucket.filled) fill(bucket);
    if (last_backward_) send_full_buckets();
  }
  world_.progress();  // MPI moves messages only inside its calls; NCCL needs no help
}

/// Moves fresh gradients into the bucket with one kernel for all of them; from here on `.grad` is a view of the bucket.
void GradientReducer::fill(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> views, fresh;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    at::Tensor& gradient = parameters_[bucket.parameters[i]].second.mutable_grad();
    if (gradient.defined()) {
      views.push_back(bucket.views[i]);
      fresh.push_back(gradient);
    } else {
      bucket.views[i].zero_();  // unused on this rank; another rank may have a gradient for it
    }
    gradient = bucket.views[i];
  }
  if (!fresh.empty()) at::_foreach_copy_(views, fresh);
  bucket.filled = true;
}

void GradientReducer::send_full_buckets() {
  // Strictly in order, even if a later bucket is full earlier: all ranks must make the same calls in the same order.
  while (next_to_send_ < buckets_.size() && buckets_[next_to_send_].missing == 0) {
    Bucket& bucket = buckets_[next_to_send_];
    // The sum, not the average: each loss is divided by the rows of the GLOBAL batch already, which stays right when
    // ranks hold different numbers of rows.
    bucket.work = world_.all_reduce(bucket.flat, ReduceOp::sum, {fmt::format("bucket {}", next_to_send_)});
    ++next_to_send_;
  }
}

void GradientReducer::wait() {
  times_.backward_ended = Moment::record(world_.device());
  // Parameters that backward never reached: they count as zeros, on every rank, so that no bucket waits for ever.
  for (Bucket& bucket : buckets_) {
    if (!bucket.filled) fill(bucket);
    bucket.missing = 0;
  }
  send_full_buckets();

  times_.wait_began = Moment::record(world_.device());
  for (Bucket& bucket : buckets_) bucket.work.wait();
  times_.wait_ended = Moment::record(world_.device());

  times_.first_call_began = buckets_.front().work.began();
  times_.last_label = fmt::format("bucket {} of {}, with {}", buckets_.size(), buckets_.size(),
                                  parameters_[buckets_.back().parameters.back()].first);
  times_.last_bytes = static_cast<int64_t>(buckets_.back().flat.nbytes());
  if (!order_is_observed_) agree_on_order();
}

/// After the first step the order is known. All ranks take rank 0's, since buckets must be the same everywhere.
void GradientReducer::agree_on_order() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!arrived_[i]) arrival_.push_back(i);  // unused ones last
  }
  at::Tensor order = at::empty({static_cast<int64_t>(arrival_.size())}, at::TensorOptions().dtype(at::kLong));
  std::copy(arrival_.begin(), arrival_.end(), order.data_ptr<int64_t>());
  order = order.to(world_.device());
  world_.broadcast(order, /*root=*/0, {"bucket order", Purpose::bookkeeping}).wait();
  order = order.cpu();
  order_.assign(order.data_ptr<int64_t>(), order.data_ptr<int64_t>() + order.numel());
  order_is_observed_ = true;
  cut_anew_ = true;  // at the next begin_step(): this step's gradients still live in the old buckets
}

std::vector<std::string> GradientReducer::order() const {
  std::vector<std::string> names;
  if (!order_is_observed_) return names;  // no step was taken: who resumes starts as a fresh run does
  for (const size_t index : order_) names.push_back(parameters_[index].first);
  return names;
}

}  // namespace mgp

// Memory of each device, and the copies between them, from the configuration alone.
#include <fmt/format.h>

#include <algorithm>

#include "common/device_list.hpp"
#include "common/text.hpp"
#include "examples/data_parallel/replica_options.hpp"

namespace mgp {

MemoryPrediction predict_replica_memory(const ReplicaOptions& o, at::Device device) {
  MemoryPrediction sum;
  for (size_t replica = 0; replica < o.devices.size(); ++replica) {
    if (o.devices[replica] != device) continue;
    // A replica is a one-device run on its share of the rows, without the optimizer unless it is the first.
    Options mine = o;
    mine.batch_size = std::max<int64_t>(1, o.rows_of(0, replica).size()) * o.accumulate;
    MemoryPrediction one = predict_memory(mine, MemoryPattern{});
    if (replica > 0) {
      one.optimizer = 0;
      one.parameters = parameter_count(o.model) * bytes_of(o.weight_dtype());  // the masters are on the first
    }
    sum.parameters += one.parameters;
    sum.optimizer += one.optimizer;
    sum.gradients += one.gradients;
    sum.activations += one.activations;
    // A cuBLAS handle of the replica's own thread; autograd's thread is one for the device.
    sum.workspace += sum.workspace == 0 ? one.workspace : one.workspace / 2;
  }
  return sum;
}

MemoryPattern first_replica_memory(const ReplicaOptions& options) {
  MemoryPattern pattern;
  pattern.formula = [options](const Options& shared) {
    ReplicaOptions mine = options;
    static_cast<Options&>(mine) = shared;  // another batch, other weights: what Run asks "what if" about
    mine.global_batch_size = shared.batch_size;
    return predict_replica_memory(mine, mine.first_device());
  };
  return pattern;
}

std::vector<CallPrediction> predict_replica_copies(const ReplicaOptions& o) {
  const auto others = static_cast<int64_t>(o.devices.size()) - 1;
  if (others == 0) return {};
  const int64_t elements = parameter_count(o.model);
  int64_t trained = 0, trained_tensors = 0;
  for (const ParameterShape& shape : parameter_shapes(o.model)) {
    if (o.adamw.is_frozen(shape.name)) continue;
    trained += shape.numel();
    ++trained_tensors;
  }
  const int64_t weight = bytes_of(o.weight_dtype()), gradient = bytes_of(storage_dtype(o.precision));
  const auto tensors = static_cast<int64_t>(parameter_shapes(o.model).size());
  const int64_t copies = others * (tensors + trained_tensors);
  return {{"copy", copies, copies, others * (elements * weight + trained * gradient),
           fmt::format("(N-1) x (P x {} weights out + P x {} gradients back), N = {}, by {}", weight, gradient,
                       o.devices.size(), on_distinct_gpus(o.devices) ? "NCCL" : "copies")}};
}

std::string replica_tables(const ReplicaOptions& o) {
  std::vector<std::vector<std::string>> replicas = {{"replica", "device", "rows of a step"}};
  for (size_t replica = 0; replica < o.devices.size(); ++replica) {
    int64_t rows = 0;
    for (int64_t micro = 0; micro < o.accumulate; ++micro) rows += o.rows_of(micro, replica).size();
    replicas.push_back({std::to_string(replica), o.devices[replica].str(), std::to_string(rows)});
  }
  std::string text = table("replicas, one process and a thread for each", replicas, /*head=*/true);
  return text + predicted_memory_table(o.devices, [&](at::Device device) { return predict_replica_memory(o, device); });
}

void refuse_if_too_large(const ReplicaOptions& o, const Launch& launch) {
  refuse_if_too_large(
      o.devices, launch, [&](at::Device device) { return predict_replica_memory(o, device); },
      fmt::format("{} rows over {} replicas", o.global_batch_size, o.devices.size()), "a smaller --batch-size");
}

}  // namespace mgp

// The flags of train_dataparallel (which devices, where the loss is computed) and what they mean for memory and copies.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "common/data.hpp"
#include "common/options.hpp"
#include "common/predict.hpp"

namespace mgp {

struct ReplicaOptions : Options {
  std::string devices_flag;            ///< as given, "" if not
  std::string gather_outputs = "off";  ///< on: nn.DataParallel's own form, loss on the first device
  std::vector<at::Device> devices;     ///< after settle_replicas(): of each replica; one may hold several
  std::vector<Injection> faults;       ///< --inject throw@R,S and inf@R,S: here R is a replica
  bool gathers() const { return gather_outputs == "on"; }
  at::Device first_device() const { return devices.front(); }
  /// Rows of `replica` in pass `micro` of a step: the rows of the pass cut over the replicas. May be empty.
  RowSlice rows_of(int64_t micro, size_t replica) const;
  /// Whether a planned fault of this kind is due; the rank in it counts replicas.
  bool injects(const std::string& kind, size_t replica, int64_t step) const;
};

void add_replica_flags(CLI::App& app, ReplicaOptions& options);  ///< --devices, --gather-outputs

/// Settles the shared options (settle() of options.hpp) and the devices: without --devices all visible GPUs, or the one
/// of --device, or two replicas on the CPU. Throws UsageError, one line, before anything is allocated.
void settle_replicas(ReplicaOptions& options, const Launch& launch);

/// Whether the replicas sit on two or more GPUs, each on its own: then NCCL moves weights and gradients.
bool on_distinct_gpus(const std::vector<at::Device>& devices);

/// Bytes on `device` from all replicas that it holds. The first device has moments and masters on top.
MemoryPrediction predict_replica_memory(const ReplicaOptions& options, at::Device device);

/// For Run: its table and its check are of the first device.
MemoryPattern first_replica_memory(const ReplicaOptions& options);

/// What a step copies from replica to replica: weights out, gradients back.
std::vector<CallPrediction> predict_replica_copies(const ReplicaOptions& options);

/// Rows and device of each replica, then the predicted memory of every device.
std::string replica_tables(const ReplicaOptions& options);

/// Throws UsageError if the prediction of a device after the first exceeds its free memory (Run judges the first).
void refuse_if_too_large(const ReplicaOptions& options, const Launch& launch);

}  // namespace mgp

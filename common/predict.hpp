// What a run will need, from the configuration alone: bytes of memory per rank by kind, and calls and bytes on the wire.
// The formulas live here and nowhere else; the report prints them beside the measured numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/options.hpp"
#include "common/predict_parts.hpp"

namespace mgp {

/// Bytes on one rank's device. `peak()` is what the allocator's peak should read.
struct MemoryPrediction {
  int64_t parameters = 0;             ///< with --weights low: low-precision weights and fp32 masters
  int64_t optimizer = 0;              ///< AdamW's two moments and step counts
  int64_t communication_buffers = 0;  ///< DDP: the buckets, in which the gradients live
  int64_t gradients = 0;              ///< those outside of buckets, at the moment of the peak
  int64_t activations = 0;            ///< kept by forward or made again for backward, and backward's own temporaries
  int64_t workspace = 0;              ///< cuBLAS
  int64_t peak() const { return parameters + optimizer + communication_buffers + gradients + activations + workspace; }
};

// ── what all formulas begin and end with ──

/// Memory of `elements` parameters in `tensors` tensors, whole and trained: weights (low ones too), moments, step counts, and
/// the cuBLAS workspace.
MemoryPrediction held_memory(const Options& options, int64_t elements, int64_t tensors);

/// Whether attention takes the kernel that writes out its probabilities.
bool uses_math_attention(const Options& options);

/// Bytes that hang on the moment of backward.
struct BackwardMoment {
  int64_t activations = 0;  ///< and temporaries
  int64_t gradients = 0;    ///< outside of buckets
  int64_t total() const { return activations + gradients; }
};

/// Takes the moment that needs most, of equal ones the first. At least one.
void set_peak(MemoryPrediction& memory, const std::vector<BackwardMoment>& moments);

/// What a pattern changes in the memory of plain data parallel training.
struct MemoryPattern {
  bool gradients_in_buckets = false;  ///< persistent flat buffers of the size of all gradients

  /// Trainers that shard: elements that a rank holds for good, padding included (0: everything is whole).
  int64_t shard_elements = 0;
  int64_t frozen_elements = 0;  ///< of them, without gradient and moments
  int64_t whole_elements = 0;   ///< parameters that are gathered at the peak, in the dtype of the computation
  int64_t whole_gradient_elements =
      0;  ///< gradients that are whole at the peak, and their buffer for the reduce-scatter

  /// Trainers that cut the model: their own formula (predict_<pattern>.cpp) in the place of the one for whole layers.
  std::function<MemoryPrediction(const Options&)> formula = {};
};

MemoryPrediction predict_memory(const Options& options, const MemoryPattern& pattern);

/// The largest rows per rank whose prediction fits into `free_bytes`; 0 if not even one row does.
int64_t largest_batch(Options options, const MemoryPattern& pattern, int64_t free_bytes);

/// Calls of one kind in one step.
struct CallPrediction {
  std::string call;              ///< "all_reduce"
  int64_t first_step_calls = 0;  ///< DDP's first step uses other buckets than the rest
  int64_t calls = 0;
  int64_t payload_bytes = 0;  ///< bytes per step, as the ledger counts them
  std::string formula;        ///< in words and symbols, for the table
};

/// Bytes that a ring sends past each rank for `payload` bytes (nccl-tests doc/PERFORMANCE.md): all_reduce 2(n-1)/n,
/// all_gather and reduce_scatter (n-1)/n, broadcast, reduce, send and recv 1. A model: NCCL may choose other algorithms.
double wire_bytes(const std::string& call, double payload, int ranks);

/// The tables of --predict and of the banner.
std::string memory_table(const MemoryPrediction& prediction);

/// What --weights and --checkpoint-activations cost or save beside the other choice: a line each, where there is a choice
/// (bf16 and fp16) or checkpointing is on.
std::string choices_text(const Options& options, const MemoryPattern& pattern);
std::string call_table(const std::vector<CallPrediction>& calls, int ranks);

}  // namespace mgp

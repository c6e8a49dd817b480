// The proof that a parallel run computed what one device computes (design, decision 5).
//
// AdamW divides by the gradient's own size, so a gradient that is wrong by a constant factor hardly changes the
// parameters: comparing parameters alone would pass a wrong program. Gradients of the first step are compared first.
#pragma once

#include <string>
#include <vector>

#include "common/model_config.hpp"
#include "common/named_tensors.hpp"
#include "common/precision.hpp"

namespace mgp {

/// What a run leaves for the proof. All tensors on the CPU, in storage dtype.
struct TrainingRecord {
  std::vector<double> losses;       ///< of each step, mean over the rows of the global batch
  std::vector<double> norms;        ///< of each step, gradient norm before clipping
  std::vector<bool> skipped;        ///< of each step: the loss scale found an overflow
  double lowest_scale = 1;          ///< loss scale, lowest of all steps; 1 without one
  NamedTensors first_gradients;     ///< of the first step, after the exchange, before clipping
  NamedTensors initial_parameters;  ///< before the first step
  NamedTensors final_parameters;
};

struct Check {
  std::string what;  ///< "gradient of encoder.layers.0.linear1.weight"
  double value = 0;  ///< measured difference
  double limit = 0;
  bool passed() const { return value <= limit; }  ///< a NaN does not pass
};

struct Verdict {
  std::vector<Check> checks;
  bool passed() const;
  /// Worst check of each kind, then every failed one (at most 12); a last line with the verdict.
  std::string report() const;
};

/// Compares a run in fp32 or fp64 with the one-device run of the same precision.
/// Limits, fp32 (fp64: 1e-10 for all): gradients ||g-g*|| <= 5e-5 max(||g*||, 1e-4 ||all g*||), the QKV bias in three
/// parts; losses 5e-6 relative; norms 1e-5 relative; ||p-p*|| <= 3e-4 ||p*-p0|| over all parameters.
Verdict compare_exact(const TrainingRecord& run, const TrainingRecord& one_device, Precision precision);

/// Compares a low-precision run (bf16, tf32): its distance to the fp32 run must be at most twice the distance of the
/// one-device run in the same low precision.
Verdict compare_low(const TrainingRecord& run, const TrainingRecord& one_device_low,
                    const TrainingRecord& one_device_fp32);

/// ||a - b|| over all parameters, against the update ||b - initial|| that b's run made.
double relative_distance(const NamedTensors& a, const NamedTensors& b, const NamedTensors& initial);

}  // namespace mgp

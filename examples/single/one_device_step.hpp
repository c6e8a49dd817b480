// One device, one optimizer step: the reference that every --verify compares with.
//
// It trains on the same global batches as the run it judges, on one device, without a collective. The rows go through in
// microbatches of another size than the run's, so that even a run on one rank is compared with other sums than its own.
// (bf16 and fp16: of the same size, because there the amount of rounding is what is compared.)
#pragma once

#include "common/options.hpp"
#include "common/verify.hpp"

namespace mgp {

/// Trains as many steps as `run` on one device and returns what --verify compares. Starts from --load's file when it is
/// set, else from the initial values of the seed. Steps that the loss scale of `run` skipped are left out.
TrainingRecord train_on_one_device(const Options& options, at::Device device, Precision precision,
                                   const TrainingRecord& run);

/// The whole proof for a run (see verify.hpp): fp32 and fp64 against the same precision on one device, the others by
/// their distance to fp32. Call on one rank, with the run's own model freed.
Verdict compare_with_one_device(const Options& options, const TrainingRecord& run, at::Device device);

}  // namespace mgp

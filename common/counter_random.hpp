// Numbers that are functions of (seed, name, index): the same on every rank, thread, device and compiler.
//
// A stream of random numbers would tie a value to the order of the calls. A counter-based hash does not, so a shard or
// a pipeline stage can make exactly its slice of a parameter, and sample i is the same whoever asks for it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string_view>

namespace mgp {

/// A well mixed 64-bit integer for (key, index): the SplitMix64 finaliser (Steele, Lea, Flood, OOPSLA 2014) over both.
uint64_t counter_hash(uint64_t key, uint64_t index);

/// A key for (seed, name): FNV-1a over the name, mixed with the seed.
uint64_t stream_key(uint64_t seed, std::string_view name);

/// Fills `out` (CPU, contiguous, fp32 or fp64) with elements [first, first + out.numel()) of the stream `key`: zero
/// mean, standard deviation `stddev`, nearly normal. Each value is the centred sum of the four 16-bit pieces of one
/// hash: exact integer arithmetic until the last multiplication, so every machine makes the same bits (log and cos
/// would not).
void fill_normal(at::Tensor& out, uint64_t key, double stddev, int64_t first = 0);

}  // namespace mgp

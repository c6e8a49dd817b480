// The safetensors format: 8-byte little-endian header length, JSON header padded with spaces to 8 bytes, raw tensors.
#pragma once

#include <map>
#include <string>

#include "common/named_tensors.hpp"

namespace mgp {

/// Writes tensors and string metadata to `path`, atomically; readable by every safetensors reader. Tensors may be on
/// any device and of any layout; they are copied to contiguous CPU memory one at a time. Those with larger elements
/// come first in the file, so that each is aligned for readers that map it; else the order is kept. Throws RunError.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata);

/// Reads a whole file (CPU tensors that own their memory, in the order of the file), every size and offset checked
/// against the file first. Throws UsageError naming `flag`.
NamedTensors read_safetensors(const std::string& path, const std::string& flag,
                              std::map<std::string, std::string>* metadata = nullptr);

}  // namespace mgp

// Damaged files for the readers of file formats: thousands of them, the same on every machine.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <string>

#include "common/error.hpp"
#include "tests/unit/files.hpp"

namespace mgp {

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
inline constexpr size_t kRoom = 192 << 20;
#else
inline constexpr size_t kRoom = size_t{1} << 40;  // sanitizers keep freed memory
#endif

/// Runs with little more address space than now: a size that was believed shows as "memory" in the complaint.
class AddressSpaceLimit {
 public:
  AddressSpaceLimit() {
    getrlimit(RLIMIT_AS, &before_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + kRoom;
    setrlimit(RLIMIT_AS, &limit);
  }
  ~AddressSpaceLimit() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

struct XorShift {
  uint64_t state;
  uint64_t operator()(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
  }
};

/// Damages `bytes` in a few thousand ways and reads each; returns how many were still read as a value.
inline int fuzz(const std::string& bytes, int tries, const std::function<void(const std::string&)>& read) {
  XorShift random{88172645463325252ull};
  int readable = 0;
  for (int i = 0; i < tries; ++i) {
    std::string copy = bytes;
    if (i % 8 == 7) {
      copy.resize(random(bytes.size()));
    } else {
      for (uint64_t flips = 1 + random(3); flips > 0; --flips) {
        const size_t at = random(copy.size());
        const char kinds[] = {static_cast<char>(copy[at] ^ (1 << random(8))), '\0', '\xff',
                              static_cast<char>(random(256))};
        copy[at] = kinds[random(4)];
      }
    }
    try {
      read(copy);
      ++readable;
    } catch (const UsageError& error) {
      const std::string complaint = error.what();
      EXPECT_FALSE(says(complaint, "memory") || says(complaint, "\n")) << complaint;
    }
  }
  return readable;
}

}  // namespace mgp

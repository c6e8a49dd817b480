// How Slurm writes task counts and node lists.
#include <charconv>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "common/error.hpp"
#include "common/launch.hpp"

namespace mgp {

std::vector<int> expand_slurm_counts(const std::string& text) {
  const auto refuse = [&]() -> UsageError {
    return UsageError(fmt::format("'{}' is not a list of Slurm task counts such as 2(x3),1", text));
  };
  constexpr int kMost = 1 << 20;  // more tasks than any machine has: the text is damaged
  std::vector<int> counts;
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  while (true) {
    int count = 0;
    int times = 1;
    auto result = std::from_chars(at, end, count);
    if (result.ec != std::errc() || count < 0 || count > kMost) throw refuse();
    at = result.ptr;
    if (end - at >= 2 && at[0] == '(' && at[1] == 'x') {
      result = std::from_chars(at + 2, end, times);
      if (result.ec != std::errc() || result.ptr == end || *result.ptr != ')' || times < 1 || times > kMost)
        throw refuse();
      at = result.ptr + 1;
    }
    counts.insert(counts.end(), static_cast<size_t>(times), count);
    if (at == end) return counts;
    if (*at++ != ',') throw refuse();
  }
}

std::string first_slurm_host(const std::string& nodelist) {
  std::string host;
  for (size_t i = 0; i < nodelist.size() && nodelist[i] != ','; ++i) {
    if (nodelist[i] != '[') {
      host += nodelist[i];
      continue;
    }
    const size_t first_end = nodelist.find_first_of(",-]", i);
    const size_t bracket_end = nodelist.find(']', i);
    if (first_end == std::string::npos || bracket_end == std::string::npos) return "";
    host += nodelist.substr(i + 1, first_end - i - 1);
    i = bracket_end;
  }
  return host;
}

}  // namespace mgp

#include "common/layer_split.hpp"

#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "common/data.hpp"
#include "common/error.hpp"

namespace mgp {
namespace {

/// The counts of "4,4,4". A comma at the end is an empty count, which is refused like any other text.
std::vector<int64_t> parse_counts(const std::string& split) {
  std::vector<int64_t> counts;
  std::istringstream parts(split + ",");  // so that getline gives what follows the last comma too
  for (std::string part; std::getline(parts, part, ',');) {
    int64_t count = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), count);
    if (part.empty() || error != std::errc() || end != part.data() + part.size()) {
      throw UsageError(fmt::format("--split is '{}': write the layers of each stage, for example 4,4,4", split));
    }
    if (count < 1) {
      throw UsageError(fmt::format("--split {}: stage {} has {} layers, and every stage needs at least 1", split,
                                   counts.size(), count));
    }
    counts.push_back(count);
  }
  return counts;
}

}  // namespace

std::vector<LayerRange> split_layers(const std::string& split, int64_t layers, int64_t stages,
                                     const std::string& stages_flag) {
  if (stages < 1) throw UsageError(fmt::format("{} give {} stages: at least 1 is needed", stages_flag, stages));
  if (stages > layers) {
    throw UsageError(
        fmt::format("{} stages for {} layers: every stage needs at least 1 layer; fewer stages ({}) or more "
                    "--layers",
                    stages, layers, stages_flag));
  }
  std::vector<LayerRange> ranges;
  if (split.empty()) {
    for (int64_t stage = 0; stage < stages; ++stage) {
      const RowSlice slice = slice_rows(layers, stage, stages);  // the same cut as of rows
      ranges.push_back({slice.begin, slice.end});
    }
    return ranges;
  }

  const std::vector<int64_t> counts = parse_counts(split);
  if (static_cast<int64_t>(counts.size()) != stages) {
    throw UsageError(fmt::format("--split {} is for {} stage{}, but there are {} ({})", split, counts.size(),
                                 counts.size() == 1 ? "" : "s", stages, stages_flag));
  }
  int64_t sum = 0;
  for (const int64_t count : counts) {
    // Compared before it is added, so that no text can make the sum overflow.
    if (count > layers - sum) {
      throw UsageError(fmt::format("--split {} holds more than the model's {} layers (--layers)", split, layers));
    }
    ranges.push_back({sum, sum + count});
    sum += count;
  }
  if (sum != layers) {
    throw UsageError(fmt::format("--split {} holds {} layers, and the model has {} (--layers)", split, sum, layers));
  }
  return ranges;
}

std::string to_string(const std::vector<LayerRange>& ranges) {
  std::string text;
  for (const LayerRange& range : ranges) text += (text.empty() ? "" : ",") + std::to_string(range.count());
  return text;
}

}  // namespace mgp

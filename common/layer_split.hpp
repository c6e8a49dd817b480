// Which layers stand on which stage, where a model is cut between its layers (model parallel, pipeline).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mgp {

/// Layers [first, last) of the model.
struct LayerRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t count() const { return last - first; }
};

/// Cuts `layers` layers into `stages` ranges that follow each other. `split` is the text of --split, the layers of each
/// stage ("4,4,4"); empty: as equal as possible, where the first `layers % stages` stages get one layer more.
/// Every stage holds at least one layer. Throws UsageError in one line if it cannot be: more stages than layers, another
/// number of counts than stages, a count that is not a positive number, a sum that is not `layers`. `stages_flag` names
/// what sets the number of stages ("--devices", "the ranks"), so that the line can say what to change.
std::vector<LayerRange> split_layers(const std::string& split, int64_t layers, int64_t stages,
                                     const std::string& stages_flag);

/// "4,4,4", as --split takes it.
std::string to_string(const std::vector<LayerRange>& ranges);

}  // namespace mgp

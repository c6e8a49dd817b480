// --metrics: one JSON object per line, one for each step and one for the run.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/report.hpp"

namespace mgp {

/// Lines appear as soon as they are known; the file of an interrupted run is whole up to its last line.
class MetricsFile {
 public:
  /// `append` when a run is continued. Throws RunError with path and reason.
  MetricsFile(const std::string& path, bool append);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  /// {"kind":"step","step":n,"loss":x,"grad_norm":y,"lr":z,"ms":t,...}
  void step(const StepNumbers& numbers);
  /// {"kind":"run",...}: synced to disk.
  void run(const nlohmann::json& object);

 private:
  void line(const nlohmann::json& object);
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace mgp

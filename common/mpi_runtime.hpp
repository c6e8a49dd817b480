// MPI's life in this process: initialised when it is needed, finalised if this initialised it. Internal to common/.
#pragma once

#include <memory>
#include <string>

#include "common/launch.hpp"

namespace mgp {

class MpiRuntime {
 public:
  /// Initialises MPI (unless somebody did) and compares its size and rank with the launcher's. Throws UsageError with
  /// both numbers and the way out, also when this was built without MPI. Works without mpirun for a world of one rank.
  static std::unique_ptr<MpiRuntime> start(const Launch& launch);
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  /// "Open MPI 4.1.4", "MPICH 4.0.2".
  static std::string version();

  /// Rank 0's text on every rank.
  std::string tell_all(const std::string& text) const;

  /// After a failure: do not finalise, the others may not come.
  void abandon() { finalize_ = false; }

 private:
  MpiRuntime() = default;
  bool finalize_ = false;
};

/// Whether this was built with MPI and the process was started by an MPI launcher.
bool started_by_mpi(const Launch& launch);

}  // namespace mgp

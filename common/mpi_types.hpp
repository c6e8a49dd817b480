// How MPI sees our element types. MPI has no 16-bit floating-point types: they travel as 16-bit integers, and sum, max
// and min are operations of our own. Internal to common/; include after checking MGP_WITH_MPI.
#pragma once

#include <ATen/ATen.h>
#include <mpi.h>

#include "common/communicator.hpp"

namespace mgp {

MPI_Datatype mpi_type(at::ScalarType type);

/// Our operations for fp16 and bf16. They live as long as one wire does.
class MpiOps {
 public:
  MpiOps();
  ~MpiOps();
  MpiOps(const MpiOps&) = delete;
  MpiOps& operator=(const MpiOps&) = delete;
  /// avg is a sum that the caller divides afterwards.
  MPI_Op find(at::ScalarType type, ReduceOp op) const;

 private:
  MPI_Op half_[3];
  MPI_Op bfloat16_[3];
};

/// Throws RunError with MPI's own text unless `result` is success.
void check_mpi(int result, const std::string& what);

}  // namespace mgp

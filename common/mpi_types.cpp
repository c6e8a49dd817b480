#if MGP_WITH_MPI

#include "common/mpi_types.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "common/error.hpp"

namespace mgp {

namespace {

struct Sum {
  static float apply(float a, float b) { return a + b; }
};
struct Max {
  // A NaN on either side wins, as it does in NCCL: it must not disappear from a check for overflow.
  static float apply(float a, float b) { return a != a || a > b ? a : b; }
};
struct Min {
  static float apply(float a, float b) { return a != a || a < b ? a : b; }
};

/// inout <- in op inout, each pair through fp32.
template <typename Value, typename Operation>
void combine(void* in, void* inout, int* length, MPI_Datatype*) {
  const auto* const left = static_cast<const Value*>(in);
  auto* const right = static_cast<Value*>(inout);
  for (int i = 0; i < *length; ++i) {
    right[i] = static_cast<Value>(Operation::apply(static_cast<float>(left[i]), static_cast<float>(right[i])));
  }
}

template <typename Value>
void create(MPI_Op (&operations)[3]) {
  check_mpi(MPI_Op_create(&combine<Value, Sum>, /*commute=*/1, &operations[0]), "MPI_Op_create");
  check_mpi(MPI_Op_create(&combine<Value, Max>, /*commute=*/1, &operations[1]), "MPI_Op_create");
  check_mpi(MPI_Op_create(&combine<Value, Min>, /*commute=*/1, &operations[2]), "MPI_Op_create");
}

}  // namespace

void check_mpi(int result, const std::string& what) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw RunError(fmt::format("{}: MPI: {}", what, text));
}

MPI_Datatype mpi_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kHalf:
    case at::kBFloat16:
      return MPI_UINT16_T;
    case at::kLong:
      return MPI_INT64_T;
    case at::kInt:
      return MPI_INT32_T;
    default:
      return MPI_UINT8_T;  // the communicator lets nothing else through
  }
}

MpiOps::MpiOps() {
  create<at::Half>(half_);
  create<at::BFloat16>(bfloat16_);
}

MpiOps::~MpiOps() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  for (MPI_Op& operation : half_) MPI_Op_free(&operation);
  for (MPI_Op& operation : bfloat16_) MPI_Op_free(&operation);
}

MPI_Op MpiOps::find(at::ScalarType type, ReduceOp op) const {
  const int index = op == ReduceOp::max ? 1 : op == ReduceOp::min ? 2 : 0;
  if (type == at::kHalf) return half_[index];
  if (type == at::kBFloat16) return bfloat16_[index];
  return index == 1 ? MPI_MAX : index == 2 ? MPI_MIN : MPI_SUM;
}

}  // namespace mgp

#endif

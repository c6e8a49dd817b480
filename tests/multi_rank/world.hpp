// What the tests of this binary share: the one communicator, and tensors whose sums are known in closed form.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "common/communicator.hpp"
#include "common/error.hpp"

namespace mgp_test {

/// The communicator of all ranks. Made by main, once.
mgp::Communicator& world();

/// Element i of rank r is i % 7 + r + 1: small whole numbers, exact in every type and in every sum over a few ranks.
inline at::Tensor pattern(int64_t numel, at::ScalarType type, int rank) {
  return at::arange(numel, at::kDouble).remainder(7.0).add(static_cast<double>(rank + 1)).to(type).to(world().device());
}

/// `numel` elements, all of the same value.
inline at::Tensor constant(int64_t numel, at::ScalarType type, double value) {
  return at::full({numel}, value, at::kDouble).to(type).to(world().device());
}

/// What `op` makes of the pattern of `ranks` ranks.
inline at::Tensor reduced_pattern(int64_t numel, at::ScalarType type, mgp::ReduceOp op, int ranks) {
  const at::Tensor base = at::arange(numel, at::kDouble).remainder(7.0);
  const double sum_of_ranks = ranks * (ranks + 1) / 2.0;
  at::Tensor result;
  switch (op) {
    case mgp::ReduceOp::sum:
      result = base * ranks + sum_of_ranks;
      break;
    case mgp::ReduceOp::avg:
      result = (base * ranks + sum_of_ranks) / ranks;
      break;
    case mgp::ReduceOp::max:
      result = base + ranks;
      break;
    case mgp::ReduceOp::min:
      result = base + 1;
      break;
  }
  return result.to(type).to(world().device());  // whole-number types cut the average off, as NCCL does
}

/// Whole numbers must be equal. Floating-point numbers may differ by a rounding: for an average NCCL multiplies by 1/n
/// first, MPI divides the sum.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  double tolerance = 0.0;
  switch (actual.scalar_type()) {
    case at::kDouble:
      tolerance = 1e-15;
      break;
    case at::kFloat:
      tolerance = 1e-6;
      break;
    case at::kHalf:
      tolerance = 2e-3;
      break;
    case at::kBFloat16:
      tolerance = 2e-2;
      break;
    default:
      break;
  }
  const at::Tensor a = actual.cpu().to(at::kDouble);
  const at::Tensor b = expected.cpu().to(at::kDouble);
  const double worst = ((a - b).abs() / b.abs().clamp_min(1.0)).max().item<double>();
  EXPECT_LE(worst, tolerance) << what << "\nactual " << a.slice(0, 0, 10) << "\nexpected " << b.slice(0, 0, 10);
}

/// The message of the RunError that `action` throws, "" if it throws none.
template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const mgp::RunError& error) {
    return error.what();
  }
  return "";
}

constexpr at::ScalarType kAllTypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                        at::kLong,   at::kInt,   at::kByte};
constexpr mgp::ReduceOp kAllOps[] = {mgp::ReduceOp::sum, mgp::ReduceOp::avg, mgp::ReduceOp::max, mgp::ReduceOp::min};
constexpr int64_t kSizes[] = {0, 1, 7, 1000, 4099};

}  // namespace mgp_test

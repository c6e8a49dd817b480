#include "common/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "common/error.hpp"
#include "common/text.hpp"

namespace mgp {
namespace {

/// Splits tensors whose parts must be judged apart. The key third of a QKV bias has a true gradient of zero (softmax does
/// not see a constant added to all scores): inside the whole bias its noise would hide errors in the other two thirds.
NamedTensors split_qkv_bias(const NamedTensors& tensors) {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) {
    if (name.find("in_proj_bias") == std::string::npos) {
      result.emplace_back(name, tensor);
      continue;
    }
    const auto parts = tensor.chunk(3);
    for (size_t i = 0; i < 3; ++i)
      result.emplace_back(name + (i == 0 ? " (query)" : i == 1 ? " (key)" : " (value)"), parts[i]);
  }
  return result;
}

double norm_of(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

/// Square root of the sum of squares over a list.
template <typename Function>
double total(const NamedTensors& tensors, Function&& part) {
  double sum = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const double value = part(i);
    sum += value * value;
  }
  return std::sqrt(sum);
}

void expect_same_names(const NamedTensors& a, const NamedTensors& b, const char* what) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i)
    same = a[i].first == b[i].first && a[i].second.sizes() == b[i].second.sizes();
  if (!same)
    throw RunError(
        fmt::format("--verify: the two runs hold different {} ({} and {} tensors)", what, a.size(), b.size()));
}

double relative(double value, double truth) { return std::abs(value - truth) / std::max(std::abs(truth), 1e-30); }

double list_distance(const NamedTensors& a, const NamedTensors& b) {
  return total(a, [&](size_t i) { return distance(a[i].second, b[i].second); });
}

void expect_same_length(const TrainingRecord& a, const TrainingRecord& b) {
  if (a.losses.size() != b.losses.size() || a.norms.size() != b.norms.size() || a.losses.empty()) {
    throw RunError(
        fmt::format("--verify: {} steps were recorded, {} by the one-device run", a.losses.size(), b.losses.size()));
  }
}

bool was_skipped(const TrainingRecord& run, size_t step) { return !run.skipped.empty() && run.skipped[step]; }

/// A step may be skipped only because a gradient was inf or NaN, and then it must be.
void check_skipping(const TrainingRecord& run, Verdict& verdict) {
  for (size_t i = 0; i < run.skipped.size(); ++i) {
    if (run.skipped[i] == !std::isfinite(run.norms[i])) continue;
    verdict.checks.push_back(
        {fmt::format("skipping of recorded step {}, whose norm is {}", i + 1, run.norms[i]), 1.0, 0.0});
  }
}

}  // namespace

double relative_distance(const NamedTensors& a, const NamedTensors& b, const NamedTensors& initial) {
  return list_distance(a, b) / std::max(list_distance(b, initial), 1e-30);
}

bool Verdict::passed() const {
  return !checks.empty() &&
         std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.passed(); });
}

std::string Verdict::report() const {
  // The first word of a check is its kind: of each kind the one nearest to (or furthest over) its limit is shown.
  std::map<std::string, const Check*> worst;
  std::map<std::string, int> count;
  for (const Check& check : checks) {
    const std::string kind = check.what.substr(0, check.what.find(' '));
    const Check*& entry = worst[kind];
    const auto badness = [](const Check& c) { return std::isnan(c.value) ? INFINITY : c.value / c.limit; };
    if (entry == nullptr || badness(check) > badness(*entry)) entry = &check;
    ++count[kind];
  }
  std::vector<std::vector<std::string>> rows = {{"compared", "checks", "worst", "difference", "limit", ""}};
  for (const auto& [kind, check] : worst) {
    rows.push_back({kind, std::to_string(count[kind]), check->what, fmt::format("{:.2e}", check->value),
                    fmt::format("{:.2e}", check->limit), check->passed() ? "ok" : "DIFFERENT"});
  }
  std::string text = table("compared with one device", rows, /*head=*/true);
  int failed = 0;
  for (const Check& check : checks) {
    if (check.passed()) continue;
    if (++failed <= 12)
      text += fmt::format("  DIFFERENT {}: {:.3e}, limit {:.3e}\n", check.what, check.value, check.limit);
  }
  if (failed > 12) text += fmt::format("  ... and {} more\n", failed - 12);
  text += passed() ? fmt::format("VERIFIED: {} checks, all within their limits\n", checks.size())
                   : fmt::format("NOT EQUAL to one device: {} of {} checks failed\n", failed, checks.size());
  return text;
}

Verdict compare_exact(const TrainingRecord& run, const TrainingRecord& truth, Precision precision) {
  const bool fp64 = precision == Precision::fp64;
  const double gradient_limit = fp64 ? 1e-10 : 5e-5, loss_limit = fp64 ? 1e-10 : 5e-6, norm_limit = fp64 ? 1e-10 : 1e-5,
               parameter_limit = fp64 ? 1e-10 : 3e-4;
  expect_same_names(run.first_gradients, truth.first_gradients, "gradients");
  expect_same_names(run.final_parameters, truth.final_parameters, "parameters");
  expect_same_length(run, truth);

  Verdict verdict;
  const NamedTensors gradients = split_qkv_bias(run.first_gradients), wanted = split_qkv_bias(truth.first_gradients);
  const double all = total(wanted, [&](size_t i) { return norm_of(wanted[i].second); });
  check_skipping(run, verdict);
  for (size_t i = 0; i < wanted.size() && !was_skipped(run, 0); ++i) {
    // A gradient that is nearly zero is judged against the size of all gradients: its own size would be noise.
    const double scale = std::max(norm_of(wanted[i].second), 1e-4 * all);
    verdict.checks.push_back(
        {"gradient of " + wanted[i].first, distance(gradients[i].second, wanted[i].second) / scale, gradient_limit});
  }
  for (size_t i = 0; i < truth.losses.size(); ++i) {
    verdict.checks.push_back(
        {fmt::format("loss of recorded step {}", i + 1), relative(run.losses[i], truth.losses[i]), loss_limit});
    if (was_skipped(run, i)) continue;  // there is no gradient to compare
    verdict.checks.push_back(
        {fmt::format("norm of recorded step {}", i + 1), relative(run.norms[i], truth.norms[i]), norm_limit});
  }
  verdict.checks.push_back({"parameters after the last step, against the update made",
                            relative_distance(run.final_parameters, truth.final_parameters, truth.initial_parameters),
                            parameter_limit});
  return verdict;
}

Verdict compare_low(const TrainingRecord& run, const TrainingRecord& low, const TrainingRecord& fp32) {
  expect_same_names(run.first_gradients, fp32.first_gradients, "gradients");
  expect_same_names(low.first_gradients, fp32.first_gradients, "gradients");
  expect_same_names(run.final_parameters, fp32.final_parameters, "parameters");
  expect_same_length(run, fp32);
  expect_same_length(low, fp32);
  // "At most twice the distance of one device", with a floor of fp32's own limit where that distance is by chance zero.
  const auto check = [](const std::string& what, double mine, double theirs, double floor) {
    return Check{what, mine, std::max(2.0 * theirs, floor)};
  };

  Verdict verdict;
  const NamedTensors mine = split_qkv_bias(run.first_gradients), one = split_qkv_bias(low.first_gradients),
                     truth = split_qkv_bias(fp32.first_gradients);
  const double all = total(truth, [&](size_t i) { return norm_of(truth[i].second); });
  for (size_t i = 0; i < truth.size() && !was_skipped(run, 0); ++i) {
    const double scale = std::max(norm_of(truth[i].second), 1e-4 * all);
    verdict.checks.push_back(check("gradient of " + truth[i].first, distance(mine[i].second, truth[i].second) / scale,
                                   distance(one[i].second, truth[i].second) / scale, 5e-5));
  }
  check_skipping(run, verdict);
  // Losses and norms are single numbers, whose distances can be small by luck: the largest over the steps is compared.
  double loss = 0, loss_one = 0, norms = 0, norms_one = 0;
  for (size_t i = 0; i < fp32.losses.size(); ++i) {
    // fp16 overflowed: there is no gradient to compare, and the one-device runs left the step out as well.
    if (was_skipped(run, i)) continue;
    const auto grow = [](double& worst, double value) { worst = std::isnan(value) ? NAN : std::max(worst, value); };
    grow(loss, relative(run.losses[i], fp32.losses[i]));
    grow(loss_one, relative(low.losses[i], fp32.losses[i]));
    grow(norms, relative(run.norms[i], fp32.norms[i]));
    grow(norms_one, relative(low.norms[i], fp32.norms[i]));
  }
  verdict.checks.push_back(check("loss furthest from fp32 over the steps", loss, loss_one, 1e-3));
  verdict.checks.push_back(check("norm furthest from fp32 over the steps", norms, norms_one, 5e-3));
  verdict.checks.push_back(
      check("parameters after the last step, distance to fp32 against the update made",
            relative_distance(run.final_parameters, fp32.final_parameters, fp32.initial_parameters),
            relative_distance(low.final_parameters, fp32.final_parameters, fp32.initial_parameters), 3e-4));
  return verdict;
}

}  // namespace mgp

// What a full-state file holds, as values: to write, to read, and to hold against the model of this run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <unordered_map>
#include <utility>

#include "common/checkpoint.hpp"
#include "common/error.hpp"
#include "common/input_file.hpp"

namespace mgp {
namespace {

constexpr const char* kFormat = "multi-gpu-playground full state 1";
constexpr const char* kFormatOfAnyVersion = "multi-gpu-playground full state ";
constexpr const char* kFlag = "--load";

struct Size {
  const char* name;
  int64_t ModelConfig::*member;
};
constexpr Size kSizes[] = {
    {"vocab_size", &ModelConfig::vocab_size}, {"seq_len", &ModelConfig::seq_len}, {"dim", &ModelConfig::dim},
    {"heads", &ModelConfig::heads},           {"layers", &ModelConfig::layers},   {"mlp_dim", &ModelConfig::mlp_dim},
    {"classes", &ModelConfig::classes}};

const char* kind_name(ModelKind kind) { return kind == ModelKind::classifier ? "classifier" : "mlp"; }

[[noreturn]] void fail(const std::string& path, const std::string& text) {
  throw UsageError(std::string(kFlag) + " " + path + ": " + text);
}

// ── to values ──
PtValue to_value(const NamedTensors& tensors) {
  PtValue::Dict dict;
  for (const auto& [name, tensor] : tensors) dict.emplace_back(name, PtValue{tensor});
  return {std::move(dict)};
}

PtValue to_value(const at::Tensor& tensor) { return tensor.defined() ? PtValue{tensor} : PtValue{}; }

PtValue to_value(const TrainingState& training) {
  PtValue::List bucket_order;
  for (const std::string& name : training.bucket_order) bucket_order.push_back({name});
  // The file format has no unsigned numbers: a seed of 2^63 or more stands there as the negative number of the same
  // bits.
  return {PtValue::Dict{{"step", {training.step}},
                        {"seed", {static_cast<int64_t>(training.seed)}},
                        {"global_batch_size", {training.global_batch_size}},
                        {"next_sample", {training.next_sample}},
                        {"data", {training.data}},
                        {"precision", {training.precision}},
                        {"bucket_order", {std::move(bucket_order)}},
                        {"loss_scale", training.loss_scale ? PtValue{*training.loss_scale} : PtValue{}},
                        {"good_steps", {training.good_steps}},
                        {"rng_cpu", to_value(training.rng_cpu)},
                        {"rng_cuda", to_value(training.rng_cuda)}}};
}

PtValue to_value(const ModelConfig& config) {
  PtValue::Dict dict{{"kind", {std::string(kind_name(config.kind))}}};
  for (const Size& size : kSizes) dict.emplace_back(size.name, PtValue{config.*size.member});
  dict.emplace_back("dropout", PtValue{config.dropout});
  return {std::move(dict)};
}

// ── from values: the accessors throw RunError, which load_full_state turns into the one line of --load ──
const PtValue& entry(const PtValue& value, std::string_view key, std::string_view where) {
  value.dict(where);
  const PtValue* found = value.find(key);
  if (found == nullptr) throw RunError(fmt::format("{} has no entry {}", where, key));
  return *found;
}

NamedTensors to_tensors(const PtValue& value, const std::string& where) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : value.dict(where)) {
    tensors.emplace_back(name, tensor.tensor("entry " + printable(name) + " of " + where));
  }
  return tensors;
}

int64_t non_negative(const PtValue& value, const std::string& key) {
  const int64_t number = entry(value, key, "training").integer(key);
  if (number < 0) throw RunError("damaged: " + key + " is " + std::to_string(number));
  return number;
}

at::Tensor to_random_state(const PtValue& value, const std::string& key) {
  const PtValue& state = entry(value, key, "training");
  if (state.is_none()) return {};
  const at::Tensor& tensor = state.tensor(key);
  if (tensor.scalar_type() != at::kByte || tensor.dim() != 1) throw RunError("damaged: " + key + " is no random state");
  return tensor.contiguous();
}

TrainingState to_training(const PtValue& value) {
  TrainingState training;
  training.step = non_negative(value, "step");
  training.seed = static_cast<uint64_t>(entry(value, "seed", "training").integer("seed"));
  training.global_batch_size = non_negative(value, "global_batch_size");
  training.next_sample = non_negative(value, "next_sample");
  training.data = entry(value, "data", "training").text("data");
  if (training.data != "fresh" && training.data != "repeat")
    throw RunError("damaged: data is " + printable(training.data));
  training.precision = entry(value, "precision", "training").text("precision");
  for (const PtValue& name : entry(value, "bucket_order", "training").list("bucket_order")) {
    training.bucket_order.push_back(name.text("an entry of bucket_order"));
  }
  const PtValue& scale = entry(value, "loss_scale", "training");
  if (!scale.is_none()) {
    training.loss_scale = scale.number("loss_scale");
    if (!(*training.loss_scale > 0.0 && std::isfinite(*training.loss_scale))) {
      throw RunError(fmt::format("damaged: loss_scale is {}", *training.loss_scale));
    }
  }
  training.good_steps = non_negative(value, "good_steps");
  training.rng_cpu = to_random_state(value, "rng_cpu");
  training.rng_cuda = to_random_state(value, "rng_cuda");
  return training;
}

ModelConfig to_config(const PtValue& value) {
  ModelConfig config;
  const std::string& kind = entry(value, "kind", "config").text("kind");
  if (kind != "classifier" && kind != "mlp") throw RunError("is of the unknown model " + printable(kind));
  config.kind = kind == "mlp" ? ModelKind::mlp : ModelKind::classifier;
  for (const Size& size : kSizes) config.*size.member = entry(value, size.name, "config").integer(size.name);
  config.dropout = entry(value, "dropout", "config").number("dropout");
  return config;
}

using ByName = std::unordered_map<std::string, at::Tensor>;
ByName by_name(const NamedTensors& tensors) { return {tensors.begin(), tensors.end()}; }

/// Moments and counts belong to the weights beside them: the same names and shapes (counts are single numbers).
void check_belongs(const NamedTensors& moments, const NamedTensors& model, const char* what, bool single) {
  const ByName weights = by_name(model);
  if (moments.size() != model.size()) {
    throw RunError(
        fmt::format("damaged: optimizer/{} has {} entries for {} weights", what, moments.size(), model.size()));
  }
  for (const auto& [name, tensor] : moments) {
    const auto weight = weights.find(name);
    if (weight == weights.end())
      throw RunError(fmt::format("damaged: optimizer/{} has {}, which is no weight", what, printable(name)));
    if (single ? tensor.dim() != 0 : tensor.sizes() != weight->second.sizes()) {
      throw RunError(
          fmt::format("damaged: optimizer/{}/{} has the shape {}", what, printable(name), tensor.sizes().vec()));
    }
  }
}

FullState to_full_state(const PtValue& root) {
  FullState state;
  const PtValue* format = root.find("format");
  const std::string* text = format == nullptr ? nullptr : std::get_if<std::string>(&format->value);
  if (text == nullptr) {  // from Python: the weights alone, or the weights in a dictionary with other things
    const PtValue* model = root.find("model");
    state.model =
        to_tensors(model != nullptr && model->value.index() == root.value.index() ? *model : root, "its state dict");
    if (state.model.empty()) throw RunError("holds no weights");
    return state;
  }
  if (*text != kFormat) {
    const bool is_ours = text->rfind(kFormatOfAnyVersion, 0) == 0;
    throw RunError((is_ours ? "was written by another version, as \"" : "is of the foreign format \"") +
                   printable(*text) + "\", this one reads \"" + kFormat + "\"");
  }
  state.config = to_config(entry(root, "config", "the file"));
  state.training = to_training(entry(root, "training", "the file"));
  state.model = to_tensors(entry(root, "model", "the file"), "model");
  const PtValue& optimizer = entry(root, "optimizer", "the file");
  state.exp_avg = to_tensors(entry(optimizer, "exp_avg", "optimizer"), "optimizer/exp_avg");
  state.exp_avg_sq = to_tensors(entry(optimizer, "exp_avg_sq", "optimizer"), "optimizer/exp_avg_sq");
  state.steps = to_tensors(entry(optimizer, "step", "optimizer"), "optimizer/step");
  check_belongs(state.exp_avg, state.model, "exp_avg", false);
  check_belongs(state.exp_avg_sq, state.model, "exp_avg_sq", false);
  check_belongs(state.steps, state.model, "step", true);
  return state;
}

/// Whether each value of `from` is a value of `to`.
bool fits_exactly(at::ScalarType from, at::ScalarType to) {
  return at::isFloatingType(from) && at::isFloatingType(to) && at::promoteTypes(from, to) == to;
}

}  // namespace

PtValue full_state_value(const FullState& state) {
  PtValue::Dict optimizer{{"exp_avg", to_value(state.exp_avg)},
                          {"exp_avg_sq", to_value(state.exp_avg_sq)},
                          {"step", to_value(state.steps)}};
  return {PtValue::Dict{{"model", to_value(state.model)},
                        {"optimizer", {std::move(optimizer)}},
                        {"training", to_value(state.training)},
                        {"config", to_value(state.config)},
                        {"format", {std::string(kFormat)}}}};
}

FullState full_state_from(const PtValue& value) { return to_full_state(value); }

FullState load_full_state(const std::string& path) {
  const PtValue root = read_pt(path, kFlag);
  try {
    return to_full_state(root);
  } catch (const RunError& error) {
    fail(path, error.what());
  }
}

void check_full_state(const FullState& state, const ModelConfig& config, at::ScalarType dtype,
                      const std::string& path) {
  std::vector<std::string> differences;
  if (state.config.vocab_size != 0) {  // else the file says nothing about sizes
    if (state.config.kind != config.kind) {
      differences.push_back(
          fmt::format("model is {} in the file, {} here", kind_name(state.config.kind), kind_name(config.kind)));
    }
    for (const Size& size : kSizes) {
      const int64_t saved = state.config.*size.member, here = config.*size.member;
      if (saved != here) differences.push_back(fmt::format("{} is {} in the file, {} here", size.name, saved, here));
    }
  }

  ByName saved = by_name(state.model);
  std::vector<std::string> missing, extra, shapes, types;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    const auto found = saved.find(parameter.name);
    if (found == saved.end()) {
      missing.push_back(parameter.name);
      continue;
    }
    if (found->second.sizes() != at::IntArrayRef(parameter.shape)) {
      shapes.push_back(
          fmt::format("{} is {} in the file, {} here", parameter.name, found->second.sizes().vec(), parameter.shape));
    }
    saved.erase(found);
  }
  for (const auto& [name, tensor] : state.model) {
    if (saved.count(name) != 0) extra.push_back(printable(name));
  }
  const auto check_types = [&](const NamedTensors& tensors, at::ScalarType here, const char* what) {
    for (const auto& [name, tensor] : tensors) {
      if (fits_exactly(tensor.scalar_type(), here)) continue;
      types.push_back(fmt::format("{}{} is {} in the file, {} here", what, printable(name),
                                  at::toString(tensor.scalar_type()), at::toString(here)));
    }
  };
  check_types(state.model, dtype, "");
  check_types(state.exp_avg, dtype, "exp_avg of ");
  check_types(state.exp_avg_sq, dtype, "exp_avg_sq of ");
  check_types(state.steps, at::kFloat, "step of ");

  if (!missing.empty()) differences.push_back(fmt::format("{} missing: {}", missing.size(), fmt::join(missing, ", ")));
  if (!extra.empty())
    differences.push_back(fmt::format("{} not in this model: {}", extra.size(), fmt::join(extra, ", ")));
  if (!shapes.empty())
    differences.push_back(fmt::format("{} of another shape: {}", shapes.size(), fmt::join(shapes, ", ")));
  if (!types.empty()) {
    differences.push_back(
        fmt::format("{} that cannot be converted exactly (--precision): {}", types.size(), fmt::join(types, ", ")));
  }
  if (!differences.empty()) fail(path, fmt::format("does not fit this run: {}", fmt::join(differences, "; ")));
}

}  // namespace mgp

#include "common/shard_index.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <variant>

#include "common/atomic_file.hpp"
#include "common/error.hpp"
#include "common/input_file.hpp"
#include "common/published_folder.hpp"

namespace mgp {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "multi-gpu-playground sharded state 1";
constexpr uint64_t kLargestIndex = 100'000'000;
constexpr int kDeepest = 8;
constexpr int64_t kMostElements = int64_t{1} << 56;
constexpr const char* kHex = "hex";

// ── to JSON ──
std::string hex(const at::Tensor& bytes) {
  if (bytes.scalar_type() != at::kByte || bytes.dim() != 1) throw RunError("index.json has no place for a tensor");
  const at::Tensor flat = bytes.to(at::kCPU).contiguous();
  std::string text;
  for (int64_t i = 0; i < flat.numel(); ++i) text += fmt::format("{:02x}", flat.const_data_ptr<uint8_t>()[i]);
  return text;
}

struct ToJson {
  Json operator()(std::monostate) const { return nullptr; }
  Json operator()(const at::Tensor& tensor) const { return {{kHex, hex(tensor)}}; }
  Json operator()(const PtValue::List& list) const {
    Json json = Json::array();
    for (const PtValue& value : list) json.push_back(std::visit(*this, value.value));
    return json;
  }
  Json operator()(const PtValue::Dict& dict) const {
    Json json = Json::object();
    for (const auto& [key, value] : dict) json[key] = std::visit(*this, value.value);
    return json;
  }
  template <typename Scalar>
  Json operator()(const Scalar& scalar) const {
    return scalar;
  }
};

// ── from JSON: complaints are RunErrors, which read_shard_index turns into the one line of --load ──
const Json& entry(const Json& json, const char* key, const std::string& where) {
  if (!json.is_object() || !json.contains(key)) throw RunError(fmt::format("{} has no entry {}", where, key));
  return json[key];
}

int64_t whole(const Json& json, const std::string& what) {
  const bool fits =
      json.is_number_unsigned() ? json.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()} : false;
  if (!fits) throw RunError(fmt::format("damaged: {} is not a whole number", what));
  return json.get<int64_t>();
}

std::string text(const Json& json, const std::string& what) {
  if (!json.is_string()) throw RunError(fmt::format("damaged: {} is not a text", what));
  return json.get<std::string>();
}

const Json& list(const Json& json, const std::string& what) {
  if (!json.is_array()) throw RunError(fmt::format("damaged: {} is not a list", what));
  return json;
}

at::Tensor bytes_from(const std::string& digits) {
  if (digits.size() % 2 != 0 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw RunError("damaged: a random state is not written as bytes");
  }
  const at::Tensor bytes = at::empty({static_cast<int64_t>(digits.size() / 2)}, at::kByte);
  const auto digit = [&](size_t i) { return digits[i] <= '9' ? digits[i] - '0' : digits[i] - 'a' + 10; };
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes.data_ptr<uint8_t>()[i / 2] = static_cast<uint8_t>(digit(i) * 16 + digit(i + 1));
  }
  return bytes;
}

PtValue from_json(const Json& json) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return {json.get<bool>()};
  if (json.is_number_float()) return {json.get<double>()};
  if (json.is_string()) return {json.get<std::string>()};
  if (json.is_number_unsigned()) return {whole(json, "a number")};
  if (json.is_number_integer()) return {json.get<int64_t>()};
  if (json.is_array()) {
    PtValue::List values;
    for (const Json& value : json) values.push_back(from_json(value));
    return {std::move(values)};
  }
  if (json.size() == 1 && json.contains(kHex)) return {bytes_from(text(json[kHex], kHex))};
  PtValue::Dict dict;
  for (const auto& [key, value] : json.items()) dict.emplace_back(key, from_json(value));
  return {std::move(dict)};
}

ParameterShape parameter_from(const Json& json) {
  ParameterShape parameter;
  parameter.name = text(entry(json, "name", "a parameter"), "the name of a parameter");
  const std::string shown = printable(parameter.name);
  int64_t numel = 1;
  for (const Json& size : list(entry(json, "shape", shown), "the shape of " + shown)) {
    parameter.shape.push_back(whole(size, "the shape of " + shown));
    if (__builtin_mul_overflow(numel, parameter.shape.back(), &numel) || numel > kMostElements || numel == 0) {
      throw RunError(fmt::format("damaged: {} has an impossible shape", shown));
    }
  }
  if (parameter.shape.empty() || parameter.shape.size() > 64) {
    throw RunError(fmt::format("damaged: {} has {} dimensions", shown, parameter.shape.size()));
  }
  return parameter;
}

ShardIndex index_from(const Json& json) {
  const std::string format = text(entry(json, "format", "it"), "format");
  if (format != kFormat) {
    throw RunError(fmt::format("is of the format \"{}\", this one reads \"{}\"", printable(format), kFormat));
  }
  ShardIndex index;
  index.ranks = whole(entry(json, "ranks", "it"), "ranks");
  const Json& count = entry(json, "step_count", "it");
  index.step_count = count.is_number() ? count.get<double>() : -1.0;
  if (!(index.step_count >= 0.0 && std::isfinite(index.step_count))) {
    throw RunError("damaged: step_count is no number of steps");
  }
  std::set<std::string> names;
  for (const Json& file : list(entry(json, "files", "it"), "files")) {
    const std::string name = text(entry(file, "name", "a file"), "the name of a file");
    // A name with a path in it would read a file outside of the folder.
    if (!is_shard_file_name(name)) throw RunError(fmt::format("damaged: {} is no name of a shard", printable(name)));
    if (!names.insert(name).second) throw RunError(fmt::format("damaged: {} stands there twice", name));
    index.files.push_back({name, static_cast<uint64_t>(whole(entry(file, "bytes", name), "the size of " + name))});
  }
  names.clear();
  for (const Json& parameter : list(entry(json, "parameters", "it"), "parameters")) {
    index.parameters.push_back(parameter_from(parameter));
    const std::string& name = index.parameters.back().name;
    if (!names.insert(name).second) throw RunError(fmt::format("damaged: {} stands there twice", printable(name)));
  }
  index.config = from_json(entry(json, "config", "it"));
  index.training = from_json(entry(json, "training", "it"));
  return index;
}

}  // namespace

void write_shard_index(const std::string& path, const ShardIndex& index) {
  Json json = {{"format", kFormat}, {"ranks", index.ranks}, {"step_count", index.step_count}};
  json["files"] = Json::array();
  for (const ShardIndex::File& file : index.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  json["parameters"] = Json::array();
  for (const ParameterShape& parameter : index.parameters) {
    json["parameters"].push_back({{"name", parameter.name}, {"shape", parameter.shape}});
  }
  json["config"] = std::visit(ToJson{}, index.config.value);
  json["training"] = std::visit(ToJson{}, index.training.value);
  std::string bytes;
  try {
    bytes = json.dump(1) + "\n";
  } catch (const Json::exception&) {
    throw RunError("cannot write " + path + ": a name is not valid UTF-8");
  }
  AtomicFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

ShardIndex read_shard_index(const std::string& path, const std::string& flag) {
  const InputFile file(path, flag);
  if (file.size() > kLargestIndex) file.fail("is too large for the index of a checkpoint");
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, bytes.data(), bytes.size(), "the index");
  const auto check = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) file.damaged("is nested too deeply");
    return true;
  };
  try {
    return index_from(Json::parse(bytes, check));
  } catch (const Json::exception&) {
    file.damaged("is not JSON");
  } catch (const RunError& error) {
    file.fail(error.what());
  }
}

}  // namespace mgp

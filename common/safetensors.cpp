#include "common/safetensors.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "common/atomic_file.hpp"
#include "common/error.hpp"
#include "common/input_file.hpp"

namespace mgp {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLargestHeader = 100'000'000;  // the limit of the reference implementation
constexpr int kDeepest = 3;                       // {name: {"shape": [...]}}
constexpr uint64_t kMostElements = uint64_t{1} << 60;
constexpr const char* kMetadata = "__metadata__";

struct TypeName {
  const char* name;
  at::ScalarType type;
};
constexpr TypeName kTypes[] = {{"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
                               {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
                               {"U8", at::kByte},    {"BOOL", at::kBool}};

struct Entry {
  std::string name;
  at::ScalarType type = at::kFloat;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes after the header
};

/// A whole number from the header that is not negative, or `file` complains.
uint64_t whole(const Json& number, const std::string& what, const InputFile& file) {
  if (!number.is_number_unsigned()) file.damaged(what + " is not a whole number");
  return number.get<uint64_t>();
}

Entry parse_entry(const std::string& name, const Json& json, uint64_t data_bytes, const InputFile& file) {
  const std::string shown = printable(name);
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() || !json.contains("shape") ||
      !json["shape"].is_array() || !json.contains("data_offsets") || !json["data_offsets"].is_array() ||
      json["data_offsets"].size() != 2) {
    file.damaged("its header does not describe " + shown + " by dtype, shape and data_offsets");
  }
  Entry entry;
  entry.name = name;
  const std::string type_name = json["dtype"].get<std::string>();
  const auto* type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.name == type_name; });
  if (type == std::end(kTypes))
    file.fail(shown + " is of type " + printable(type_name) + ", which this reader does not know");
  entry.type = type->type;

  if (json["shape"].size() > 64) file.damaged(shown + " has " + std::to_string(json["shape"].size()) + " dimensions");
  uint64_t bytes = at::elementSize(entry.type);
  uint64_t extent = 1;  // as if no size were 0: bounds the sizes of empty tensors too
  for (const Json& size : json["shape"]) {
    const uint64_t number = whole(size, "the shape of " + shown, file);
    if (__builtin_mul_overflow(extent, std::max<uint64_t>(number, 1), &extent) || extent > kMostElements) {
      file.damaged(shown + " has more elements than the file");
    }
    bytes *= number;  // cannot overflow: extent is below 2^60 and an element has at most 8 bytes
    entry.shape.push_back(static_cast<int64_t>(number));
  }
  entry.begin = whole(json["data_offsets"][0], "the offset of " + shown, file);
  entry.end = whole(json["data_offsets"][1], "the offset of " + shown, file);
  if (entry.begin > entry.end || entry.end > data_bytes) file.damaged(shown + " ends after the end of the file");
  if (entry.end - entry.begin != bytes) {
    file.damaged(shown + " has " + std::to_string(entry.end - entry.begin) + " bytes, its shape needs " +
                 std::to_string(bytes));
  }
  return entry;
}

/// Parses without trusting: nesting is bounded, and a name that is there twice is refused instead of losing one of
/// both.
Json parse_header(const std::string& text, const InputFile& file) {
  std::array<std::set<std::string>, kDeepest + 1> keys;  // seen at each depth
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDeepest) file.damaged("its header is nested too deeply");
    const auto level = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::object_start && depth < kDeepest) keys[level + 1].clear();
    if (event == Json::parse_event_t::key && !keys[level].insert(parsed.get<std::string>()).second) {
      file.damaged("its header names " + printable(parsed.get<std::string>()) + " twice");
    }
    return true;
  };
  try {
    Json header = Json::parse(text, check);
    if (!header.is_object()) file.damaged("its header is not a JSON object");
    return header;
  } catch (const Json::exception&) {
    file.damaged("its header is not JSON");
  }
}

NamedTensors read(const InputFile& file, std::map<std::string, std::string>* metadata) {
  unsigned char length[8] = {};
  if (file.size() < sizeof length) file.fail("not a safetensors file (shorter than its header)");
  file.read_at(0, length, sizeof length, "the header length");
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  const uint64_t rest = file.size() - sizeof length;
  if (header_bytes > kLargestHeader)
    file.fail("not a safetensors file (its header would have " + std::to_string(header_bytes) + " bytes)");
  if (header_bytes > rest) file.damaged("the header ends after the end of the file");
  std::string text(static_cast<size_t>(header_bytes), '\0');
  file.read_at(sizeof length, text.data(), text.size(), "the header");
  if (text.empty() || text[0] != '{') file.fail("not a safetensors file (no JSON header)");

  const Json header = parse_header(text, file);
  const uint64_t data_bytes = rest - header_bytes;
  std::vector<Entry> entries;
  for (const auto& [name, json] : header.items()) {
    if (name != kMetadata) {
      entries.push_back(parse_entry(name, json, data_bytes, file));
      continue;
    }
    if (!json.is_object()) file.damaged("its metadata is not a JSON object");
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) file.damaged("its metadata " + printable(key) + " is not a text");
      if (metadata != nullptr) (*metadata)[key] = value.get<std::string>();
    }
  }

  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at)
      file.damaged(printable(entry.name) + " overlaps another tensor, or there is a gap before it");
    at = entry.end;
  }
  if (at != data_bytes) file.damaged(std::to_string(data_bytes - at) + " bytes after the last tensor belong to none");

  NamedTensors tensors;
  for (const Entry& entry : entries) {
    at::Tensor tensor;
    try {
      tensor = at::empty(entry.shape, at::TensorOptions().dtype(entry.type));
    } catch (const c10::Error&) {
      file.fail("needs " + std::to_string(entry.end - entry.begin) +
                " bytes of memory for one tensor, more than can be had");
    }
    const size_t bytes = static_cast<size_t>(entry.end - entry.begin);
    file.read_at(sizeof length + header_bytes + entry.begin, tensor.data_ptr(), bytes, printable(entry.name));
    if (entry.type == at::kBool) {  // a bool of another value is undefined behaviour in C++
      const auto* values = static_cast<const unsigned char*>(tensor.data_ptr());
      if (std::any_of(values, values + bytes, [](unsigned char byte) { return byte > 1; })) {
        file.damaged(printable(entry.name) + " is a bool tensor with values other than 0 and 1");
      }
    }
    tensors.emplace_back(entry.name, tensor);
  }
  return tensors;
}

}  // namespace

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  NamedTensors ordered = tensors;
  for (const auto& [name, tensor] : ordered) {
    if (!tensor.defined() || tensor.is_meta() || tensor.layout() != at::kStrided) {
      throw RunError("cannot save " + name + ": not a dense tensor with values");
    }
  }
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return a.second.element_size() > b.second.element_size(); });

  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : ordered) {
    const at::ScalarType scalar_type = tensor.scalar_type();
    const auto* type =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.type == scalar_type; });
    if (type == std::end(kTypes))
      throw RunError("cannot save " + name + ": no safetensors type for " + at::toString(scalar_type));
    if (name == kMetadata || header.contains(name)) throw RunError("cannot save two tensors of the name " + name);
    const uint64_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", type->name}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw RunError("cannot write " + path + ": a name or its metadata is not valid UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');

  AtomicFile file(path);
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(uint64_t{text.size()} >> (8 * i));
  file.write(length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto& [name, tensor] : ordered) {
    const at::Tensor data = tensor.detach().to(at::kCPU).contiguous();
    file.write(data.const_data_ptr(), data.nbytes());
  }
  file.commit();
}

NamedTensors read_safetensors(const std::string& path, const std::string& flag,
                              std::map<std::string, std::string>* metadata) {
  const InputFile file(path, flag);
  try {
    return read(file, metadata);
  } catch (const std::bad_alloc&) {
    file.fail("does not fit into memory");
  }
}

}  // namespace mgp

// read_pt: from zip records and a pickle to values. See zip_reader.hpp and pickle_reader.hpp for the layers below.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <unordered_map>

#include "common/error.hpp"
#include "common/pickle_reader.hpp"
#include "common/pt_file.hpp"
#include "common/zip_reader.hpp"

namespace mgp {
namespace {

using Kind = Pickle::Kind;
using Node = Pickle::Node;

constexpr uint64_t kLargestPickle = 64 << 20;
constexpr size_t kDeepest = 100;           // nested containers
constexpr size_t kMostDimensions = 64;     // what a tensor can have
constexpr int64_t kMostEmpty = 1ll << 40;  // bounds the other sizes of a tensor that has a 0 among its sizes

const std::map<std::string, at::ScalarType>& storage_types() {
  static const std::map<std::string, at::ScalarType> types = {
      {"torch.DoubleStorage", at::kDouble},     {"torch.FloatStorage", at::kFloat}, {"torch.HalfStorage", at::kHalf},
      {"torch.BFloat16Storage", at::kBFloat16}, {"torch.LongStorage", at::kLong},   {"torch.IntStorage", at::kInt},
      {"torch.ShortStorage", at::kShort},       {"torch.CharStorage", at::kChar},   {"torch.ByteStorage", at::kByte},
      {"torch.BoolStorage", at::kBool}};
  return types;
}

bool is_allowed(const std::string& name) {
  static const std::set<std::string> functions = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
                                                  "torch.Size", "collections.OrderedDict"};
  return functions.count(name) != 0 || storage_types().count(name) != 0;
}

class Reader {
 public:
  Reader(const std::string& path, const std::string& flag) : zip_(path, flag), file_(zip_.file()) {}

  PtValue run() {
    const std::string pickle_name = find_pickle();
    const ZipReader::Record& record = *zip_.find(pickle_name);
    std::string bytes(static_cast<size_t>(record.size), '\0');
    zip_.read(pickle_name, record, bytes.data());
    // A text used in many places is one node but many copies; this bounds the copies.
    text_left_ = 16 * bytes.size() + (1 << 20);
    pickle_ = read_pickle(bytes, is_allowed, file_);
    return convert(pickle_.root);
  }

 private:
  std::string where() const {
    std::string text;
    for (const std::string& part : path_) text += (text.empty() ? "" : "/") + part;
    return text.empty() ? "the file's value" : printable(text);
  }
  [[noreturn]] void damaged(const std::string& text) const { file_.damaged(where() + " " + text); }

  /// Also sets prefix_, the folder that all records of a PyTorch file lie in.
  std::string find_pickle() {
    std::string found;
    for (const auto& [name, record] : zip_.records()) {
      const size_t slash = name.find('/');
      if (slash == std::string::npos || name.substr(slash) != "/data.pkl") continue;
      if (!found.empty()) file_.damaged("it holds two pickles, " + printable(found) + " and " + printable(name));
      found = name;
      prefix_ = name.substr(0, slash + 1);
    }
    if (found.empty()) file_.fail("not a PyTorch file (a zip archive without data.pkl)");
    if (zip_.find(prefix_ + "constants.pkl") != nullptr) {
      file_.fail("is a TorchScript archive (torch::save or torch.jit.save); save a dict of tensors with torch.save");
    }
    if (const ZipReader::Record* order = zip_.find(prefix_ + "byteorder")) {
      char text[6] = {};
      if (order->size == sizeof text) zip_.read(prefix_ + "byteorder", *order, text);
      if (std::memcmp(text, "little", sizeof text) != 0) file_.fail("was not written on a little-endian machine");
    }
    if (zip_.find(found)->size > kLargestPickle) file_.fail("its pickle is larger than 64 MiB, tensors apart");
    return found;
  }

  // ── values ──
  PtValue convert(uint32_t index) {
    const Node& node = pickle_.nodes[index];
    if (++values_ > kMostPickleNodes)
      damaged("is one value too many: " + std::to_string(kMostPickleNodes) + " are read");
    switch (node.kind) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return {node.integer != 0};
      case Kind::integer:
        return {node.integer};
      case Kind::real:
        return {node.real};
      case Kind::text:
        return {copy(node.text)};
      case Kind::list:
      case Kind::tuple:
        return {convert_list(node)};
      case Kind::dictionary:
        return {convert_dict(node)};
      case Kind::call:
        return convert_call(index);
      case Kind::global:
      case Kind::persistent:
        break;
    }
    damaged("is a bare " + (node.kind == Kind::global ? printable(node.text) : "storage") + ", not a value");
  }

  const std::string& copy(const std::string& text) {
    if (text.size() > text_left_) damaged("repeats more text than the file's size suggests");
    text_left_ -= text.size();
    return text;
  }

  void enter(std::string part) {
    if (path_.size() >= kDeepest) file_.damaged("values nested more than " + std::to_string(kDeepest) + " deep");
    path_.push_back(std::move(part));
  }

  PtValue::List convert_list(const Node& node) {
    PtValue::List list;
    for (size_t i = 0; i < node.items.size(); ++i) {
      enter(std::to_string(i));
      list.push_back(convert(node.items[i]));
      path_.pop_back();
    }
    return list;
  }

  PtValue::Dict convert_dict(const Node& node) {
    PtValue::Dict dict;
    std::unordered_map<std::string, size_t> places;
    for (size_t i = 0; i < node.items.size(); i += 2) {
      const Node& key = pickle_.nodes[node.items[i]];
      if (key.kind != Kind::text && key.kind != Kind::integer) damaged("has a key that is neither text nor integer");
      const std::string name = key.kind == Kind::text ? copy(key.text) : std::to_string(key.integer);
      enter(name);
      PtValue value = convert(node.items[i + 1]);
      const auto [place, is_new] = places.emplace(name, dict.size());
      if (!is_new) damaged("is there twice");
      path_.pop_back();
      dict.emplace_back(name, std::move(value));
    }
    return dict;
  }

  PtValue convert_call(uint32_t index) {
    const Node& node = pickle_.nodes[index];
    const std::string& function = pickle_.nodes[node.items[0]].text;
    const std::vector<uint32_t>& arguments = pickle_.nodes[node.items[1]].items;
    if (function == "torch.Size" && arguments.size() == 1) {
      const Node& sizes = pickle_.nodes[arguments[0]];
      if (sizes.kind != Kind::tuple && sizes.kind != Kind::list) damaged("is a size that is not a tuple");
      return {convert_list(sizes)};
    }
    if (function == "torch._utils._rebuild_parameter" && !arguments.empty()) {
      if (pickle_.nodes[arguments[0]].kind != Kind::call) damaged("is a parameter without a tensor");
      enter("data");  // so that parameters of parameters of ... come to an end
      PtValue value = convert(arguments[0]);
      path_.pop_back();
      value.tensor("");
      return value;
    }
    if (function != "torch._utils._rebuild_tensor_v2") damaged("calls " + printable(function) + " in an unknown way");
    const auto known = tensors_.find(index);
    if (known != tensors_.end()) return {known->second};  // one tensor in two places stays one
    return {tensors_[index] = rebuild_tensor(arguments)};
  }

  // ── tensors ──
  std::vector<int64_t> integers(uint32_t index, const char* what) const {
    const Node& node = pickle_.nodes[index];
    if (node.kind != Kind::tuple || node.items.size() > kMostDimensions) damaged(std::string("has no proper ") + what);
    std::vector<int64_t> numbers;
    for (const uint32_t item : node.items) numbers.push_back(non_negative(item, what));
    return numbers;
  }
  int64_t non_negative(uint32_t index, const char* what) const {
    const Node& node = pickle_.nodes[index];
    if (node.kind != Kind::integer) damaged(std::string("has no proper ") + what);
    if (node.integer < 0) damaged(std::string("has the ") + what + " " + std::to_string(node.integer));
    return node.integer;
  }

  /// Arguments: storage, offset, sizes, strides, requires_grad, hooks, and in some versions metadata.
  at::Tensor rebuild_tensor(const std::vector<uint32_t>& arguments) {
    if (arguments.size() < 6 || arguments.size() > 7) damaged("is a tensor with a wrong number of arguments");
    if (arguments.size() == 7) {
      const Node& metadata = pickle_.nodes[arguments[6]];
      if (metadata.kind != Kind::none && !metadata.items.empty()) damaged("is a tensor with metadata");
    }
    const at::Tensor storage = read_storage(arguments[0]);
    const int64_t offset = non_negative(arguments[1], "offset");
    const std::vector<int64_t> sizes = integers(arguments[2], "size");
    const std::vector<int64_t> strides = integers(arguments[3], "stride");
    if (sizes.size() != strides.size()) damaged("has more sizes than strides, or fewer");

    // Every number is checked before LibTorch sees it: its own arithmetic trusts them not to overflow.
    const bool is_empty = std::count(sizes.begin(), sizes.end(), 0) != 0;
    const int64_t most = is_empty ? kMostEmpty : storage.numel();
    int64_t elements = 1;
    int64_t last = offset;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) continue;
      int64_t reach = 0;
      if (__builtin_mul_overflow(elements, sizes[i], &elements) || elements > most) {
        damaged("has more elements than its storage");
      }
      if (!is_empty &&
          (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) || __builtin_add_overflow(last, reach, &last))) {
        damaged("reaches over the end of its storage");
      }
    }
    if (is_empty) return at::empty(sizes, storage.options());
    if (last >= storage.numel()) damaged("reaches over the end of its storage");
    return storage.as_strided(sizes, strides, offset);
  }

  /// The storage as a tensor of one dimension, read once however many tensors use it. Its id is a tuple: "storage",
  /// type, key (the record's name), device that it was on (ignored: trial B37), number of elements.
  at::Tensor read_storage(uint32_t index) {
    const Node& node = pickle_.nodes[index];
    if (node.kind != Kind::persistent) damaged("is a tensor without a storage");
    const Node& id = pickle_.nodes[node.items[0]];
    if (id.kind != Kind::tuple || id.items.size() != 5) damaged("has a storage that is not described as PyTorch does");
    const Node& type = pickle_.nodes[id.items[1]];
    const Node& key = pickle_.nodes[id.items[2]];
    const auto dtype = storage_types().find(type.text);
    if (pickle_.nodes[id.items[0]].text != "storage" || type.kind != Kind::global || dtype == storage_types().end() ||
        key.kind != Kind::text) {
      damaged("has a storage that is not described as PyTorch does");
    }
    const int64_t elements = non_negative(id.items[4], "number of elements");

    const auto known = storages_.find(key.text);
    if (known != storages_.end()) {
      if (known->second.numel() != elements || known->second.scalar_type() != dtype->second) {
        damaged("uses storage " + printable(key.text) + " with another type or size than before");
      }
      return known->second;
    }
    const std::string name = prefix_ + "data/" + key.text;
    const ZipReader::Record* record = zip_.find(name);
    if (record == nullptr) damaged("lies in record data/" + printable(key.text) + ", which is missing");
    const uint64_t item = at::elementSize(dtype->second);
    if (record->size % item != 0 || record->size / item != static_cast<uint64_t>(elements)) {
      file_.damaged("record data/" + printable(key.text) + " has " + std::to_string(record->size) + " bytes, not " +
                    std::to_string(elements) + " elements of " + std::to_string(item));
    }
    at::Tensor storage;
    try {
      storage = at::empty({elements}, at::TensorOptions().dtype(dtype->second));
    } catch (const c10::Error&) {
      file_.fail("needs " + std::to_string(record->size) + " bytes of memory for one tensor, more than can be had");
    }
    zip_.read("data/" + key.text, *record, storage.data_ptr());
    if (dtype->second == at::kBool) {  // a bool of another value is undefined behaviour in C++
      const auto* bytes = static_cast<const unsigned char*>(storage.data_ptr());
      if (std::any_of(bytes, bytes + elements, [](unsigned char byte) { return byte > 1; })) {
        damaged("is a bool tensor with values other than 0 and 1");
      }
    }
    return storages_[key.text] = storage;
  }

  ZipReader zip_;
  const InputFile& file_;
  std::string prefix_;
  Pickle pickle_;
  std::vector<std::string> path_;                         // keys and indices down to the current value
  std::unordered_map<uint32_t, at::Tensor> tensors_;      // by node
  std::unordered_map<std::string, at::Tensor> storages_;  // by key
  uint64_t values_ = 0;
  uint64_t text_left_ = 0;
};

}  // namespace

PtValue read_pt(const std::string& path, const std::string& flag) {
  try {
    return Reader(path, flag).run();
  } catch (const std::bad_alloc&) {
    throw UsageError(flag + " " + path + ": does not fit into memory");
  }
}

}  // namespace mgp

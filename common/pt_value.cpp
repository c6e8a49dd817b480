#include <fmt/format.h>

#include "common/error.hpp"
#include "common/pt_file.hpp"

namespace mgp {
namespace {

const char* kind_of(const PtValue& value) {
  static constexpr const char* kKinds[] = {"None",   "a bool",   "an integer", "a number",
                                           "a text", "a tensor", "a list",     "a dictionary"};
  return kKinds[value.value.index()];
}

template <typename T>
const T& get(const PtValue& value, std::string_view where, const char* wanted) {
  if (const T* found = std::get_if<T>(&value.value)) return *found;
  throw RunError(fmt::format("{} is {}, not {}", where, kind_of(value), wanted));
}

}  // namespace

const PtValue::Dict& PtValue::dict(std::string_view where) const { return get<Dict>(*this, where, "a dictionary"); }
const PtValue::List& PtValue::list(std::string_view where) const { return get<List>(*this, where, "a list"); }
const at::Tensor& PtValue::tensor(std::string_view where) const { return get<at::Tensor>(*this, where, "a tensor"); }
int64_t PtValue::integer(std::string_view where) const { return get<int64_t>(*this, where, "an integer"); }
const std::string& PtValue::text(std::string_view where) const { return get<std::string>(*this, where, "a text"); }

double PtValue::number(std::string_view where) const {
  if (const int64_t* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  return get<double>(*this, where, "a number");
}

const PtValue* PtValue::find(std::string_view key) const {
  if (const Dict* entries = std::get_if<Dict>(&value)) {
    for (const auto& [name, entry] : *entries) {
      if (name == key) return &entry;
    }
  }
  return nullptr;
}

}  // namespace mgp

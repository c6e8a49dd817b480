// The file format of torch.save (a zip of stored records with a pickle in it), written and read without trusting it.
//
// Written so that Python's torch.load(path, weights_only=True) reads it: a plain dict of str, int, float, bool, lists
// and tensors. Read with a bounded reader of our own: LibTorch's unpickler believes the sizes in a file, this one
// checks every offset, size, count and opcode against the file before it allocates (a damaged or hostile file gives one
// clear line).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mgp {

/// A value of a .pt file. Dictionaries keep their order.
struct PtValue {
  using List = std::vector<PtValue>;
  using Dict = std::vector<std::pair<std::string, PtValue>>;
  std::variant<std::monostate, bool, int64_t, double, std::string, at::Tensor, List, Dict> value;

  bool is_none() const { return value.index() == 0; }
  const Dict& dict(std::string_view where) const;  ///< throws RunError naming `where` if it is another type
  const List& list(std::string_view where) const;
  const at::Tensor& tensor(std::string_view where) const;
  int64_t integer(std::string_view where) const;
  double number(std::string_view where) const;
  const std::string& text(std::string_view where) const;
  const PtValue* find(std::string_view key) const;  ///< nullptr if absent or not a dict
};

/// Gives the values of a placeholder when its turn comes; `where` is its place, such as "model/encoder.norm.weight".
using PtSource = std::function<at::Tensor(const std::string& where, const at::Tensor& placeholder)>;

/// Writes `root` to `path` (atomic_file.hpp). Tensors may be on any device and of any layout; they are copied to
/// contiguous CPU memory one at a time while they are streamed out, so host memory never holds a second model. Of a
/// view only its own elements are written. One tensor under two names (tied weights) is written once.
///
/// A tensor on the meta device is a placeholder that has only a shape and a dtype: `source` is asked for its values
/// when the file has reached it, in the order of `root`, and they are dropped again before the next one. That is how
/// shards are gathered unit by unit. Throws RunError: cannot be written (errno text), or a value that has no place in
/// such a file.
void write_pt(const std::string& path, const PtValue& root, const PtSource& source = {});

/// Reads a file that write_pt or Python's torch.save of dicts, OrderedDicts, lists, tuples, scalars and tensors wrote.
/// Tensors are on the CPU and own their memory; those that shared a storage in the file (tied weights) share it again.
/// Tuples become lists, whole-number keys become text. Throws UsageError (missing, unreadable, not such a file,
/// damaged: says which and where) naming `flag`.
PtValue read_pt(const std::string& path, const std::string& flag);

}  // namespace mgp

// The instructions of Python's pickle that torch.save writes for plain data, run without trusting them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/input_file.hpp"

namespace mgp {

/// What a pickle builds: a graph of nodes. Nothing in it is called or imported; a call is kept as (function, arguments)
/// for the reader of the file format to interpret. A node can be used in several places, and even within itself.
struct Pickle {
  enum class Kind : uint8_t {
    none,
    boolean,     ///< integer
    integer,     ///< integer
    real,        ///< real
    text,        ///< text
    list,        ///< items
    tuple,       ///< items
    dictionary,  ///< items: key, value, key, value, ...
    global,      ///< text: "module.name"
    call,        ///< items: function, arguments (a tuple)
    persistent   ///< items: the id that stands for something outside the pickle
  };
  struct Node {
    Kind kind = Kind::none;
    int64_t integer = 0;
    double real = 0.0;
    std::string text;
    std::vector<uint32_t> items;  ///< indices into nodes
  };
  std::vector<Node> nodes;
  uint32_t root = 0;
};

/// Most nodes of one pickle, and most values that a reader should make of it.
inline constexpr uint32_t kMostPickleNodes = 1 << 21;

/// Runs the pickle in `bytes` (protocols 2 to 5). Complains through `file`, also about every global that `allowed`
/// denies. Memory stays proportional to the size of the pickle.
Pickle read_pickle(const std::string& bytes, const std::function<bool(const std::string&)>& allowed,
                   const InputFile& file);

}  // namespace mgp

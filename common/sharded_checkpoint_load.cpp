#include "common/sharded_checkpoint.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "common/error.hpp"
#include "common/input_file.hpp"
#include "common/published_folder.hpp"
#include "common/safetensors.hpp"
#include "common/shard_index.hpp"

namespace mgp {
namespace {

constexpr const char* kFlag = "--load";

/// Blocks of rows on their way to whole tensors. Complaints are RunErrors, which load_sharded turns into one line.
class Assembly {
 public:
  /// `bytes`: size of all files together. More memory than that is never asked for, whatever shapes the index claims.
  Assembly(const ShardIndex& index, uint64_t bytes) : index_(index), bytes_left_(bytes) {
    for (const char* kind : {"model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}) {
      for (const ParameterShape& parameter : index.parameters) wholes_[kind + parameter.name].shape = parameter.shape;
    }
  }

  /// Rows from `offset` on, of the tensor `name`.
  void add(const std::string& name, const at::Tensor& rows, const std::vector<int64_t>& offset) {
    const std::string shown = printable(name);
    const auto found = wholes_.find(name);
    if (found == wholes_.end()) throw RunError("damaged: holds " + shown + ", which index.json does not name");
    Whole& whole = found->second;
    const auto rest = [](at::IntArrayRef sizes) { return sizes.slice(1); };
    const bool same_dimensions = rows.dim() == static_cast<int64_t>(whole.shape.size());
    if (!same_dimensions || rest(rows.sizes()) != rest(whole.shape)) {
      throw RunError(
          fmt::format("damaged: {} has the shape {}, which is no part of {}", shown, rows.sizes().vec(), whole.shape));
    }
    const bool in_first_alone = std::all_of(offset.begin() + 1, offset.end(), [](int64_t o) { return o == 0; });
    if (!in_first_alone || rows.size(0) > whole.shape[0] || offset[0] > whole.shape[0] - rows.size(0)) {
      throw RunError(
          fmt::format("damaged: {} has {} rows at the offset {}, of {}", shown, rows.size(0), offset, whole.shape));
    }
    if (!whole.tensor.defined()) whole.tensor = allocate(shown, whole.shape, rows.scalar_type());
    if (whole.tensor.scalar_type() != rows.scalar_type()) throw RunError("damaged: " + shown + " has two dtypes");
    whole.tensor.narrow(0, offset[0], rows.size(0)).copy_(rows);
    whole.blocks.emplace_back(offset[0], rows.size(0));
  }

  /// The tensors of a kind in the order of the index. Throws unless each row is there exactly once.
  NamedTensors take(const std::string& kind) {
    NamedTensors tensors;
    for (const ParameterShape& parameter : index_.parameters) {
      Whole& whole = wholes_.at(kind + parameter.name);
      std::sort(whole.blocks.begin(), whole.blocks.end());
      int64_t covered = 0;
      const std::string shown = printable(kind + parameter.name);
      for (const auto& [first, rows] : whole.blocks) {
        if (first < covered) throw RunError(fmt::format("damaged: row {} of {} is there twice", first, shown));
        if (first > covered) break;
        covered += rows;
      }
      if (covered != whole.shape[0]) throw RunError(fmt::format("damaged: row {} of {} is missing", covered, shown));
      tensors.emplace_back(parameter.name, whole.tensor);
    }
    return tensors;
  }

 private:
  struct Whole {
    std::vector<int64_t> shape;
    at::Tensor tensor;
    std::vector<std::pair<int64_t, int64_t>> blocks;  // first row, rows
  };

  at::Tensor allocate(const std::string& shown, const std::vector<int64_t>& shape, at::ScalarType type) {
    uint64_t bytes = at::elementSize(type);
    for (const int64_t size : shape) bytes *= static_cast<uint64_t>(size);  // read_shard_index has bounded the product
    if (bytes > bytes_left_) throw RunError("damaged: " + shown + " has more elements than the files");
    bytes_left_ -= bytes;
    try {
      return at::empty(shape, type);
    } catch (const c10::Error&) {
      throw RunError(fmt::format("needs {} bytes of memory for {}, more than can be had", bytes, shown));
    }
  }

  const ShardIndex& index_;
  uint64_t bytes_left_;
  std::unordered_map<std::string, Whole> wholes_;
};

/// {name: offset} from the header of a file.
std::map<std::string, std::vector<int64_t>> offsets_from(const std::map<std::string, std::string>& metadata) {
  using Json = nlohmann::json;
  const auto text = metadata.find("DCP_SHARDING_INFO");
  if (text == metadata.end()) throw RunError("damaged: its header has no DCP_SHARDING_INFO");
  const Json json = Json::parse(text->second, nullptr, false);
  std::map<std::string, std::vector<int64_t>> offsets;
  if (!json.is_object()) throw RunError("damaged: DCP_SHARDING_INFO is no JSON object");
  for (const auto& [name, entry] : json.items()) {
    const bool right = entry.is_object() && entry.contains("saved_offsets") && entry["saved_offsets"].is_array();
    if (!right) throw RunError("damaged: " + printable(name) + " has no saved_offsets");
    for (const Json& number : entry["saved_offsets"]) {
      if (!number.is_number_unsigned() || number.get<uint64_t>() > uint64_t{1} << 60) {
        throw RunError("damaged: " + printable(name) + " has saved_offsets that are no offsets");
      }
      offsets[name].push_back(number.get<int64_t>());
    }
  }
  return offsets;
}

void read_shard(const std::string& path, Assembly& assembly) {
  std::map<std::string, std::string> metadata;
  const NamedTensors tensors = read_safetensors(path, kFlag, &metadata);
  const std::map<std::string, std::vector<int64_t>> offsets = offsets_from(metadata);
  for (const auto& [name, rows] : tensors) {
    const auto offset = offsets.find(name);
    if (offset == offsets.end() || offset->second.empty() ||
        static_cast<int64_t>(offset->second.size()) != rows.dim()) {
      throw RunError("damaged: " + printable(name) + " has no offset for each dimension");
    }
    assembly.add(name, rows, offset->second);
  }
}

template <typename Call>
auto naming(const std::string& path, const Call& call) {
  try {
    return call();
  } catch (const RunError& error) {
    throw UsageError(fmt::format("{} {}: {}", kFlag, path, error.what()));
  } catch (const std::bad_alloc&) {
    throw UsageError(fmt::format("{} {}: does not fit into memory", kFlag, path));
  }
}

}  // namespace

FullState load_sharded(const std::string& folder) {
  const std::string where = folder_to_load(folder);
  if (!is_folder(where)) throw UsageError(fmt::format("{} {}: no such folder", kFlag, where));
  const std::string index_path = where + "/" + kIndexName;
  if (access(index_path.c_str(), F_OK) != 0 && errno == ENOENT) {
    throw UsageError(fmt::format("{} {}: has no {}: it is no sharded checkpoint, or its writing was cut short", kFlag,
                                 where, kIndexName));
  }
  const ShardIndex index = read_shard_index(index_path, kFlag);
  uint64_t bytes = 0;  // all sizes are compared before anything is read
  for (const ShardIndex::File& file : index.files) {
    const InputFile shard(where + "/" + file.name, kFlag);
    if (shard.size() != file.bytes) {
      shard.damaged(fmt::format("it has {} bytes, {} says {}", shard.size(), kIndexName, file.bytes));
    }
    bytes += file.bytes;
  }
  Assembly assembly(index, bytes);
  for (const ShardIndex::File& file : index.files) {
    const std::string path = where + "/" + file.name;
    naming(path, [&] { read_shard(path, assembly); });
  }
  return naming(where, [&] {
    FullState state;
    state.model = assembly.take("model.");
    state.exp_avg = assembly.take("optimizer.exp_avg.");
    state.exp_avg_sq = assembly.take("optimizer.exp_avg_sq.");
    for (const auto& [name, tensor] : state.model) {
      state.steps.emplace_back(name, at::full({}, index.step_count, at::kFloat));
    }
    // The rest has the same form as in a full state and goes through the same checks.
    PtValue value = full_state_value(state);
    for (auto& [key, entry] : std::get<PtValue::Dict>(value.value)) {
      if (key == "config") entry = index.config;
      if (key == "training") entry = index.training;
    }
    return full_state_from(value);
  });
}

bool is_sharded_checkpoint(const std::string& path) { return is_folder(folder_to_load(path)); }

FullState load_checkpoint(const std::string& path) {
  return is_sharded_checkpoint(path) ? load_sharded(path) : load_full_state(path);
}

}  // namespace mgp

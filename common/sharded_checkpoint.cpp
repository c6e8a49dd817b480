#include "common/sharded_checkpoint.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "common/input_file.hpp"
#include "common/safetensors.hpp"
#include "common/shard_index.hpp"

namespace mgp {
namespace {

constexpr const char* kKinds[kShardKinds] = {"model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."};

/// An error that all ranks know of: they throw it together and can still talk to each other.
class SharedError : public RunError {
 public:
  using RunError::RunError;
};

/// Does `act` on each rank and tells all ranks its text. Where one fails all throw the same RunError, after all have
/// come: a rank that threw by itself would leave the others waiting.
std::vector<std::string> together(Communicator& world, const std::string& folder, const std::string& what,
                                  const std::function<std::string()>& act) {
  std::string mine;
  try {
    mine = "+" + act();
  } catch (const std::exception& error) {  // LibTorch's texts have a stack trace below the first line
    mine = std::string("-") + error.what();
    mine = mine.substr(0, mine.find('\n'));
  }
  std::vector<std::string> all = world.gather_text("sharded checkpoint, " + what, mine);
  std::string errors;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != '+') {
      errors +=
          fmt::format("{}rank {}: {}", errors.empty() ? "" : "; ", rank, all[rank].substr(all[rank].empty() ? 0 : 1));
    }
    all[rank].erase(0, 1);
  }
  if (!errors.empty()) throw SharedError(fmt::format("saving the checkpoint {} failed: {}", folder, errors));
  return all;
}

/// Checks this rank's tensors against its pieces; returns the dtypes of the kinds as numbers, "" without pieces.
std::string types_of(const ShardLayout& layout, const ShardKinds& local) {
  std::string types;
  for (size_t kind = 0; kind < kShardKinds; ++kind) {
    const NamedTensors& tensors = *local[kind];
    if (tensors.size() != layout.mine().size()) {
      throw RunError(fmt::format("{}*: {} tensors for {} pieces", kKinds[kind], tensors.size(), layout.mine().size()));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i].second;
      const Piece& piece = layout.mine()[i];
      if (!tensor.defined() || tensor.numel() != piece.count) {
        throw RunError(fmt::format("{}{}: {} elements for a piece of {}", kKinds[kind], piece.of.name,
                                   tensor.defined() ? tensor.numel() : 0, piece.count));
      }
      if (tensor.scalar_type() != tensors[0].second.scalar_type()) {
        throw RunError(fmt::format("{}{} has another dtype than {}", kKinds[kind], piece.of.name, tensors[0].first));
      }
    }
    if (!tensors.empty()) types += fmt::format("{} ", static_cast<int>(tensors[0].second.scalar_type()));
  }
  for (const ParameterShape& parameter : layout.parameters()) {
    if (parameter.shape.empty()) throw RunError(parameter.name + " has no rows: it is a single number");
  }
  return types;
}

std::array<at::ScalarType, kShardKinds> agreed_types(const std::vector<std::string>& of_ranks) {
  std::string agreed;
  for (const std::string& types : of_ranks) {
    if (agreed.empty()) agreed = types;
    if (!types.empty() && types != agreed) throw RunError("the ranks hold tensors of different dtypes");
  }
  if (agreed.empty()) throw RunError("no rank holds a tensor");
  std::array<at::ScalarType, kShardKinds> result{};
  std::istringstream words(agreed);
  int number = 0;
  for (at::ScalarType& type : result) {
    words >> number;
    type = static_cast<at::ScalarType>(number);
  }
  return result;
}

/// Writes this rank's file; returns its size, "" if it has nothing to write.
std::string write_rows(const std::string& path, const std::vector<ParameterShape>& parameters,
                       const std::vector<RowBlock>& blocks) {
  if (blocks.empty()) return "";
  NamedTensors tensors;
  nlohmann::json offsets = nlohmann::json::object();
  for (size_t kind = 0; kind < kShardKinds; ++kind) {
    for (const RowBlock& block : blocks) {
      const ParameterShape& parameter = parameters[block.parameter];
      std::vector<int64_t> offset(parameter.shape.size(), 0);
      offset[0] = block.first;
      tensors.emplace_back(kKinds[kind] + parameter.name, block.kinds[kind]);
      offsets[tensors.back().first] = {{"saved_offsets", offset}};
    }
  }
  write_safetensors(path, tensors, {{"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", offsets.dump()}});
  return std::to_string(InputFile(path, "cannot save").size());
}

ShardIndex index_of(const ModelConfig& config, const std::vector<ParameterShape>& parameters,
                    const at::Tensor& step_count, const TrainingState& training,
                    const std::vector<std::string>& sizes) {
  ShardIndex index;
  index.ranks = static_cast<int64_t>(sizes.size());
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (!sizes[rank].empty())
      index.files.push_back({shard_file_name(static_cast<int>(rank)), std::stoull(sizes[rank])});
  }
  index.parameters = parameters;
  index.step_count = step_count.item<double>();
  const PtValue value = full_state_value({config, {}, {}, {}, {}, training});
  index.config = *value.find("config");
  index.training = *value.find("training");
  return index;
}

}  // namespace

ShardedSave::ShardedSave(const std::string& folder, const ModelConfig& config, const ShardLayout& layout,
                         const NamedTensors& masters, const NamedTensors& exp_avg, const NamedTensors& exp_avg_sq,
                         const at::Tensor& step_count, const TrainingState& training, Communicator& world,
                         bool snapshot)
    : place_(folder, training.step),
      config_(config),
      parameters_(layout.parameters()),
      training_(training),
      world_(world) {
  const at::NoGradGuard no_grad;
  const ShardKinds local = {&masters, &exp_avg, &exp_avg_sq};
  const auto types = agreed_types(together(world, folder, "tensors", [&] { return types_of(layout, local); }));
  blocks_ = rows_to_save(layout, local, types, world);
  if (world.rank() == 0) step_count_ = step_count.clone();
  if (snapshot) {
    for (RowBlock& block : blocks_) {
      for (at::Tensor& tensor : block.kinds) tensor = host_copy(tensor);
    }
    copied_ = Moment::record(world.device());
  }
  together(world, folder, "folder", [&] {
    if (world.rank() == 0) place_.prepare();
    return std::string();
  });
}

void ShardedSave::write() noexcept {
  try {
    copied_.synchronize();
    written_ = write_rows(place_.file(shard_file_name(world_.rank())), parameters_, blocks_);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  blocks_.clear();  // host memory, given back at once
}

// Each exchange of texts is a barrier too: once it is through all ranks have done their part. So rank 0 removes the
// folder only when nobody writes into it, and writes the index only when all files are on disk. If an exchange itself
// fails a rank is gone, and what it left is removed by the next save.
void ShardedSave::publish() {
  const bool first = world_.rank() == 0;
  try {
    const std::vector<std::string> sizes = together(world_, place_.folder(), "files", [&] {
      if (!error_.empty()) throw RunError(error_);
      return written_;
    });
    together(world_, place_.folder(), "index", [&] {
      if (first) {
        write_shard_index(place_.file(kIndexName), index_of(config_, parameters_, step_count_, training_, sizes));
        place_.publish();
      }
      return std::string();
    });
  } catch (const SharedError&) {
    if (first) place_.discard();
    world_.barrier("failed checkpoint removed");
    throw;
  }
}

void save_sharded(const std::string& folder, const ModelConfig& config, const ShardLayout& layout,
                  const NamedTensors& masters, const NamedTensors& exp_avg, const NamedTensors& exp_avg_sq,
                  const at::Tensor& step_count, const TrainingState& training, Communicator& world) {
  ShardedSave save(folder, config, layout, masters, exp_avg, exp_avg_sq, step_count, training, world,
                   /*snapshot=*/false);
  save.write();
  save.publish();
}

}  // namespace mgp

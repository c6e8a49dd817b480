#include "examples/fsdp/unit.hpp"

#include <c10/core/StorageImpl.h>

#include <algorithm>

#include "common/error.hpp"

namespace mgp {

bool Unit::trained() const {
  return std::any_of(whole_.tensors.begin(), whole_.tensors.end(),
                     [](const at::Tensor& t) { return t.requires_grad(); });
}

bool Unit::has_frozen() const {
  return std::any_of(whole_.tensors.begin(), whole_.tensors.end(),
                     [](const at::Tensor& t) { return !t.requires_grad(); });
}

void Unit::hand_out_gradients() {
  for (size_t i = 0; i < shards_.size(); ++i) shards_[i].second.mutable_grad() = gradients_[i];  // frozen: undefined
}

void resize_memory(const at::Tensor& tensor, int64_t bytes) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (static_cast<int64_t>(storage->nbytes()) == bytes) return;
  // On a GPU the allocator takes and gives memory in the order of the current stream.
  storage->set_data_ptr_noswap(bytes > 0 ? storage->allocator()->allocate(static_cast<size_t>(bytes))
                                         : c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

namespace {

/// The unit that a parameter belongs to: 0 embedding and positions, 1 + i layer i, the last one final norm and head.
size_t unit_of(const std::string& name, int64_t layers) {
  if (name.starts_with("embedding.") || name.starts_with("position.")) return 0;
  const size_t at = name.find("layers.");
  if (at != std::string::npos) return 1 + static_cast<size_t>(std::stoll(name.substr(at + 7)));
  return static_cast<size_t>(layers) + 1;
}

}  // namespace

std::vector<std::vector<ParameterShape>> unit_shapes(const ModelConfig& config) {
  std::vector<std::vector<ParameterShape>> units(static_cast<size_t>(config.layers) + 2);
  for (const ParameterShape& shape : parameter_shapes(config)) {
    units[unit_of(shape.name, config.layers)].push_back(shape);
  }
  return units;
}

std::vector<UnitParameters> units_of(const ModelConfig& config, const NamedTensors& parameters) {
  std::vector<UnitParameters> units;
  units.push_back({"embedding", {}, {}});
  for (int64_t layer = 0; layer < config.layers; ++layer) units.push_back({"layer " + std::to_string(layer), {}, {}});
  units.push_back({"head", {}, {}});
  for (const auto& [name, tensor] : parameters) {
    UnitParameters& unit = units[unit_of(name, config.layers)];
    unit.shapes.push_back({name, tensor.sizes().vec()});
    unit.tensors.push_back(tensor);
  }
  return units;
}

}  // namespace mgp

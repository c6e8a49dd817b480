#include "common/stage_model.hpp"

#include <algorithm>
#include <functional>

#include "common/activation_checkpoint.hpp"

namespace mgp {

std::vector<StagePart> stage_parts(const std::vector<LayerRange>& ranges) {
  std::vector<StagePart> parts;
  for (size_t stage = 0; stage < ranges.size(); ++stage) {
    parts.push_back({ranges[stage], /*has_embedding=*/stage == 0, /*has_head=*/stage + 1 == ranges.size()});
  }
  return parts;
}

std::vector<ParameterShape> stage_parameter_shapes(const ModelConfig& config, const StagePart& part) {
  const std::string prefix = config.kind == ModelKind::classifier ? "encoder.layers." : "layers.";
  std::vector<ParameterShape> mine;
  for (ParameterShape& parameter : parameter_shapes(config)) {
    bool holds = false;
    if (parameter.name.starts_with(prefix)) {
      const int64_t layer = std::stoll(parameter.name.substr(prefix.size()));  // up to the next dot
      holds = layer >= part.layers.first && layer < part.layers.last;
    } else if (parameter.name == "embedding.weight" || parameter.name == "position.weight") {
      holds = part.has_embedding;
    } else {
      holds = part.has_head;
    }
    if (holds) mine.push_back(std::move(parameter));
  }
  return mine;
}

namespace {

/// Registers layers [first, last) in `list` under their numbers in the whole model.
template <typename LayerType>
std::vector<StageModel::Layer> register_layers(torch::nn::Module& list, const ModelConfig& config, LayerRange range,
                                               const at::TensorOptions& options) {
  std::vector<StageModel::Layer> layers;
  for (int64_t i = range.first; i < range.last; ++i) {
    const auto layer = list.register_module(std::to_string(i), std::make_shared<LayerType>(config, options));
    layers.push_back({[layer](const at::Tensor& x) { return layer->forward(x); }, layer->dropout > 0.0});
  }
  return layers;
}

}  // namespace

StageModel::StageModel(const ModelConfig& config, const StagePart& part_in, const at::TensorOptions& options)
    : part(part_in), checkpoint_activations(config.checkpoint_activations) {
  TORCH_CHECK(0 <= part.layers.first && part.layers.first <= part.layers.last && part.layers.last <= config.layers,
              "layers [", part.layers.first, ", ", part.layers.last, ") of ", config.layers);
  // The order of registration is that of the whole model.
  if (part.has_embedding) {
    embedding = register_module("embedding", std::make_shared<Table>(config.vocab_size, config.dim, options));
    position = register_module("position", std::make_shared<Table>(config.seq_len, config.dim, options));
  }
  if (config.kind == ModelKind::classifier) {
    const auto encoder = register_module("encoder", std::make_shared<torch::nn::Module>());
    const auto list = encoder->register_module("layers", std::make_shared<torch::nn::Module>());
    layers = register_layers<EncoderLayer>(*list, config, part.layers, options);
  } else {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    layers = register_layers<MlpLayer>(*list, config, part.layers, options);
  }
  if (part.has_head) {
    norm = register_module("norm", std::make_shared<LayerNorm>(config.dim, options));
    head = register_module("head", std::make_shared<Linear>(config.dim, config.classes, options));
  }
}

at::Tensor StageModel::forward(const at::Tensor& x) {
  at::Tensor y = part.has_embedding ? embed(*embedding, *position, x) : x;  // [B, T, C]
  for (const Layer& layer : layers) {
    y = checkpoint_activations ? checkpointed(layer.run, y, layer.draws_random_numbers) : layer.run(y);  // [B, T, C]
  }
  return part.has_head ? classify(*norm, *head, y) : y;  // [B, classes], or [B, T, C]
}

std::shared_ptr<StageModel> make_stage(const ModelConfig& config, const StagePart& part, uint64_t seed,
                                       at::Device device, at::ScalarType dtype) {
  auto stage = std::make_shared<StageModel>(config, part, at::TensorOptions().device(device).dtype(dtype));
  if (device.is_meta()) return stage;
  const at::NoGradGuard no_grad;
  for (auto& [name, parameter] : named_parameters(*stage)) {
    // A value is a function of seed, name and index, so it does not matter who makes it.
    const ParameterShape shape{name, parameter.sizes().vec()};
    parameter.copy_(initial_value(shape, seed, /*first=*/0, shape.numel()).view(shape.shape));
  }
  return stage;
}

}  // namespace mgp

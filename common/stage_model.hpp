// A part of a model that is cut between its layers: what one stage of model or pipeline parallel training holds.
//
// The stages one after the other compute exactly what the whole model computes (model.hpp), with the same names and the
// same initial values, so gradients, checkpoints and --verify need no translation.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/layer_split.hpp"
#include "common/model.hpp"

namespace mgp {

/// Which part of a model a stage is. The first stage also embeds the tokens; the last one also norms, pools and
/// classifies. With one stage both are true, and the stage is the model.
struct StagePart {
  LayerRange layers;  ///< may be empty
  bool has_embedding = false;
  bool has_head = false;
};

/// The parts of stages that hold `ranges`, in order: embedding on the first, head on the last.
std::vector<StagePart> stage_parts(const std::vector<LayerRange>& ranges);

/// Names and shapes of a part's parameters, in the order of the whole model's parameter_shapes().
std::vector<ParameterShape> stage_parameter_shapes(const ModelConfig& config, const StagePart& part);

/// One part as a module. Only its own parameters exist, under the names that the whole model gives them
/// ("encoder.layers.7.norm1.weight" on whichever stage holds layer 7).
struct StageModel : ModelImpl {
  StageModel(const ModelConfig& config, const StagePart& part, const at::TensorOptions& options);

  /// `x`: tokens [B, T] for a part with the embedding, else the residual stream [B, T, C] of the part before.
  /// Returns logits [B, classes] from a part with the head, else the residual stream [B, T, C].
  /// With ModelConfig::checkpoint_activations each layer keeps its input alone, as in the whole model.
  at::Tensor forward(const at::Tensor& x) override;

  /// One layer of the model, [B, T, C] -> [B, T, C].
  struct Layer {
    std::function<at::Tensor(const at::Tensor&)> run;
    bool draws_random_numbers;
  };

  const StagePart part;
  const bool checkpoint_activations;
  std::shared_ptr<Table> embedding, position;  ///< null without the embedding
  std::vector<Layer> layers;
  std::shared_ptr<LayerNorm> norm;  ///< null without the head
  std::shared_ptr<Linear> head;
};

/// Builds a part on `device` in `dtype`, with the initial values that make_model() with `seed` gives these parameters,
/// bit for bit. On the meta device nothing is allocated or filled.
std::shared_ptr<StageModel> make_stage(const ModelConfig& config, const StagePart& part, uint64_t seed,
                                       at::Device device, at::ScalarType dtype);

}  // namespace mgp

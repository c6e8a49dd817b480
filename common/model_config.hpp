// Sizes of the two models, and everything that follows from the sizes alone: names, shapes, counts.
// Nothing here touches a device, so --predict can work for any number of ranks without one.
//
// Letters used in every comment of this project: B batch, T sequence, C model dim, H heads, F MLP dim, V vocabulary.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mgp {

enum class ModelKind {
  classifier,  ///< Transformer encoder (pre-norm, learned positions, mean pooling): about 110M parameters at `base`
  mlp          ///< the same embedding, then residual MLP layers per token: about 138M parameters at `base`
};

struct ModelConfig {
  ModelKind kind = ModelKind::classifier;
  int64_t vocab_size = 0;  ///< V
  int64_t seq_len = 0;     ///< T
  int64_t dim = 0;         ///< C
  int64_t heads = 0;       ///< H (classifier only)
  int64_t layers = 0;
  int64_t mlp_dim = 0;  ///< F
  int64_t classes = 0;
  double dropout = 0.0;
  bool checkpoint_activations = false;  ///< each layer keeps its input alone and runs again in backward
};

/// Sizes of `tiny`, `small` or `base` (design: reference configuration). Throws UsageError on another name.
ModelConfig preset_config(const std::string& preset, ModelKind kind);

/// Checks the sizes against each other (positive, heads divide dim). Throws UsageError naming value, limit and flag.
void check_config(const ModelConfig& config);

struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;
  int64_t numel() const;
  int64_t row_numel() const;  ///< elements of one row of dimension 0
};

/// Names and shapes of all parameters in registration order, as `torch::nn::Module::named_parameters()` gives them.
/// The names are those of the PyTorch twin (tests/pytorch/twin.py), so that a checkpoint loads there unchanged.
std::vector<ParameterShape> parameter_shapes(const ModelConfig& config);

/// The order in which backward finishes the gradients (head first, embedding last), as seen on CPU and GPU. DDP's
/// rebuilt buckets follow it. Under autocast weight and bias of a linear layer change places. Checkpointing changes
/// nothing: a layer that runs again has a backward of its own, in which its gradients come in the same order.
std::vector<std::string> gradient_arrival_order(const ModelConfig& config, bool autocast = false);

int64_t parameter_count(const ModelConfig& config);
int64_t parameter_count(const std::vector<ParameterShape>& parameters);  ///< their elements together

/// Whether AdamW's weight decay applies: on matrices and the token embedding, not on biases, norms and positions.
bool has_weight_decay(const std::string& name, int64_t dimensions);

/// Floating-point operations of one optimizer step over `rows` sequences: 6 x (parameters that multiply) x tokens, plus
/// attention's 12 x layers x T^2 x C a row (Megatron SC21 and PaLM appendix B; embedding look-ups do not multiply).
/// What checkpointing computes again is not counted: it is a price, not work that the model needs.
double flops_per_step(const ModelConfig& config, int64_t rows);

}  // namespace mgp

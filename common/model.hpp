// The two models. Both begin with the same embedding and end in mean pooling over T and a linear head.
//
// Every parameter has the name that the PyTorch twin (tests/pytorch/twin.py) gives it, so a checkpoint loads there
// unchanged. The modules are our own because LibTorch's draw random initial values when they are made: that costs
// seconds at 110M parameters, and the values would hang on the order of the calls. Here a parameter is made empty and
// filled once.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "common/model_config.hpp"
#include "common/named_tensors.hpp"

namespace mgp {

/// What every trainer holds: a module whose forward maps tokens [B, T] to logits [B, classes].
class ModelImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& tokens) = 0;
};
using Model = std::shared_ptr<ModelImpl>;

/// Builds the model of `config` on `device` in `dtype` (fp32, or fp64 to prove equality) with the initial values of
/// `seed`. The values are made on the CPU (counter_random.hpp) and copied, so they do not depend on the device.
/// On the meta device nothing is allocated or filled: shapes and names alone.
Model make_model(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype);

/// The same without values and, on most systems, without memory: tensors on the CPU that nobody has touched. For trainers
/// that put memory of their own behind the parameters (set_data).
Model make_empty_model(const ModelConfig& config, at::ScalarType dtype);

/// The initial value of one parameter, or of elements [first, first + count) of its flattened form: what a shard or a
/// stage calls for its own piece. fp64 on the CPU; norms are 1, biases 0, matrices have standard deviation
/// 0.5 / sqrt(last dimension).
at::Tensor initial_value(const ParameterShape& parameter, uint64_t seed, int64_t first, int64_t count);

/// Parameters (trainable) in registration order; the tensors are the live ones, not copies.
NamedTensors named_parameters(ModelImpl& model);

/// --weights low: the model's own tensors become `dtype` (rounded), and the values that they had are returned as fp32
/// masters for the optimizer. Where the dtype is the same already the returned tensors are the parameters themselves.
NamedTensors lower_weights(ModelImpl& model, at::ScalarType dtype);

/// Cross entropy summed over the rows, [] fp32 (fp64 in fp64): divide by the rows of the GLOBAL batch, then sum over
/// microbatches and ranks. That stays right for uneven cuts, where a mean of means is not. 0 rows give 0 with a graph:
/// their backward leaves zeros in every parameter's gradient.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels);

// ── what the models are made of ── Members are public: a trainer that cuts a model takes it apart by these names.

/// A matrix that is looked up, not multiplied with: token embedding and positions.
struct Table : torch::nn::Module {
  Table(int64_t rows, int64_t dim, const at::TensorOptions& options);
  at::Tensor weight;  ///< [rows, C]
};

/// y = x W^T + b.
struct Linear : torch::nn::Module {
  Linear(int64_t in, int64_t out, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;  ///< [.., in] -> [.., out]
  at::Tensor weight;                              ///< [out, in]
  at::Tensor bias;                                ///< [out]
};

/// Normalises each row of C numbers to mean 0 and variance 1, then gain and offset. eps 1e-5.
struct LayerNorm : torch::nn::Module {
  LayerNorm(int64_t dim, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;  ///< [.., C] -> [.., C]
  at::Tensor weight, bias;                        ///< [C]
};

/// Multi-head self-attention with one projection for q, k and v, as in nn.MultiheadAttention.
struct SelfAttention : torch::nn::Module {
  SelfAttention(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;  ///< [B, T, C] -> [B, T, C]
  int64_t heads;
  double dropout;
  at::Tensor in_proj_weight;  ///< [3C, C]: all rows of q, then k, then v
  at::Tensor in_proj_bias;    ///< [3C]
  std::shared_ptr<Linear> out_proj;
};

/// One encoder layer, pre-norm: x + attention(norm1(x)), then x + MLP(norm2(x)).
struct EncoderLayer : torch::nn::Module {
  EncoderLayer(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;  ///< [B, T, C] -> [B, T, C]
  double dropout;
  std::shared_ptr<SelfAttention> self_attn;
  std::shared_ptr<Linear> linear1, linear2;
  std::shared_ptr<LayerNorm> norm1, norm2;
};

/// One residual layer of the MLP model: x + fc2(gelu(fc1(norm(x)))), each token by itself.
struct MlpLayer : torch::nn::Module {
  MlpLayer(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;  ///< [B, T, C] -> [B, T, C]
  double dropout;
  std::shared_ptr<LayerNorm> norm;
  std::shared_ptr<Linear> fc1, fc2;
};

/// Embedding, encoder layers, final norm, mean over T, head.
struct TransformerClassifier : ModelImpl {
  TransformerClassifier(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& tokens) override;
  std::shared_ptr<Table> embedding, position;
  std::vector<std::shared_ptr<EncoderLayer>> layers;
  bool checkpoint_activations;  ///< activation_checkpoint.hpp
  std::shared_ptr<LayerNorm> norm;
  std::shared_ptr<Linear> head;
};

/// The same frame with MLP layers in it: what tensor parallel and 2D train by default.
struct MlpModel : ModelImpl {
  MlpModel(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& tokens) override;
  std::shared_ptr<Table> embedding, position;
  std::vector<std::shared_ptr<MlpLayer>> layers;
  bool checkpoint_activations;  ///< activation_checkpoint.hpp
  std::shared_ptr<LayerNorm> norm;
  std::shared_ptr<Linear> head;
};

/// tokens [B, T] -> [B, T, C]: the token's row plus the position's row.
at::Tensor embed(const Table& embedding, const Table& position, const at::Tensor& tokens);

/// x [B, T, C] -> logits [B, classes]: norm each token, mean over T, head.
at::Tensor classify(const LayerNorm& norm, const Linear& head, const at::Tensor& x);

}  // namespace mgp

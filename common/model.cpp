#include "common/model.hpp"

#include <cmath>
#include <string>

#include "common/activation_checkpoint.hpp"
#include "common/counter_random.hpp"

namespace mgp {

namespace {

/// GELU in its tanh form, in both models and in the twin. (The exact form needs erf, which is slower on GPUs.)
at::Tensor gelu_tanh(const at::Tensor& x) { return at::gelu(x, /*approximate=*/"tanh"); }

/// Dropout; at probability 0 or in evaluation no kernel runs and no random number is drawn.
at::Tensor drop(const at::Tensor& x, double probability, bool training) {
  return probability > 0.0 && training ? at::dropout(x, probability, /*train=*/true) : x;
}

}  // namespace

// ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Table::Table(int64_t rows, int64_t dim, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({rows, dim}, options));
}

Linear::Linear(int64_t in, int64_t out, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({out, in}, options));
  bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor Linear::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

LayerNorm::LayerNorm(int64_t dim, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({dim}, options));
  bias = register_parameter("bias", at::empty({dim}, options));
}

at::Tensor LayerNorm::forward(const at::Tensor& x) const {
  return at::layer_norm(x, {x.size(-1)}, weight, bias, /*eps=*/1e-5);
}

SelfAttention::SelfAttention(const ModelConfig& config, const at::TensorOptions& options)
    : heads(config.heads), dropout(config.dropout) {
  const int64_t C = config.dim;
  in_proj_weight = register_parameter("in_proj_weight", at::empty({3 * C, C}, options));
  in_proj_bias = register_parameter("in_proj_bias", at::empty({3 * C}, options));
  out_proj = register_module("out_proj", std::make_shared<Linear>(C, C, options));
}

at::Tensor SelfAttention::forward(const at::Tensor& x) const {
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2);
  const int64_t H = heads, D = C / heads;

  // One matmul makes q, k and v. From here to the attention kernel nothing is copied: view, unbind and transpose only
  // change sizes and strides, and the kernels of scaled_dot_product_attention read any strides of B, H and T.
  const at::Tensor qkv = at::linear(x, in_proj_weight, in_proj_bias);         // [B, T, 3C]
  const std::vector<at::Tensor> parts = qkv.view({B, T, 3, H, D}).unbind(2);  // 3 x [B, T, H, D]
  const at::Tensor q = parts[0].transpose(1, 2);                              // [B, H, T, D]
  const at::Tensor k = parts[1].transpose(1, 2);                              // [B, H, T, D]
  const at::Tensor v = parts[2].transpose(1, 2);                              // [B, H, T, D]

  // softmax(q k^T / sqrt(D)) v for each head. Dropout acts on the softmax, as in nn.MultiheadAttention.
  const double dropout_now = is_training() ? dropout : 0.0;
  const at::Tensor out = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, dropout_now);  // [B, H, T, D]
  return out_proj->forward(out.transpose(1, 2).reshape({B, T, C}));                                 // [B, T, C]
}

EncoderLayer::EncoderLayer(const ModelConfig& config, const at::TensorOptions& options) : dropout(config.dropout) {
  const int64_t C = config.dim, F = config.mlp_dim;
  self_attn = register_module("self_attn", std::make_shared<SelfAttention>(config, options));
  linear1 = register_module("linear1", std::make_shared<Linear>(C, F, options));
  linear2 = register_module("linear2", std::make_shared<Linear>(F, C, options));
  norm1 = register_module("norm1", std::make_shared<LayerNorm>(C, options));
  norm2 = register_module("norm2", std::make_shared<LayerNorm>(C, options));
}

at::Tensor EncoderLayer::forward(const at::Tensor& x) const {
  const at::Tensor attended = self_attn->forward(norm1->forward(x));              // [B, T, C]
  const at::Tensor y = x + drop(attended, dropout, is_training());                // [B, T, C]
  const at::Tensor hidden = gelu_tanh(linear1->forward(norm2->forward(y)));       // [B, T, F]
  const at::Tensor mlp = linear2->forward(drop(hidden, dropout, is_training()));  // [B, T, C]
  return y + drop(mlp, dropout, is_training());                                   // [B, T, C]
}

MlpLayer::MlpLayer(const ModelConfig& config, const at::TensorOptions& options) : dropout(config.dropout) {
  const int64_t C = config.dim, F = config.mlp_dim;
  norm = register_module("norm", std::make_shared<LayerNorm>(C, options));
  fc1 = register_module("fc1", std::make_shared<Linear>(C, F, options));
  fc2 = register_module("fc2", std::make_shared<Linear>(F, C, options));
}

at::Tensor MlpLayer::forward(const at::Tensor& x) const {
  const at::Tensor hidden = gelu_tanh(fc1->forward(norm->forward(x)));        // [B, T, F]
  const at::Tensor mlp = fc2->forward(drop(hidden, dropout, is_training()));  // [B, T, C]
  return x + drop(mlp, dropout, is_training());                               // [B, T, C]
}

at::Tensor embed(const Table& embedding, const Table& position, const at::Tensor& tokens) {
  return at::embedding(embedding.weight, tokens) + position.weight;  // [B, T, C] + [T, C] -> [B, T, C]
}

at::Tensor classify(const LayerNorm& norm, const Linear& head, const at::Tensor& x) {
  const at::Tensor pooled = norm.forward(x).mean(/*dim=*/1);  // [B, T, C] -> [B, C]
  return head.forward(pooled);                                // [B, classes]
}

// ── the two models ──────────────────────────────────────────────────────────────────────────────────────────────────
// Registration order is the order of parameter_shapes(), on which collectives and checkpoints rely.

TransformerClassifier::TransformerClassifier(const ModelConfig& config, const at::TensorOptions& options)
    : checkpoint_activations(config.checkpoint_activations) {
  embedding = register_module("embedding", std::make_shared<Table>(config.vocab_size, config.dim, options));
  position = register_module("position", std::make_shared<Table>(config.seq_len, config.dim, options));
  const auto encoder = register_module("encoder", std::make_shared<torch::nn::Module>());
  const auto list = encoder->register_module("layers", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(list->register_module(std::to_string(i), std::make_shared<EncoderLayer>(config, options)));
  }
  norm = register_module("norm", std::make_shared<LayerNorm>(config.dim, options));
  head = register_module("head", std::make_shared<Linear>(config.dim, config.classes, options));
}

at::Tensor TransformerClassifier::forward(const at::Tensor& tokens) {
  at::Tensor x = embed(*embedding, *position, tokens);  // [B, T, C]
  for (const auto& layer : layers) {
    const auto run = [layer](const at::Tensor& in) { return layer->forward(in); };     // [B, T, C] -> [B, T, C]
    x = checkpoint_activations ? checkpointed(run, x, layer->dropout > 0.0) : run(x);  // [B, T, C]
  }
  return classify(*norm, *head, x);  // [B, classes]
}

MlpModel::MlpModel(const ModelConfig& config, const at::TensorOptions& options)
    : checkpoint_activations(config.checkpoint_activations) {
  embedding = register_module("embedding", std::make_shared<Table>(config.vocab_size, config.dim, options));
  position = register_module("position", std::make_shared<Table>(config.seq_len, config.dim, options));
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(list->register_module(std::to_string(i), std::make_shared<MlpLayer>(config, options)));
  }
  norm = register_module("norm", std::make_shared<LayerNorm>(config.dim, options));
  head = register_module("head", std::make_shared<Linear>(config.dim, config.classes, options));
}

at::Tensor MlpModel::forward(const at::Tensor& tokens) {
  at::Tensor x = embed(*embedding, *position, tokens);  // [B, T, C]
  for (const auto& layer : layers) {
    const auto run = [layer](const at::Tensor& in) { return layer->forward(in); };     // [B, T, C] -> [B, T, C]
    x = checkpoint_activations ? checkpointed(run, x, layer->dropout > 0.0) : run(x);  // [B, T, C]
  }
  return classify(*norm, *head, x);  // [B, classes]
}

// ── initial values ──────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

/// Writes elements [first, first + out.numel()) of the parameter's initial value into `out` (CPU, fp32 or fp64).
void fill_initial(at::Tensor out, const ParameterShape& parameter, uint64_t seed, int64_t first) {
  if (parameter.shape.size() == 1) {
    // The only vectors called "weight" are the gains of the norms; every other vector is a bias.
    out.fill_(parameter.name.ends_with("weight") ? 1.0 : 0.0);
    return;
  }
  const double stddev = 0.5 / std::sqrt(static_cast<double>(parameter.shape.back()));
  fill_normal(out, stream_key(seed, parameter.name), stddev, first);
}

}  // namespace

at::Tensor initial_value(const ParameterShape& parameter, uint64_t seed, int64_t first, int64_t count) {
  TORCH_CHECK(first >= 0 && count >= 0 && first + count <= parameter.numel(), parameter.name, ": elements [", first,
              ", ", first + count, ") of ", parameter.numel());
  at::Tensor out = at::empty({count}, at::kDouble);
  fill_initial(out, parameter, seed, first);
  return out;
}

namespace {

Model construct(const ModelConfig& config, const at::TensorOptions& options) {
  if (config.kind == ModelKind::classifier) return std::make_shared<TransformerClassifier>(config, options);
  return std::make_shared<MlpModel>(config, options);
}

}  // namespace

Model make_empty_model(const ModelConfig& config, at::ScalarType dtype) {
  return construct(config, at::TensorOptions().device(at::kCPU).dtype(dtype));
}

Model make_model(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype) {
  Model model = construct(config, at::TensorOptions().device(device).dtype(dtype));
  if (device.is_meta()) return model;

  const at::NoGradGuard no_grad;
  const at::ScalarType made_in = dtype == at::kDouble ? at::kDouble : at::kFloat;
  for (auto& [name, parameter] : named_parameters(*model)) {
    const ParameterShape shape{name, parameter.sizes().vec()};
    if (device.is_cpu() && dtype == made_in) {
      fill_initial(parameter, shape, seed, /*first=*/0);
    } else {
      const at::Tensor values = at::empty(parameter.sizes(), made_in);  // on the CPU
      fill_initial(values, shape, seed, /*first=*/0);
      parameter.copy_(values);
    }
  }
  return model;
}

NamedTensors named_parameters(ModelImpl& model) {
  NamedTensors parameters;
  for (const auto& item : model.torch::nn::Module::named_parameters(/*recurse=*/true)) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

NamedTensors lower_weights(ModelImpl& model, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  NamedTensors masters;
  for (auto& [name, parameter] : named_parameters(model)) {
    if (parameter.scalar_type() == dtype) {
      masters.emplace_back(name, parameter);
      continue;
    }
    masters.emplace_back(name, parameter.detach());    // keeps the memory that the parameter had
    parameter.set_data(parameter.detach().to(dtype));  // the module's tensor, with new memory behind it
  }
  return masters;
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels) {
  // Under autocast the logits are bf16; a softmax in bf16 would round the loss to two or three digits.
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);  // [B, classes]
  return at::cross_entropy_loss(wide, labels, /*weight=*/{}, at::Reduction::Sum);                // []
}

}  // namespace mgp

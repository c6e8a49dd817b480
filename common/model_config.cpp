#include "common/model_config.hpp"

#include <algorithm>

#include "common/error.hpp"

namespace mgp {

namespace {

// Far above any model that fits on a device, and small enough that no product below leaves 64 bits.
constexpr int64_t kLargestSize = int64_t{1} << 22;
constexpr int64_t kMostLayers = int64_t{1} << 14;

struct Preset {
  const char* name;
  int64_t vocab_size, seq_len, dim, heads, layers;
  int64_t mlp_dim_classifier, mlp_dim_mlp;
};

// Sizes of one line divide by 2, 3, 4 and 6 where a pattern cuts them (heads, dim, MLP dim, layers), so that every
// pattern runs on that many ranks. V = 32,000 and T = 256 of `base` do not divide by 3: vocabulary parallel pads.
constexpr Preset kPresets[] = {
    // name       V     T    C   H   L     F  F (mlp)
    {"tiny", 1008, 36, 96, 12, 12, 384, 768},
    {"small", 8000, 128, 384, 12, 12, 1536, 3072},
    {"base", 32000, 256, 768, 12, 12, 3072, 6144},
};

void check_range(int64_t value, int64_t largest, const char* flag) {
  if (value >= 1 && value <= largest) return;
  throw UsageError(std::string(flag) + " " + std::to_string(value) + " is out of range: 1 to " +
                   std::to_string(largest));
}

/// Appends weight and bias of a linear layer: weight [out, in], bias [out].
void add_linear(std::vector<ParameterShape>& shapes, const std::string& name, int64_t out, int64_t in) {
  shapes.push_back({name + ".weight", {out, in}});
  shapes.push_back({name + ".bias", {out}});
}

/// Appends gain and offset of a LayerNorm over C.
void add_norm(std::vector<ParameterShape>& shapes, const std::string& name, int64_t dim) {
  shapes.push_back({name + ".weight", {dim}});
  shapes.push_back({name + ".bias", {dim}});
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

ModelConfig preset_config(const std::string& preset, ModelKind kind) {
  for (const Preset& known : kPresets) {
    if (preset != known.name) continue;
    ModelConfig config;
    config.kind = kind;
    config.vocab_size = known.vocab_size;
    config.seq_len = known.seq_len;
    config.dim = known.dim;
    config.heads = known.heads;
    config.layers = known.layers;
    config.mlp_dim = kind == ModelKind::classifier ? known.mlp_dim_classifier : known.mlp_dim_mlp;
    config.classes = 10;
    return config;
  }
  throw UsageError("--preset '" + preset + "' is unknown: use tiny, small or base");
}

void check_config(const ModelConfig& config) {
  check_range(config.vocab_size, kLargestSize, "--vocab-size");
  check_range(config.seq_len, kLargestSize, "--seq-len");
  check_range(config.dim, kLargestSize, "--dim");
  check_range(config.layers, kMostLayers, "--layers");
  check_range(config.mlp_dim, kLargestSize, "--mlp-dim");
  check_range(config.classes, kLargestSize, "--classes");
  if (!(config.dropout >= 0.0 && config.dropout < 1.0)) {  // written so that NaN fails too
    throw UsageError("--dropout " + std::to_string(config.dropout) + " is out of range: 0 up to, not including, 1");
  }
  if (config.kind != ModelKind::classifier) return;
  check_range(config.heads, kLargestSize, "--heads");
  if (config.dim % config.heads != 0) {
    throw UsageError("--heads " + std::to_string(config.heads) + " does not divide --dim " +
                     std::to_string(config.dim) + ": each head takes dim / heads columns");
  }
}

int64_t ParameterShape::numel() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

int64_t ParameterShape::row_numel() const { return numel() / shape.at(0); }

std::vector<ParameterShape> parameter_shapes(const ModelConfig& config) {
  const int64_t C = config.dim;
  const int64_t F = config.mlp_dim;
  std::vector<ParameterShape> shapes;
  shapes.push_back({"embedding.weight", {config.vocab_size, C}});
  shapes.push_back({"position.weight", {config.seq_len, C}});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (config.kind == ModelKind::classifier) {
      const std::string name = "encoder.layers." + std::to_string(layer);
      shapes.push_back({name + ".self_attn.in_proj_weight", {3 * C, C}});  // rows: all of q, then k, then v
      shapes.push_back({name + ".self_attn.in_proj_bias", {3 * C}});
      add_linear(shapes, name + ".self_attn.out_proj", C, C);
      add_linear(shapes, name + ".linear1", F, C);
      add_linear(shapes, name + ".linear2", C, F);
      add_norm(shapes, name + ".norm1", C);
      add_norm(shapes, name + ".norm2", C);
    } else {
      const std::string name = "layers." + std::to_string(layer);
      add_norm(shapes, name + ".norm", C);
      add_linear(shapes, name + ".fc1", F, C);
      add_linear(shapes, name + ".fc2", C, F);
    }
  }
  add_norm(shapes, "norm", C);
  add_linear(shapes, "head", config.classes, C);
  return shapes;
}

std::vector<std::string> gradient_arrival_order(const ModelConfig& config, bool autocast) {
  // Backward undoes forward: the last used parameter comes first. A LayerNorm gives gain, then offset; a linear layer
  // gives its bias first, because the weight's gradient still goes through a transpose. Under autocast both go through
  // the cast to bf16, and the weight, which was cast last, comes first.
  std::vector<std::string> order;
  const auto norm_gives = [&order](const std::string& name) {
    order.push_back(name + ".weight");
    order.push_back(name + ".bias");
  };
  const auto linear_gives = [&order, autocast](const std::string& weight, const std::string& bias) {
    order.push_back(autocast ? weight : bias);
    order.push_back(autocast ? bias : weight);
  };
  linear_gives("head.weight", "head.bias");
  norm_gives("norm");
  for (int64_t layer = config.layers - 1; layer >= 0; --layer) {
    if (config.kind == ModelKind::classifier) {
      const std::string name = "encoder.layers." + std::to_string(layer);
      linear_gives(name + ".linear2.weight", name + ".linear2.bias");
      linear_gives(name + ".linear1.weight", name + ".linear1.bias");
      norm_gives(name + ".norm2");
      linear_gives(name + ".self_attn.out_proj.weight", name + ".self_attn.out_proj.bias");
      linear_gives(name + ".self_attn.in_proj_weight", name + ".self_attn.in_proj_bias");
      norm_gives(name + ".norm1");
    } else {
      const std::string name = "layers." + std::to_string(layer);
      linear_gives(name + ".fc2.weight", name + ".fc2.bias");
      linear_gives(name + ".fc1.weight", name + ".fc1.bias");
      norm_gives(name + ".norm");
    }
  }
  order.push_back("position.weight");
  order.push_back("embedding.weight");
  return order;
}

int64_t parameter_count(const ModelConfig& config) { return parameter_count(parameter_shapes(config)); }

int64_t parameter_count(const std::vector<ParameterShape>& parameters) {
  int64_t count = 0;
  for (const ParameterShape& parameter : parameters) count += parameter.numel();
  return count;
}

bool has_weight_decay(const std::string& name, int64_t dimensions) {
  return dimensions >= 2 && !ends_with(name, "position.weight");
}

double flops_per_step(const ModelConfig& config, int64_t rows) {
  const double C = static_cast<double>(config.dim);
  const double F = static_cast<double>(config.mlp_dim);
  const double T = static_cast<double>(config.seq_len);
  const double layers = static_cast<double>(config.layers);
  const double B = static_cast<double>(rows);
  const bool attends = config.kind == ModelKind::classifier;

  // Elements of the matrices that every token is multiplied with: qkv 3C*C and output C*C, then the two of the MLP.
  const double per_token = layers * ((attends ? 4.0 * C * C : 0.0) + 2.0 * C * F);
  // The head multiplies one pooled vector a row.
  const double per_row = C * static_cast<double>(config.classes);
  // 6: a multiplication and an addition in forward, twice that in backward (for the input and for the weight).
  const double matmuls = 6.0 * (per_token * T + per_row) * B;
  // Q K^T and P V: 2 matmuls x 2 operations x T^2 C a row and layer, times 3 for forward and backward.
  const double attention = attends ? 12.0 * layers * T * T * C * B : 0.0;
  return matmuls + attention;
}

}  // namespace mgp

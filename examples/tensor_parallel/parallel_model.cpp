#include "examples/tensor_parallel/parallel_model.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "common/activation_checkpoint.hpp"
#include "common/data.hpp"
#include "common/error.hpp"
#include "common/optimizer.hpp"

namespace mgp {
namespace {

at::Tensor gelu_tanh(const at::Tensor& x) { return at::gelu(x, /*approximate=*/"tanh"); }

/// x + fc2(gelu(fc1(norm(x)))): one all-reduce in forward (g in fc2), one in backward (f in fc1).
struct ParallelMlpLayer : torch::nn::Module {
  ParallelMlpLayer(const ModelConfig& config, int64_t hidden, const at::TensorOptions& options,
                   const TensorParallel& tp, const std::string& name) {
    norm = register_module("norm", std::make_shared<LayerNorm>(config.dim, options));
    fc1 =
        register_module("fc1", std::make_shared<ColumnParallelLinear>(config.dim, hidden, options, tp, name + ".fc1"));
    fc2 = register_module("fc2", std::make_shared<RowParallelLinear>(hidden, config.dim, options, tp, name + ".fc2"));
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor hidden = gelu_tanh(fc1->forward(norm->forward(x)));  // [B, T, C] -> [B, T, F/n]
    return x + fc2->forward(hidden);                                      // [B, T, C]
  }
  std::shared_ptr<LayerNorm> norm;
  std::shared_ptr<ColumnParallelLinear> fc1;
  std::shared_ptr<RowParallelLinear> fc2;
};

/// Attention of this rank's heads. Heads never look at each other, so nothing is sent between f and g.
struct ParallelAttention : torch::nn::Module {
  ParallelAttention(const ModelConfig& config, int64_t my_heads, const at::TensorOptions& options,
                    const TensorParallel& parallel, const std::string& name)
      : heads(my_heads), head_dim(config.dim / config.heads), tp(parallel), label(name) {
    const int64_t mine = heads * head_dim;  // of C
    in_proj_weight = register_parameter("in_proj_weight", at::empty({3 * mine, config.dim}, options));
    in_proj_bias = register_parameter("in_proj_bias", at::empty({3 * mine}, options));
    out_proj = register_module("out_proj",
                               std::make_shared<RowParallelLinear>(mine, config.dim, options, tp, name + ".out_proj"));
  }
  at::Tensor forward(const at::Tensor& x) const {
    const int64_t B = x.size(0), T = x.size(1), H = heads, D = head_dim;                            // H: mine
    const at::Tensor qkv = at::linear(enter_parallel(x, tp, label), in_proj_weight, in_proj_bias);  // [B, T, 3HD]
    const std::vector<at::Tensor> parts = qkv.view({B, T, 3, H, D}).unbind(2);                      // 3 x [B, T, H, D]
    const at::Tensor q = parts[0].transpose(1, 2);                                                  // [B, H, T, D]
    const at::Tensor k = parts[1].transpose(1, 2);                                                  // [B, H, T, D]
    const at::Tensor v = parts[2].transpose(1, 2);                                                  // [B, H, T, D]
    const at::Tensor out = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout=*/0);  // [B, H, T, D]
    return out_proj->forward(out.transpose(1, 2).reshape({B, T, H * D}));                               // [B, T, C]
  }
  int64_t heads, head_dim;
  TensorParallel tp;
  std::string label;
  at::Tensor in_proj_weight;  // [3HD, C]: the rows of q of my heads, then of k, then of v
  at::Tensor in_proj_bias;    // [3HD]
  std::shared_ptr<RowParallelLinear> out_proj;
};

/// Two pairs of f and g: four all-reduces a layer, two in forward and two in backward.
struct ParallelEncoderLayer : torch::nn::Module {
  ParallelEncoderLayer(const ModelConfig& config, int64_t heads, int64_t hidden, const at::TensorOptions& options,
                       const TensorParallel& tp, const std::string& name) {
    const int64_t C = config.dim;
    self_attn = register_module("self_attn",
                                std::make_shared<ParallelAttention>(config, heads, options, tp, name + ".self_attn"));
    linear1 =
        register_module("linear1", std::make_shared<ColumnParallelLinear>(C, hidden, options, tp, name + ".linear1"));
    linear2 =
        register_module("linear2", std::make_shared<RowParallelLinear>(hidden, C, options, tp, name + ".linear2"));
    norm1 = register_module("norm1", std::make_shared<LayerNorm>(C, options));
    norm2 = register_module("norm2", std::make_shared<LayerNorm>(C, options));
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor y = x + self_attn->forward(norm1->forward(x));            // [B, T, C]
    const at::Tensor hidden = gelu_tanh(linear1->forward(norm2->forward(y)));  // [B, T, F/n]
    return y + linear2->forward(hidden);                                       // [B, T, C]
  }
  std::shared_ptr<ParallelAttention> self_attn;
  std::shared_ptr<ColumnParallelLinear> linear1;
  std::shared_ptr<RowParallelLinear> linear2;
  std::shared_ptr<LayerNorm> norm1, norm2;
};

/// The frame of both models: what stands outside of the layers is replicated.
struct ParallelModel : ModelImpl {
  ParallelModel(const ModelConfig& config, const at::TensorOptions& options, const TensorParallel& tp)
      : checkpoint_activations(config.checkpoint_activations) {
    const int64_t rank = tp.group->rank(), ranks = tp.group->size();
    const int64_t hidden = slice_rows(config.mlp_dim, rank, ranks).size();
    const bool classifier = config.kind == ModelKind::classifier;
    embedding = register_module("embedding", std::make_shared<Table>(config.vocab_size, config.dim, options));
    position = register_module("position", std::make_shared<Table>(config.seq_len, config.dim, options));
    // Registration order and names are those of the whole model (model.cpp): a checkpoint knows no ranks.
    torch::nn::Module* parent = this;
    if (classifier) parent = register_module("encoder", std::make_shared<torch::nn::Module>()).get();
    const auto list = parent->register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string index = std::to_string(i);
      if (classifier) {
        const int64_t heads = slice_rows(config.heads, rank, ranks).size();
        const auto layer = list->register_module(
            index, std::make_shared<ParallelEncoderLayer>(config, heads, hidden, options, tp, "layers." + index));
        layers.emplace_back([layer](const at::Tensor& x) { return layer->forward(x); });
      } else {
        const auto layer = list->register_module(
            index, std::make_shared<ParallelMlpLayer>(config, hidden, options, tp, "layers." + index));
        layers.emplace_back([layer](const at::Tensor& x) { return layer->forward(x); });
      }
    }
    norm = register_module("norm", std::make_shared<LayerNorm>(config.dim, options));
    head = register_module("head", std::make_shared<Linear>(config.dim, config.classes, options));
  }
  at::Tensor forward(const at::Tensor& tokens) override {
    at::Tensor x = embed(*embedding, *position, tokens);  // [B, T] -> [B, T, C], the same on every rank
    for (const Block& layer : layers) {
      // The second run of a checkpointed layer sends again: g is in it.
      x = checkpoint_activations ? checkpointed(layer, x, /*draws_random_numbers=*/false) : layer(x);  // [B, T, C]
    }
    return classify(*norm, *head, x);  // [B, classes], the same on every rank
  }
  std::shared_ptr<Table> embedding, position;
  std::vector<Block> layers;
  bool checkpoint_activations;
  std::shared_ptr<LayerNorm> norm;
  std::shared_ptr<Linear> head;
};

/// The first ranks get one of `count` more where they do not divide.
Piece cut_blocks(const ParameterShape& shape, int64_t blocks, RowSlice units, int64_t unit) {
  return {shape, units.begin * unit, units.size() * unit, blocks};
}

}  // namespace

void check_parallel_sizes(const ModelConfig& config, int64_t ranks) {
  const auto at_least_one = [&](int64_t count, const char* flag, const char* what) {
    if (count >= ranks) return;
    throw UsageError(
        fmt::format("{} {} cannot be cut over {} ranks, one would have no {}: start at most {} ranks, or choose {} {}",
                    flag, count, ranks, what, count, flag, ranks));
  };
  at_least_one(config.mlp_dim, "--mlp-dim", "hidden value");
  if (config.kind == ModelKind::classifier) at_least_one(config.heads, "--heads", "head");
}

std::vector<Piece> parallel_pieces(const ModelConfig& config, int64_t rank, int64_t ranks) {
  const RowSlice hidden = slice_rows(config.mlp_dim, rank, ranks);
  const RowSlice heads = config.kind == ModelKind::classifier ? slice_rows(config.heads, rank, ranks) : RowSlice{};
  const int64_t head_dim = config.kind == ModelKind::classifier ? config.dim / config.heads : 0;
  std::vector<Piece> pieces;
  for (const ParameterShape& shape : parameter_shapes(config)) {
    const auto is = [&](const char* part) { return shape.name.find(part) != std::string::npos; };
    const bool matrix = shape.shape.size() == 2;
    if (is(".fc1.") || is(".linear1.")) {  // [F, C] and [F]: rows
      pieces.push_back(cut_blocks(shape, /*blocks=*/1, hidden, shape.row_numel()));
    } else if ((is(".fc2.") || is(".linear2.")) && matrix) {  // [C, F]: columns, the same of each row
      pieces.push_back(cut_blocks(shape, /*blocks=*/config.dim, hidden, 1));
    } else if (is("in_proj")) {  // [3C, C] and [3C]: rows of my heads in q, in k, in v (trial B25)
      pieces.push_back(cut_blocks(shape, /*blocks=*/3, heads, head_dim * shape.row_numel()));
    } else if (is("out_proj") && matrix) {  // [C, C]: columns that read my heads
      pieces.push_back(cut_blocks(shape, /*blocks=*/config.dim, heads, head_dim));
    } else {
      pieces.push_back({shape, 0, shape.numel(), 1});  // whole
    }
  }
  return pieces;
}

Model make_parallel_model(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype,
                          const TensorParallel& tp) {
  const Model model = std::make_shared<ParallelModel>(config, at::TensorOptions().device(device).dtype(dtype), tp);
  const at::NoGradGuard no_grad;
  const std::vector<Piece> pieces = parallel_pieces(config, tp.group->rank(), tp.group->size());
  const NamedTensors parameters = named_parameters(*model);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const auto& [name, parameter] = parameters.at(i);
    if (name != piece.of.name || parameter.numel() != piece.numel()) {
      throw RunError(fmt::format("part of {}: {} elements of {}", name, piece.numel(), piece.of.name));
    }
    // Values are a function of (seed, name, place in the whole tensor): the parts together are the whole model.
    const at::Tensor values = at::empty({piece.blocks, piece.count}, at::kDouble);  // on the CPU
    const int64_t block = piece.of.numel() / piece.blocks;
    for (int64_t b = 0; b < piece.blocks; ++b) {
      values[b].copy_(initial_value(piece.of, seed, b * block + piece.first, piece.count));
    }
    parameter.copy_(values.view(parameter.sizes()));
  }
  return model;
}

NamedTensors parts_of(const std::vector<Piece>& pieces, const NamedTensors& tensors) {
  NamedTensors parts;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].is_whole()) parts.push_back(tensors.at(i));
  }
  return parts;
}

NamedTensors replicas_of(const std::vector<Piece>& pieces, const NamedTensors& tensors) {
  NamedTensors replicas;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].is_whole()) replicas.push_back(tensors.at(i));
  }
  return replicas;
}

at::Tensor parallel_gradient_norm(const std::vector<at::Tensor>& parts, const std::vector<at::Tensor>& replicas,
                                  Communicator& tp) {
  const at::NoGradGuard no_grad;
  at::Tensor squares = gradient_norm(parts).to(tp.device(), at::kDouble).square();  // [], this rank's parts
  tp.all_reduce(squares, ReduceOp::sum, {"squared gradient norm", Purpose::bookkeeping}).wait();
  // Every rank has the replicas' gradients, and they are equal: added after the sum, so that they count once.
  const at::Tensor once = gradient_norm(replicas).to(tp.device(), at::kDouble).square();  // []
  const at::ScalarType dtype = !replicas.empty() ? replicas[0].scalar_type() : at::kDouble;
  return (squares + once).sqrt().to(dtype);
}

}  // namespace mgp

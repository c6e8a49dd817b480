"""The two models in PyTorch's own modules: what the C++ models are compared with.

Names and order of the parameters are those of common/model_config.cpp, so a checkpoint that a trainer saved loads here:

    model = twin.build(twin.preset("tiny", "classifier")).double()
    model.load_state_dict(torch.load("init.pt", weights_only=True)["model"])

Letters: B batch, T sequence, C model dim, H heads, F MLP dim, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the fields are those of ModelConfig in C++."""

    kind: str  # "classifier" or "mlp"
    vocab_size: int
    seq_len: int
    dim: int
    heads: int
    layers: int
    mlp_dim: int
    classes: int = 10
    dropout: float = 0.0


def preset(name, kind, **sizes):
    """The sizes of `tiny`, `small` or `base`; single sizes can be given by name."""
    known = {  # V, T, C, H, layers, F of the classifier, F of the MLP model
        "tiny": (1008, 36, 96, 12, 12, 384, 768),
        "small": (8000, 128, 384, 12, 12, 1536, 3072),
        "base": (32000, 256, 768, 12, 12, 3072, 6144),
    }
    vocab_size, seq_len, dim, heads, layers, classifier_dim, mlp_dim = known[name]
    config = Config(kind, vocab_size, seq_len, dim, heads, layers, classifier_dim if kind == "classifier" else mlp_dim)
    return replace(config, **sizes)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


class Frame(nn.Module):
    """What both models share: token and position embedding before, norm, mean over T and head after the layers."""

    def embed(self, tokens):  # [B, T] -> [B, T, C]
        return self.embedding(tokens) + self.position.weight

    def classify(self, x):  # [B, T, C] -> [B, classes]
        return self.head(self.norm(x).mean(dim=1))


class Classifier(Frame):
    """Pre-norm encoder of nn.TransformerEncoderLayer."""

    layer_class = nn.TransformerEncoderLayer

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.seq_len, config.dim)
        layer = self.layer_class(config.dim, config.heads, config.mlp_dim, dropout=config.dropout, activation=gelu_tanh,
                                 layer_norm_eps=1e-5, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, tokens):  # [B, T] -> [B, classes]
        return self.classify(self.encoder(self.embed(tokens)))


class SdpaEncoderLayer(nn.TransformerEncoderLayer):
    """The same parameters, with forward written as in common/model.cpp: q, k and v are views of one projection, and
    nothing is copied between it and the attention kernel. nn.MultiheadAttention copies layouts there."""

    def forward(self, x, **_):  # [B, T, C] -> [B, T, C]
        x = x + self.dropout1(self.attend(self.norm1(x)))
        return x + self.dropout2(self.linear2(self.dropout(gelu_tanh(self.linear1(self.norm2(x))))))

    def attend(self, x):  # [B, T, C] -> [B, T, C]
        B, T, C = x.shape
        attention = self.self_attn
        H = attention.num_heads
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)  # [B, T, 3C]
        q, k, v = (part.transpose(1, 2) for part in qkv.view(B, T, 3, H, C // H).unbind(2))  # [B, H, T, D] each
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=attention.dropout if self.training else 0.0)
        return attention.out_proj(out.transpose(1, 2).reshape(B, T, C))


class SdpaClassifier(Classifier):
    """Classifier with the layers above: the fair opponent in timings."""

    layer_class = SdpaEncoderLayer


class MlpLayer(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))), each token by itself."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, eps=1e-5)
        self.fc1 = nn.Linear(config.dim, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):  # [B, T, C] -> [B, T, C]
        return x + self.dropout(self.fc2(self.dropout(gelu_tanh(self.fc1(self.norm(x))))))


class MlpModel(Frame):
    """The model of tensor parallel and 2D."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.seq_len, config.dim)
        self.layers = nn.ModuleList(MlpLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, tokens):  # [B, T] -> [B, classes]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.classify(x)


def build(config, attention="modules"):
    """The model of `config`. attention="sdpa" takes the classifier with hand-written attention."""
    if config.kind == "mlp":
        return MlpModel(config)
    return (SdpaClassifier if attention == "sdpa" else Classifier)(config)


@torch.no_grad()
def initialise(model, seed=1234):
    """Values of the same size as the trainers' (other numbers): norms 1, biases 0, matrices 0.5 / sqrt(last dim)."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.5 / parameter.shape[1] ** 0.5, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def has_weight_decay(name, dimensions):
    """The rule of common/model_config.cpp: matrices and the token embedding, not biases, norms and positions."""
    return dimensions >= 2 and not name.endswith("position.weight")


def make_optimizer(model, lr=1e-3, weight_decay=0.01, fused=False):
    """torch.optim.AdamW with the trainers' two groups."""
    decayed = [p for name, p in model.named_parameters() if has_weight_decay(name, p.dim())]
    plain = [p for name, p in model.named_parameters() if not has_weight_decay(name, p.dim())]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=fused)


def slice_rows(rows, rank, ranks):
    """Rows [begin, end) of a rank: the first `rows % ranks` ranks take one row more (common/data.cpp)."""
    share, extra = divmod(rows, ranks)
    begin = rank * share + min(rank, extra)
    return begin, begin + share + (1 if rank < extra else 0)

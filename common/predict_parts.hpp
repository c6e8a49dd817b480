// Bytes of single tensors and layers: what the memory formulas of all patterns are made of (predict.cpp has the one for
// models that a rank holds whole).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "common/model_config.hpp"
#include "common/precision.hpp"

namespace mgp {

int64_t bytes_of(at::ScalarType dtype);

/// Bytes of one element in matmuls and attention: bf16 or fp16 under autocast, else as stored.
int64_t compute_bytes(Precision precision);

/// Bytes of one element of the residual stream: under autocast it keeps the storage dtype, low weights make it low too.
int64_t stream_bytes(Precision precision, bool low_weights);

/// The math kernel of attention computes bf16 and fp16 in fp32.
int64_t math_bytes(Precision precision);

/// Bytes of the low-precision copies that autocast makes of the weights which enter a matmul. The graph saves them, so
/// each lives from its layer's forward until backward has passed that layer. With checkpointing a layer's copies are
/// made in each of its two runs and live as long as that run's tensors: one layer's at a time.
struct CastWeights {
  int64_t layers = 0;   ///< of all layers together
  int64_t outside = 0;  ///< the head's
};
CastWeights cast_weights(const ModelConfig& config, Precision precision);

/// Parameters of one layer.
int64_t layer_parameters(const ModelConfig& config);

/// The residual stream at one place, [B,T,C]: what a layer reads and what it writes.
int64_t residual_stream(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows);

/// Attention's probabilities [B,H,T,T], which the math kernel writes out.
int64_t probabilities(const ModelConfig& m, int64_t rows);

/// Mean and 1/std of one LayerNorm, [B,T] each.
int64_t norm_statistics(const ModelConfig& m, Precision precision, bool low_weights, int64_t rows);

/// All that one layer keeps for its backward, its input included.
int64_t layer_bytes(const ModelConfig& m, Precision precision, bool math_attention, int64_t rows, bool low_weights);

/// What the backward of one layer holds at its worst moment on top of what the layer saved.
int64_t backward_temporaries(const ModelConfig& m, Precision precision, bool math_attention, bool low_weights,
                             int64_t rows);

/// Activations that forward keeps for backward, for `rows` rows, in bytes. Counted tensor by tensor
/// (compare Korthikanti et al., arXiv 2205.05198, section 4). With ModelConfig::checkpoint_activations a layer keeps
/// its input alone (Chen et al., arXiv 1604.06174).
int64_t activation_bytes(const ModelConfig& config, Precision precision, bool math_attention, int64_t rows,
                         bool low_weights = false);

/// What backward makes again for one layer with ModelConfig::checkpoint_activations, in bytes: everything that the
/// layer would have kept, but its input. One layer's stands at a time. 0 without checkpointing.
int64_t recomputation_bytes(const ModelConfig& config, Precision precision, bool math_attention, int64_t rows,
                            bool low_weights = false);

}  // namespace mgp

// Predictions against sums done by hand.
#include "common/predict.hpp"

#include <gtest/gtest.h>

#include "common/text.hpp"

#include "examples/ddp/gradient_reducer.hpp"
#include "examples/ddp/naive_reduce.hpp"

namespace mgp {
namespace {

Options base_on_gpu(Precision precision, int64_t rows) {
  Options options;
  options.preset = "base";
  options.model = preset_config("base", ModelKind::classifier);
  options.precision = precision;
  options.batch_size = rows;
  options.global_batch_size = rows;
  options.world = 1;
  options.cuda = true;
  return options;
}

TEST(Predict, ActivationsOfTheBaseModelAreSixteenTimesALayer) {
  // fp32, memory-efficient attention: 16 tensors of [B, T, C] a layer (T*C*4 = 786,432 bytes a row), statistics apart.
  const ModelConfig config = preset_config("base", ModelKind::classifier);
  const int64_t unit = 256 * 768 * 4;
  const int64_t norms = 2 * 2 * 256 * 4, log_sum_exp = 12 * 256 * 4;
  const int64_t row = 12 * (16 * unit + norms + log_sum_exp) + unit + norms / 2 + 256 * 8;
  EXPECT_EQ(activation_bytes(config, Precision::fp32, false, 1), row);
  EXPECT_EQ(activation_bytes(config, Precision::fp32, false, 32), 32 * row);
}

TEST(Predict, MathAttentionKeepsTheProbabilities) {
  const ModelConfig config = preset_config("base", ModelKind::classifier);
  const int64_t difference =
      activation_bytes(config, Precision::fp32, true, 1) - activation_bytes(config, Precision::fp32, false, 1);
  EXPECT_EQ(difference, 12 * (12 * 256 * 256 * 4 - 12 * 256 * 4));
  // Under autocast it computes in fp32: probabilities, Q, K and V have 4 bytes there, Q, K and V else 2.
  const int64_t low =
      activation_bytes(config, Precision::bf16, true, 1) - activation_bytes(config, Precision::bf16, false, 1);
  EXPECT_EQ(low, 12 * (12 * 256 * 256 * 4 - 12 * 256 * 4 + 3 * 256 * 768 * 2));
}

TEST(Predict, CheckpointingKeepsOneTensorALayerAndMakesOneLayerAgain) {
  ModelConfig config = preset_config("base", ModelKind::classifier);
  EXPECT_EQ(recomputation_bytes(config, Precision::fp32, false, 1), 0);
  config.checkpoint_activations = true;
  const int64_t unit = 256 * 768 * 4;
  const int64_t norms = 2 * 2 * 256 * 4, log_sum_exp = 12 * 256 * 4;
  // The inputs of 12 layers and of the final norm; of one layer 15 more.
  EXPECT_EQ(activation_bytes(config, Precision::fp32, false, 32), 32 * (13 * unit + norms / 2 + 256 * 8));
  EXPECT_EQ(recomputation_bytes(config, Precision::fp32, false, 32), 32 * (15 * unit + norms + log_sum_exp));
  // Under autocast the residual streams stay fp32, the rest of the layer halves; its weights are cast again, the head's
  // (7,690 with bias) stay from forward on.
  EXPECT_EQ(activation_bytes(config, Precision::bf16, false, 1), 13 * unit + norms / 2 + 256 * 8 + 2 * 7690);
  const int64_t layer_weights = 12 * 768 * 768 + (3 + 1 + 4 + 1) * 768;  // matrices and their biases
  EXPECT_EQ(recomputation_bytes(config, Precision::bf16, false, 1),
            unit + 14 * unit / 2 + norms + log_sum_exp + 2 * layer_weights);
  EXPECT_EQ(recomputation_bytes(config, Precision::bf16, false, 1, /*low_weights=*/true),
            15 * unit / 2 + norms + log_sum_exp);
}

TEST(Predict, CheckpointingPeaksInTheLastLayerOrInTheFirst) {
  Options options = base_on_gpu(Precision::fp32, 64);
  options.model.checkpoint_activations = true;
  const int64_t stream = 64ll * 256 * 768 * 4;
  // 50 MB a stream against 28 MB of gradients a layer: the most is there when the last layer runs again.
  const MemoryPrediction many = predict_memory(options, {});
  EXPECT_EQ(many.gradients, 0);
  EXPECT_GT(many.activations, (12 + 16 + 1 + 4) * stream);
  EXPECT_LT(many.activations, (12 + 16 + 1 + 4 + 1) * stream);
  // 6 MB a stream: when the first layer runs again, and 11 layers, the norm and the head have their gradients.
  options.batch_size = options.global_batch_size = 8;
  const MemoryPrediction few = predict_memory(options, {});
  EXPECT_EQ(few.gradients, 4ll * (11 * 7087872 + 2 * 768 + 7690));
  EXPECT_EQ(many.activations / 8 - few.activations,
            11 * stream / 8 - 7ll * 768 * 3072 * 4 / 8);  // the matrix's gradient does not go with the rows
  // In buckets the gradients are there from the start, and with --accumulate those of the pass before.
  EXPECT_EQ(predict_memory(options, {/*gradients_in_buckets=*/true}).gradients, 0);
  options.accumulate = 2;
  EXPECT_EQ(predict_memory(options, {}).gradients, 4ll * 109836298);
}

TEST(Predict, CheckpointingFitsSeveralTimesTheRows) {
  Options options = base_on_gpu(Precision::fp32, 4096);
  const int64_t plain = largest_batch(options, {}, 16ll << 30);
  options.model.checkpoint_activations = true;
  EXPECT_GT(largest_batch(options, {}, 16ll << 30), 5 * plain);
}

TEST(Predict, StatesAreSixteenBytesAParameter) {
  const Options options = base_on_gpu(Precision::fp32, 32);
  const MemoryPrediction memory = predict_memory(options, {/*gradients_in_buckets=*/true});
  EXPECT_EQ(memory.parameters, 4 * 109836298);
  EXPECT_EQ(memory.communication_buffers, 4 * 109836298);
  EXPECT_NEAR(static_cast<double>(memory.optimizer), 8.0 * 109836298, 1024);
  EXPECT_EQ(memory.peak(), memory.parameters + memory.optimizer + memory.communication_buffers + memory.gradients +
                               memory.activations + memory.workspace);
}

TEST(Predict, LargestBatchIsTheLastThatFits) {
  Options options = base_on_gpu(Precision::fp32, 4096);
  const int64_t free_bytes = 16ll << 30;
  const int64_t rows = largest_batch(options, {}, free_bytes);
  ASSERT_GT(rows, 0);
  options.batch_size = rows;
  EXPECT_LE(predict_memory(options, {}).peak(), free_bytes);
  options.batch_size = rows + 1;
  EXPECT_GT(predict_memory(options, {}).peak(), free_bytes);
  options.batch_size = 4096;
  EXPECT_EQ(largest_batch(options, {}, 1 << 20), 0);
}

TEST(Predict, RingModel) {
  EXPECT_DOUBLE_EQ(wire_bytes("all_reduce", 100, 4), 150);
  EXPECT_DOUBLE_EQ(wire_bytes("all_gather", 100, 4), 75);
  EXPECT_DOUBLE_EQ(wire_bytes("all_reduce", 100, 1), 0);
  EXPECT_DOUBLE_EQ(wire_bytes("broadcast", 100, 1), 0);
  EXPECT_DOUBLE_EQ(wire_bytes("send", 100, 2), 100);
}

TEST(Predict, LowWeightsHoldMastersAndSaveTheCasts) {
  Options options = base_on_gpu(Precision::bf16, 32);
  const MemoryPrediction autocast = predict_memory(options, {});
  options.weights = "low";
  const MemoryPrediction low = predict_memory(options, {});
  EXPECT_EQ(autocast.parameters, 4ll * 109836298);
  EXPECT_EQ(low.parameters, 6ll * 109836298);
  EXPECT_EQ(low.optimizer, autocast.optimizer);
  EXPECT_LT(low.activations, autocast.activations);
}

TEST(Buckets, AreCutWhenFull) {
  using Buckets = std::vector<std::vector<size_t>>;
  // The first closes at 10, the others at 25; what is larger than a bucket ends it.
  EXPECT_EQ(assign_buckets({4, 6, 10, 10, 5, 100, 1}, 10, 25), (Buckets{{0, 1}, {2, 3, 4}, {5}, {6}}));
  EXPECT_EQ(assign_buckets({50}, 10, 25), (Buckets{{0}}));
  EXPECT_EQ(assign_buckets({}, 10, 25), Buckets{});
  EXPECT_EQ(assign_buckets({1, 1, 1}, 10, 25), (Buckets{{0, 1, 2}}));
}

TEST(Buckets, BaseModelInBucketsOf25MiB) {
  const ModelConfig config = preset_config("base", ModelKind::classifier);
  const CallPrediction calls = predict_gradient_calls(config, Precision::fp32, 25.0);
  EXPECT_EQ(calls.payload_bytes, 4ll * 109836298 + (128 - 10 * 4));  // head.bias is padded to 128 bytes
  // 85M layer parameters = 340 MB in buckets of 25 MiB and what a last matrix adds, one bucket of 1 MiB before them, the
  // embedding in the last.
  EXPECT_GE(calls.calls, 11);
  EXPECT_LE(calls.calls, 15);
  EXPECT_EQ(predict_naive_calls(config, 4).calls, 2 + 12 * 12 + 4);
  EXPECT_EQ(predict_naive_calls(config, 4).payload_bytes, 4ll * 109836298);
  EXPECT_EQ(predict_gradient_calls(config, Precision::fp64, 25.0).payload_bytes, 8ll * 109836298 + (128 - 10 * 8));
}

TEST(Predict, ChoicesAreSaidWithWhatTheyCostOrSave) {
  Options options;
  options.model = preset_config("base", ModelKind::classifier);
  options.cuda = true;
  options.batch_size = options.global_batch_size = 32;
  options.weights = "autocast";
  EXPECT_EQ(choices_text(options, {}), "");  // fp32: no choice
  options.precision = Precision::bf16;
  const int64_t autocast = predict_memory(options, {}).peak();
  EXPECT_NE(choices_text(options, {}).find("--weights autocast, beside low, costs"), std::string::npos);
  options.weights = "low";
  const int64_t low = predict_memory(options, {}).peak();
  const std::string text = choices_text(options, {});
  EXPECT_NE(text.find("--weights low, beside autocast, saves " + human_bytes(static_cast<double>(autocast - low))),
            std::string::npos)
      << text;
  options.model.checkpoint_activations = true;
  const int64_t checkpointed = predict_memory(options, {}).peak();
  EXPECT_NE(choices_text(options, {})
                .find("--checkpoint-activations saves " + human_bytes(static_cast<double>(low - checkpointed))),
            std::string::npos);
}

}  // namespace
}  // namespace mgp

// train_model_parallel's devices and memory: where stages go by default, and that all stages on one device need what the
// whole model needs there.
#include <gtest/gtest.h>

#include "common/device_list.hpp"
#include "common/error.hpp"
#include "examples/model_parallel/predict_model_parallel.hpp"

namespace mgp {
namespace {

std::string text_of(const std::vector<at::Device>& devices) {
  std::string text;
  for (const at::Device device : devices) text += device.str() + " ";
  return text;
}

TEST(StageDevices, AreSpreadOverTheGpusThatAreThere) {
  EXPECT_EQ(text_of(spread_over_gpus(3, 8)), "cuda:0 cuda:1 cuda:2 ");
  EXPECT_EQ(text_of(spread_over_gpus(3, 2)), "cuda:0 cuda:0 cuda:1 ");
  EXPECT_EQ(text_of(spread_over_gpus(4, 1)), "cuda:0 cuda:0 cuda:0 cuda:0 ");
}

TEST(StageDevices, AreNamedAsLibTorchOrByNumber) {
  EXPECT_EQ(text_of(parse_devices("0,cuda:3,0")), "cuda:0 cuda:3 cuda:0 ");
  EXPECT_EQ(text_of(parse_devices("cpu,cpu")), "cpu cpu ");
  for (const char* text : {"", ",", "0,", "cpu,1", "cuda", "-1", "cuda:", "1.0", "128", " 0", "cpu:0"}) {
    EXPECT_THROW(parse_devices(text), UsageError) << text;
  }
}

StageOptions options_of(const ModelConfig& model, const std::vector<at::Device>& devices) {
  StageOptions options;
  options.cuda = true;
  options.model = model;
  options.batch_size = options.global_batch_size = 8;
  options.devices = devices;
  options.parts = stage_parts(split_layers("", model.layers, static_cast<int64_t>(devices.size()), "--devices"));
  return options;
}

TEST(StageMemory, OnOneDeviceIsThatOfTheWholeModel) {
  for (const ModelKind kind : {ModelKind::classifier, ModelKind::mlp}) {
    for (const char* preset : {"tiny", "base"}) {
      for (const bool checkpointing : {false, true}) {
        for (const int64_t accumulate : {1, 2}) {
          for (const Precision precision : {Precision::fp32, Precision::bf16, Precision::fp64}) {
            StageOptions options = options_of(preset_config(preset, kind), parse_devices("0,0,0"));
            options.model.checkpoint_activations = checkpointing;
            options.accumulate = accumulate;
            options.precision = precision;
            const MemoryPrediction whole = predict_memory(options, MemoryPattern{});
            const MemoryPrediction mine = predict_device_memory(options, options.first_device());
            EXPECT_EQ(mine.parameters, whole.parameters);
            EXPECT_EQ(mine.optimizer, whole.optimizer);
            EXPECT_EQ(mine.gradients, whole.gradients);
            EXPECT_EQ(mine.activations, whole.activations);
            EXPECT_EQ(mine.peak(), whole.peak());
            EXPECT_TRUE(predict_copies(options).empty());
          }
        }
      }
    }
  }
}

TEST(StageMemory, OfAllDevicesHoldsEachParameterOnce) {
  const StageOptions options = options_of(preset_config("base", ModelKind::classifier), parse_devices("0,1,1,2"));
  int64_t parameters = 0;
  for (const at::Device device : distinct_devices(options.devices)) {
    parameters += predict_device_memory(options, device).parameters;
  }
  EXPECT_EQ(parameters, 4 * parameter_count(options.model));
  const std::vector<CallPrediction> copies = predict_copies(options);
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].calls, 4);  // two boundaries, there and back
  EXPECT_EQ(copies[0].payload_bytes, 4 * 8 * 256 * 768 * 4);
}

}  // namespace
}  // namespace mgp

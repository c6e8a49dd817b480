// train_model_parallel: one model over several devices, driven by one process, one device at a time.
//
// Idea      The model is cut between its layers: embedding and the first layers on one device, the middle on the next, the
//           last layers, norm, head and loss on the last. Activations are copied from device to device. Autograd knows the
//           copy as an operation and carries the gradients back through it, so backward needs no code of its own. A model
//           that is too large for one device trains, but while one device works the others wait. (The naive baseline of
//           Huang et al., "GPipe", arXiv 1811.06965; the pipeline trainer fills the gaps with microbatches.)
// Holds     per device: parameters, gradients and moments of its own layers, 16 bytes each in fp32, and what these layers
//           keep for backward. The embedding makes the first device heavier, --split can make up for it.
// Wire      per pass and boundary: one activation [B, T, C] forwards, its gradient backwards. No collective, no
//           communicator: plain copies. Between stages on one device nothing is copied.
// Run       build/bin/train_model_parallel                               # 3 stages on the GPUs that are there
//           build/bin/train_model_parallel --devices 0,1,2 --split 3,4,5
//           build/bin/train_model_parallel --devices cpu,cpu --verify    # two stages on the CPU, proved equal
//           build/bin/train_model_parallel --devices 0,0,0               # several stages on one GPU
// Watch     nvidia-smi: memory on all devices, utilisation wanders from one to the next and back. Add a stage: memory per
//           device falls, the step does not get faster.
// Prints    as train_single; what each stage holds, memory of each device; copies predicted and counted; busy time and
//           gap of each stage, which --trace draws.
// Read      this file -> common/stage_model.cpp (a part of the model) -> stage_clock.cpp (busy and gap).

#include <ATen/Context.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "common/counter_random.hpp"  // counter_hash: a seed for each device
#include "common/data.hpp"            // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"          // claim_device: before anything touches CUDA
#include "common/device_list.hpp"     // --devices, and what each device holds
#include "common/error.hpp"           // exit codes
#include "common/launch.hpp"          // who am I
#include "common/optimizer.hpp"       // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"         // the one command line of all trainers
#include "common/precision.hpp"       // Autocast
#include "common/run.hpp"             // banner, progress line, checkpoints, verdict
#include "common/stage_model.hpp"     // layers [first, last) of the model
#include "common/text.hpp"
#include "examples/model_parallel/predict_model_parallel.hpp"
#include "examples/model_parallel/stage_clock.hpp"
#include "examples/model_parallel/stage_options.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{"train_model_parallel",
                           "model_parallel",
                           "train_model_parallel: the model cut between its layers, stages on several devices",
                           /*many_ranks=*/false,
                           /*compares_precisions=*/false,
                           /*phases=*/{"data", "forward", "backward", "optimizer"},
                           /*no_cuda_graph=*/"a graph is of one device, and a step here goes over several"};

/// One stage on its device.
struct Stage {
  at::Device device;
  std::shared_ptr<StageModel> model;
  NamedTensors parameters;
};

/// Dropout on several GPUs: Run gives all generators the same seed in each step, and then layers on different devices
/// would draw the same masks.
void seed_dropout(const StageOptions& options, int64_t step) {
  if (options.dropout <= 0) return;
  const std::vector<at::Device> devices = distinct_devices(options.devices);
  for (size_t i = 1; i < devices.size(); ++i) {
    at::Generator generator = at::globalContext().defaultGenerator(devices[i]);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(counter_hash(options.seed + i, static_cast<uint64_t>(step)));
  }
}

/// Bytes that `steps` steps copy between devices.
int64_t predicted_bytes(const StageOptions& options, int64_t steps) {
  const std::vector<CallPrediction> predicted = predict_copies(options);
  return predicted.empty() ? 0 : predicted.front().payload_bytes * steps;
}

/// What was copied beside what was predicted, and the peak of each device.
std::string device_report(const StageOptions& options, const StageClock& clock) {
  const std::vector<CallPrediction> predicted = predict_copies(options);
  const int64_t calls = predicted.empty() ? 0 : predicted.front().calls * clock.steps();
  const int64_t bytes = predicted_bytes(options, clock.steps());
  std::string text =
      fmt::format("copies between devices in {} steps: predicted {} with {} bytes, measured {} with {}: {}\n",
                  clock.steps(), calls, with_commas(bytes), clock.copies(), with_commas(clock.copied_bytes()),
                  calls == clock.copies() && bytes == clock.copied_bytes() ? "equal" : "DIFFERENT");
  if (!options.cuda) return text;
  return text + measured_memory_table(options.devices,
                                      [&](at::Device device) { return predict_device_memory(options, device); });
}

int train_model_parallel(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  StageOptions options;
  parse_options(argc, argv, kTrainer, options, [&](CLI::App& app) { add_stage_flags(app, options); });

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  const Launch launch = detect_launch();
  settle_stages(options, launch);  // devices, split and batches are complete and checked; nothing is allocated yet
  const MemoryPattern memory = first_device_memory(options);
  const std::vector<CallPrediction> copies = predict_copies(options);
  if (const auto code = answer_and_stop(options, launch, memory, copies)) {
    if (options.predict) say(launch, stage_tables(options));
    return *code;
  }
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  // The first device is the one whose clock measures steps, and where the norm over all devices comes together.
  const at::Device first = claim_device(launch, options.device);
  const at::Device last = options.last_device();
  refuse_if_too_large(options, launch);
  apply_precision(options.precision);
  Run run(options, launch, first, /*world=*/nullptr, memory, copies);
  say(launch, other_devices(options, launch) + stage_tables(options));

  int64_t bytes_off = 0;  // copied between devices, measured less predicted
  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.
    StageClock clock(options.devices, options.warmup_steps);

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // Tokens are needed on the first device, labels on the last.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), first);
    const RowSlice rows = slice_rows(options.global_batch_size, /*rank=*/0, /*ranks=*/1);

    // 4 ── model ──────────────────────────────────────────────────────────────────────────────────────────────────────
    std::vector<Stage> stages;
    NamedTensors parameters, masters;  // of all stages, in the order and under the names of the whole model
    for (size_t s = 0; s < options.parts.size(); ++s) {
      const at::Device device = options.devices[s];
      const auto model =
          make_stage(options.model, options.parts[s], options.seed, device, storage_dtype(options.precision));
      const NamedTensors mine = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
      stages.push_back({device, model, named_parameters(*model)});
      parameters.insert(parameters.end(), stages.back().parameters.begin(), stages.back().parameters.end());
      masters.insert(masters.end(), mine.begin(), mine.end());
    }
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    // One optimizer whose groups are of one device each. For checkpoints it is the optimizer of the whole model.
    AdamW optimizer(parameters, masters, options.adamw);
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, last);  // where the loss is
    run.load(optimizer, scaler);  // --load: weights, moments, scale, step, data position, random state

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      seed_dropout(options, step);
      optimizer.zero_grad();  // gradients are dropped: backward stores fresh ones instead of adding to zeros
      const auto loss_options = at::TensorOptions().dtype(storage_dtype(options.precision)).device(last);
      at::Tensor loss_sum = at::zeros({}, loss_options);  // []

      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        run.phase("data");
        const Batch batch = data.rows(step, rows.part(micro, options.accumulate));  // tokens [b, T], labels [b]
        const at::Tensor labels = batch.labels.to(last);                            // [b]

        run.phase("forward");
        at::Tensor loss;  // [], this part's share of the mean over the whole batch
        {
          const Autocast autocast(first, options.autocast());
          at::Tensor x = batch.tokens;  // [b, T], then [b, T, C] from stage to stage, at last [b, classes]
          for (size_t s = 0; s < stages.size(); ++s) {
            const Stage& stage = stages[s];
            if (s > 0) {
              // The copy between devices. Both devices' streams wait for it, the host does not. In backward autograd
              // copies the gradient the other way. On the same device x stays the tensor that it is.
              const at::Tensor sent = x;  // [b, T, C] on the device of stage s - 1
              x = sent.to(stage.device);  // [b, T, C] on the device of stage s
              const bool crosses = stage.device != sent.device();
              if (crosses) clock.copied(static_cast<int64_t>(x.nbytes()));
              // Backward passes here too, on its way down: stage s is done, and stage s - 1 begins.
              x.register_hook([&clock, s](const at::Tensor&) { clock.end(s); });
              sent.register_hook([&clock, s, crosses](const at::Tensor& gradient) {  // [b, T, C]
                if (crosses) clock.copied(static_cast<int64_t>(gradient.nbytes()));
                clock.begin(s - 1, StageClock::backward);
              });
            }
            clock.begin(s, StageClock::forward);
            x = stage.model->forward(x);
            if (s + 1 < stages.size()) clock.end(s);
          }
          // Summed over the rows and divided by the rows of the WHOLE step: parts of any size then add up to the mean.
          loss = cross_entropy_sum(x, labels) / static_cast<double>(options.global_batch_size);
          clock.end(stages.size() - 1);
        }
        loss_sum += loss.detach();
        run.inject_inf(step, loss);  // a planned fault; else nothing

        run.phase("backward");
        clock.begin(stages.size() - 1, StageClock::backward);
        scaler.scale(loss).backward();  // through all stages and the copies between them, last to first
        clock.end(0);
        for (const Stage& stage : stages) widen_gradients(stage.parameters);  // --weights low: fp32 from here on
      }

      run.phase("optimizer");
      scaler.unscale(gradients_of(parameters), /*world=*/nullptr);  // an overflow on any device skips the step on all
      run.gradients_ready(step, parameters);
      // The norm is over all devices: of each stage where its gradients are, then one over these on the first device.
      std::vector<at::Tensor> norms;  // [] each
      for (const Stage& stage : stages) norms.push_back(gradient_norm(gradients_of(stage.parameters)).to(first));
      const at::Tensor norm = at::linalg_vector_norm(at::stack(norms));  // [stages] -> []
      for (size_t s = 0; s < stages.size(); ++s) {
        clip_gradients(gradients_of(stages[s].parameters), norm.to(stages[s].device), options.clip_norm);
      }
      // Each device updates what it holds; they do it at the same time, since nobody waits here for anybody.
      for (size_t s = 0; s < stages.size(); ++s) clock.begin(s, StageClock::optimizer);
      optimizer.step(run.learning_rate(step), scaler.found_inf());
      for (size_t s = 0; s < stages.size(); ++s) clock.end(s);
      scaler.update();
      clock.step_ended(&run);

      run.after_step(step, loss_sum.to(first), norm, scaler);
      run.save_if_due(step, optimizer, scaler);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);
    run.training_ended(optimizer.masters());
    say(launch, clock.report() + device_report(options, clock));
    bytes_off = clock.copied_bytes() - predicted_bytes(options, clock.steps());
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) {
    Verdict verdict = compare_with_one_device(options, record, first);
    verdict.checks.push_back({"bytes copied between devices, against the prediction",
                              static_cast<double>(std::abs(bytes_off)), /*limit=*/0.5});
    return verdict;
  });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_model_parallel, argc, argv); }

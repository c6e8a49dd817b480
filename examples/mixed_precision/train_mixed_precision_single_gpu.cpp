// train_mixed_precision_single_gpu: the same training in FP32, TF32, FP16 and BF16 on one device, compared.
//
// Idea      Tensor cores multiply 16-bit numbers many times faster than fp32, and 16-bit activations take half the memory.
//           Autocast runs matmuls and attention in the low precision and keeps weights, norms, loss and optimizer in fp32,
//           because an update is far smaller than the spacing of 16-bit numbers around a weight.
//             tf32  fp32 storage; matmuls round their inputs to 10 bits of mantissa. No change in the program.
//             bf16  8 bits of exponent as fp32, 8 of mantissa: range is no problem, so no loss scale.
//             fp16  5 bits of exponent, 11 of mantissa: gradients below 6e-8 are zero, above 65,504 inf; needs a loss scale.
//           (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740; Kalamkar et al., arXiv 1905.12322.)
// Holds     as train_single: 16 bytes a parameter in fp32. Autocast adds a 2-byte copy of the weights that enter matmuls,
//           from forward to the end of backward, and halves what forward keeps of matmuls, attention and GELU.
// Wire      nothing.
// Run       build/bin/train_mixed_precision_single_gpu                          # --precision all: every mode in turn
//           build/bin/train_mixed_precision_single_gpu --device 0 --precision bf16 --batch-size 16
//           build/bin/train_mixed_precision_single_gpu --device cpu             # fp32 and bf16 (oneDNN)
// Watch     nvidia-smi: memory falls from mode to mode; power and utilisation tell whether the tensor cores are fed.
// Prints    per mode what train_single prints, and what the loss scale did; with `all` one table at the end: times, memory
//           and losses beside fp32, and how far the parameters have moved apart.
// Read      this file -> common/precision.hpp (the autocast guard) -> common/loss_scaler.cpp -> AdamW::step (a skipped
//           step does not count).

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "common/data.hpp"    // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"  // claim_device: before anything touches CUDA
#include "common/device_memory.hpp"
#include "common/error.hpp"        // exit codes
#include "common/launch.hpp"       // who am I
#include "common/loss_scaler.hpp"  // the loss scale of fp16
#include "common/model.hpp"        // the Transformer classifier and the MLP model
#include "common/optimizer.hpp"    // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"      // the one command line of all trainers
#include "common/precision.hpp"    // Autocast
#include "common/run.hpp"          // banner, progress line, ledgers, checkpoints, verdict
#include "common/step_graph.hpp"   // --cuda-graph: the step captured and replayed
#include "common/text.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{"train_mixed_precision_single_gpu", "mixed_precision",
                           "train_mixed_precision_single_gpu: one device in fp32, tf32, bf16 and fp16, compared",
                           /*many_ranks=*/false, /*compares_precisions=*/true};

/// What is left of one mode for the comparison.
struct Mode {
  Precision precision = Precision::fp32;
  std::string missing;  ///< why this device cannot do it; empty if it ran
  RunNumbers numbers;
  NamedTensors initial, final;  ///< parameters on the CPU
};

/// Steps 3 to 8 of a trainer, in one precision. Returns the exit code.
int train_in(const Options& options, const Launch& launch, at::Device device, Mode& mode) {
  release_cached_memory(device);  // fresh memory for each mode
  reset_memory_peaks(device);     // and peaks of its own
  apply_precision(options.precision);
  Run run(options, launch, device, /*world=*/nullptr, MemoryPattern{}, /*calls=*/{});

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.
    StepGraph graph(options.cuda_graph, device, /*world=*/nullptr);  // off: does nothing

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows = slice_rows(options.global_batch_size, /*rank=*/0, /*ranks=*/1);

    // 4 ── model ──────────────────────────────────────────────────────────────────────────────────────────────────────
    // Weights stay fp32 in all modes but fp64: the same initial bits, so that differences come from the arithmetic.
    Model model = make_model(options.model, options.seed, device, storage_dtype(options.precision));
    const NamedTensors masters = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(named_parameters(*model), masters, options.adamw);
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);  // does nothing unless fp16
    run.load(optimizer, scaler);
    mode.initial = copies_on_cpu(optimizer.masters());

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    // What changes from step to step is put in place before the step: a CUDA graph knows addresses, not values.
    StepBatches batches(options.accumulate, /*fixed=*/options.cuda_graph);
    LearningRate lr(device, /*on_device=*/options.cuda_graph);
    at::Tensor loss_sum, norm;  // [] each, on the device: the host does not wait for them
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      run.phase("data");
      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        batches.put(micro, data.rows(step, rows.part(micro, options.accumulate)));  // tokens [b, T], labels [b]
      }
      lr.set(run.learning_rate(step));

      graph.run([&] {           // a plain call; with --cuda-graph on recorded once, then replayed
        optimizer.zero_grad();  // gradients are dropped: backward stores fresh ones instead of adding to zeros
        loss_sum = at::zeros({}, at::TensorOptions().dtype(storage_dtype(options.precision)).device(device));

        for (int64_t micro = 0; micro < options.accumulate; ++micro) {
          run.phase("forward");
          at::Tensor loss;  // [], this part's share of the mean over the whole batch, fp32 in every mode
          {
            const Autocast autocast(device, options.autocast());              // the casts happen inside the operations
            const at::Tensor logits = model->forward(batches[micro].tokens);  // [b, classes], low precision
            loss = cross_entropy_sum(logits, batches[micro].labels) / static_cast<double>(options.global_batch_size);
          }
          loss_sum += loss.detach();
          run.inject_inf(step, loss);  // a planned fault; else nothing
          run.phase("backward");
          // Outside of autocast: each operation remembers its dtype. fp16 gradients are scaled up from here on.
          scaler.scale(loss).backward();
          widen_gradients(optimizer.parameters());  // --weights low: fp32 from here on; else nothing
        }

        // The order matters: unscale, then norm, then clip, then step. All of it stays on the device.
        run.phase("optimizer");
        const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
        scaler.unscale(gradients, /*world=*/nullptr);
        run.gradients_ready(step, optimizer.parameters());
        norm = gradient_norm(gradients);  // inf or NaN when the step is going to be skipped
        clip_gradients(gradients, norm, options.clip_norm);
        optimizer.step(lr, scaler.found_inf());  // changes nothing after an overflow
        scaler.update();                         // halve after an overflow, double after many good steps
      });

      run.after_step(step, loss_sum, norm, scaler);
      run.save_if_due(step, optimizer, scaler);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);
    run.training_ended(optimizer.masters());
    mode.final = copies_on_cpu(optimizer.masters());
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  mode.numbers = run.numbers();
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, device); });
}

/// The table of all modes. The first one is what the others are compared with.
std::string comparison(const std::vector<Mode>& modes, bool cuda) {
  std::vector<std::vector<std::string>> rows = {{"precision", "step ms", "x", "tokens/s", "loss",
                                                 "largest loss difference", "parameters apart", "skipped",
                                                 "loss scale"}};
  if (cuda) {
    rows.front().insert(rows.front().begin() + 4, {"GPU busy", "peak allocated MiB", "x", "peak reserved MiB"});
  }
  const RunNumbers& first = modes.front().numbers;
  const auto mib = [](int64_t bytes) { return fmt::format("{:.0f}", static_cast<double>(bytes) / (1 << 20)); };
  for (const Mode& mode : modes) {
    if (!mode.missing.empty()) continue;
    const RunNumbers& n = mode.numbers;
    double apart = 0.0;  // the largest difference of a step's loss to the first mode's
    for (size_t i = 0; i < std::min(n.losses.size(), first.losses.size()); ++i) {
      apart = std::max(apart, std::abs(n.losses[i] - first.losses[i]));
    }
    std::vector<std::string> row = {to_string(mode.precision), fmt::format("{:.2f}", n.ms),
                                    fmt::format("{:.2f}", n.ms / first.ms),
                                    with_commas(static_cast<int64_t>(n.tokens_per_second))};
    if (cuda) {
      row.push_back(std::isnan(n.utilization) ? "-" : fmt::format("{:.0f}%", n.utilization));  // NVML's mean
      row.push_back(mib(n.peak_allocated));
      row.push_back(
          fmt::format("{:.2f}", static_cast<double>(n.peak_allocated) / static_cast<double>(first.peak_allocated)));
      row.push_back(mib(n.peak_reserved));
    }
    row.push_back(n.losses.empty() ? "-" : fmt::format("{:.6f}", n.losses.back()));
    row.push_back(fmt::format("{:.2e}", apart));
    // Against the update that fp32 made, not against the weights: those hardly move.
    row.push_back(fmt::format("{:.2e}", relative_distance(mode.final, modes.front().final, modes.front().initial)));
    row.push_back(std::to_string(n.skipped));
    row.push_back(std::isnan(n.loss_scale) ? "-" : fmt::format("{}", n.loss_scale));
    rows.push_back(std::move(row));
  }
  std::string text = table("comparison, x: times that of " + to_string(modes.front().precision), rows, /*head=*/true);
  for (const Mode& mode : modes) {
    if (!mode.missing.empty()) text += fmt::format("{}: not run, {}\n", to_string(mode.precision), mode.missing);
  }
  return text;
}

int train_mixed_precision(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  Options options;
  parse_options(argc, argv, kTrainer, options);

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  const Options before_settling = options;
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  if (const auto code = answer_and_stop(options, launch, MemoryPattern{}, {})) return *code;
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);

  std::vector<Precision> precisions = {options.precision};
  if (options.all_precisions) precisions = {Precision::fp32, Precision::tf32, Precision::bf16, Precision::fp16};
  std::vector<Mode> modes(precisions.size());
  int code = kExitDone;
  for (size_t i = 0; i < precisions.size(); ++i) {
    modes[i].precision = precisions[i];
    modes[i].missing = why_not(precisions[i], device);  // what a device cannot do is said, not imitated
    if (!modes[i].missing.empty()) continue;
    Options one = before_settling;
    one.precision = precisions[i];
    // --weights low means something for bf16 and fp16 only.
    if (!uses_autocast(one.precision)) one.weights = "autocast";
    if (options.all_precisions) {  // files of its own for each mode: m.jsonl becomes m.fp32.jsonl and so on
      for (std::string* file : {&one.metrics, &one.trace, &one.profile, &one.dump_batches, &one.dump_gradients}) {
        *file = with_part(*file, to_string(one.precision));
      }
      if (one.save) one.save = with_part(*one.save, to_string(one.precision));
    }
    settle(one, launch);
    code = std::max(code, train_in(one, launch, device, modes[i]));
  }
  if (options.all_precisions) say(launch, comparison(modes, device.is_cuda()));
  return code;
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_mixed_precision, argc, argv); }

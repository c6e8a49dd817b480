// train_single: one device, the baseline of every comparison.
//
// Idea      One process, one device. Forward, backward, clip, AdamW step. All other trainers are this one plus what it
//           takes to spread it over ranks: read `diff examples/single/train_single.cpp examples/ddp/train_ddp.cpp`.
// Holds     parameters P, gradients P, AdamW moments 2P = 16 bytes a parameter in fp32; activations on top (notes: memory
//           arithmetic; `--predict` prints the numbers).
// Wire      nothing.
// Run       build/bin/train_single                              # base preset on a GPU, tiny on a CPU
//           build/bin/train_single --preset small --precision bf16 --steps 100
//           build/bin/train_single --accumulate 4 --verify      # the same step in four backward passes, proved equal
// Watch     watch -n 1 nvidia-smi: memory rises in the first step (activations, then the moments) and then stays; the
//           utilisation is the baseline for DDP's.
// Prints    settings, devices, predicted memory; a progress line; memory measured beside predicted; step time, tokens/s.
// Read      this file -> one_device_step.cpp (the same step as the reference of --verify) -> common/model.cpp.

#include "common/data.hpp"        // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"      // claim_device: before anything touches CUDA
#include "common/launch.hpp"      // who am I
#include "common/model.hpp"       // the Transformer classifier and the MLP model
#include "common/optimizer.hpp"   // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"     // the one command line of all trainers
#include "common/precision.hpp"   // Autocast
#include "common/run.hpp"         // banner, progress line, ledgers, checkpoints, verdict
#include "common/step_graph.hpp"  // --cuda-graph: the step captured and replayed
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{"train_single", "single", "train_single: one device, the baseline", /*many_ranks=*/false};

int train_single(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  Options options;
  parse_options(argc, argv, kTrainer, options);

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  const MemoryPattern memory{};
  if (const auto code = answer_and_stop(options, launch, memory, {})) return *code;
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);
  apply_precision(options.precision);
  Run run(options, launch, device, /*world=*/nullptr, memory, /*calls=*/{});

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.
    StepGraph graph(options.cuda_graph, device, /*world=*/nullptr);  // off: does nothing

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows = slice_rows(options.global_batch_size, /*rank=*/0, /*ranks=*/1);

    // 4 ── model ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Model model = make_model(options.model, options.seed, device, storage_dtype(options.precision));
    const NamedTensors masters = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(named_parameters(*model), masters, options.adamw);
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);  // does nothing unless fp16
    run.load(optimizer, scaler);  // --load: weights, moments, scale, step, data position, random state

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
          at::Tensor loss;  // [], this part's share of the mean over the whole batch
          {
            const Autocast autocast(device, options.autocast());
            const at::Tensor logits = model->forward(batches[micro].tokens);  // [b, classes]
            // Summed over the rows and divided by the rows of the WHOLE step: parts of any size then add up to the mean.
            loss = cross_entropy_sum(logits, batches[micro].labels) / static_cast<double>(options.global_batch_size);
          }
          loss_sum += loss.detach();
          run.inject_inf(step, loss);  // a planned fault; else nothing
          run.phase("backward");
          scaler.scale(loss).backward();            // outside of autocast: each operation remembers its dtype
          widen_gradients(optimizer.parameters());  // --weights low: fp32 from here on; else nothing
        }

        run.phase("optimizer");
        const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
        scaler.unscale(gradients, /*world=*/nullptr);  // fp16: before anybody looks at them; an overflow skips the step
        run.gradients_ready(step, optimizer.parameters());
        norm = gradient_norm(gradients);
        clip_gradients(gradients, norm, options.clip_norm);
        optimizer.step(lr, scaler.found_inf());
        scaler.update();
      });

      run.after_step(step, loss_sum, norm, scaler);
      run.save_if_due(step, optimizer, scaler);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);
    run.training_ended(optimizer.masters());
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, device); });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_single, argc, argv); }

// train_ddp: data parallel training, one process per device.
//
// Idea      Every rank holds the whole model and trains on its own rows of the global batch. Gradients are summed over the
//           ranks while backward is still running, so every rank takes the same optimizer step and the replicas never
//           drift apart. (Li et al., "PyTorch Distributed", VLDB 2020.)
// Holds     per rank: parameters P, gradients P (they live in the buckets), AdamW moments 2P = 16 bytes a parameter in fp32.
// Wire      at the start: parameters and buffers broadcast once. Per optimizer step: P gradient elements (and a little padding) all-reduced, in
//           buckets; a ring sends 2(n-1)/n P elements past each rank. Forward sends nothing, --accumulate sends once.
// Run       scripts/launch.sh -n 2 train_ddp                       # one GPU only? add --share-gpu
//           scripts/launch.sh -n 3 train_ddp --device cpu --verify
//           mpirun -n 2 build/bin/train_ddp --device cpu --precision fp64 --verify
//           torchrun --no-python --nproc-per-node 2 build/bin/train_ddp
// Watch     nvidia-smi: the same memory and the same load on every GPU. `--debug info` prints every collective.
// Prints    settings, ranks and devices, predicted memory and bytes; a progress line whose loss is the mean over the whole
//           global batch; how far the first all-reduce ran ahead of backward's end, and what stayed exposed; the ledger.
// Read      this file -> gradient_reducer.hpp -> gradient_reducer.cpp; naive_reduce.cpp is the same without overlap.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "common/communicator.hpp"  // Communicator: all_reduce and friends on NCCL (GPU) or MPI (CPU)
#include "common/data.hpp"          // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"        // claim_device: before anything touches CUDA
#include "common/error.hpp"         // UsageError: one line, exit code 2
#include "common/launch.hpp"        // who am I, which device is mine, how do I reach the others
#include "common/model.hpp"         // the Transformer classifier and the MLP model
#include "common/optimizer.hpp"     // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"       // the one command line of all trainers
#include "common/precision.hpp"     // Autocast
#include "common/run.hpp"           // banner, progress line, ledgers, checkpoints, verdict
#include "common/step_graph.hpp"    // --cuda-graph: the step captured and replayed
#include "examples/ddp/gradient_reducer.hpp"
#include "examples/ddp/naive_reduce.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{"train_ddp",
                           "ddp",
                           "train_ddp: data parallel, gradients all-reduced in buckets during backward",
                           /*many_ranks=*/true,
                           /*compares_precisions=*/false,
                           /*phases=*/{"data", "forward", "backward", "exchange", "optimizer"}};

struct DdpOptions : Options {
  double bucket_mb = 25.0;
  bool naive = false;
};

int train_ddp(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  DdpOptions options;
  parse_options(argc, argv, kTrainer, options, [&](CLI::App& app) {
    app.add_option("--bucket-mb", options.bucket_mb, "size of a gradient bucket in MiB (25); the first has at most 1")
        ->group("Options");
    app.add_flag("--naive", options.naive, "one all-reduce per parameter after backward, to see what buckets buy")
        ->group("Options");
  });
  if (!(options.bucket_mb > 0.0 && options.bucket_mb <= 65536.0)) {
    throw UsageError(fmt::format("--bucket-mb is {}: must be above 0 and at most 65536", options.bucket_mb));
  }

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(storage_dtype(options.precision)));
  const std::vector<CallPrediction> calls = {
      options.naive ? predict_naive_calls(options.model, element_bytes)
                    : predict_gradient_calls(options.model, options.autocast(), options.bucket_mb)};
  const MemoryPattern memory{/*gradients_in_buckets=*/!options.naive};
  if (const auto code = answer_and_stop(options, launch, memory, calls)) return *code;
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);
  apply_precision(options.precision);
  Communicator world = Communicator::connect(launch, device, options.comm());  // NCCL or MPI, all ranks
  Run run(options, launch, device, &world, memory, calls);

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.
    StepGraph graph(options.cuda_graph, device, &world);  // off: does nothing

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // The global batch of step s does not depend on the number of ranks; this rank takes its slice of the rows.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows = slice_rows(options.global_batch_size, world.rank(), world.size());

    // 4 ── model, and how it is made parallel ─────────────────────────────────────────────────────────────────────────
    Model model = make_model(options.model, options.seed, device, storage_dtype(options.precision));
    const NamedTensors masters = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(named_parameters(*model), masters, options.adamw);
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);   // does nothing unless fp16
    const std::vector<std::string> saved_order = run.load(optimizer, scaler);  // --load: also the order of the buckets

    // Rank 0's values win, whatever the others made or loaded: replicas that start apart stay apart (trial B04).
    for (const auto& [name, tensor] : optimizer.masters()) {
      world.broadcast(tensor, /*root=*/0, {name, Purpose::bookkeeping}).wait();
    }
    optimizer.publish_masters();
    for (const auto& buffer : model->named_buffers()) {
      world.broadcast(buffer.value(), /*root=*/0, {buffer.key(), Purpose::bookkeeping}).wait();
    }
    std::unique_ptr<GradientReducer> reducer;  // hooks in: from here on backward itself starts the communication
    if (!options.naive) {
      reducer = std::make_unique<GradientReducer>(optimizer.parameters(), world, options.bucket_mb, saved_order);
      run.measure_memory("communication buffers");
    }

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    // What changes from step to step is put in place before the step: a CUDA graph knows addresses, not values.
    StepBatches batches(options.accumulate, /*fixed=*/options.cuda_graph);
    LearningRate lr(device, /*on_device=*/options.cuda_graph);
    at::Tensor loss_sum, norm;  // [] each, on the device: the host does not wait for them
    StepTimes times;
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      run.phase("data");
      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        batches.put(micro, data.rows(step, rows.part(micro, options.accumulate)));  // tokens [b, T], labels [b]
      }
      lr.set(run.learning_rate(step));

      graph.run([&] {           // a plain call; with --cuda-graph on recorded once, then replayed
        optimizer.zero_grad();  // gradients are dropped: backward stores fresh ones instead of adding to zeros
        if (reducer) reducer->begin_step();
        loss_sum = at::zeros({}, at::TensorOptions().dtype(storage_dtype(options.precision)).device(device));

        for (int64_t micro = 0; micro < options.accumulate; ++micro) {
          // Only the last backward of the step may send: earlier ones add into the same buckets.
          if (reducer) reducer->begin_backward(/*last=*/micro + 1 == options.accumulate);

          run.phase("forward");
          at::Tensor loss;  // [], this part's share of the mean over the GLOBAL batch
          {
            const Autocast autocast(device, options.autocast());
            const at::Tensor logits = model->forward(batches[micro].tokens);  // [b, classes]
            // Summed over the rows, divided by the rows of the GLOBAL batch, and then SUMMED over ranks: right for uneven
            // slices too, where a mean of means would not be.
            loss = cross_entropy_sum(logits, batches[micro].labels) / static_cast<double>(options.global_batch_size);
          }
          loss_sum += loss.detach();
          run.inject_inf(step, loss);  // a planned fault; else nothing
          run.phase("backward");
          scaler.scale(loss)
              .backward();  // as soon as a bucket is full its all-reduce starts on the communication stream
          if (!reducer)
            widen_gradients(optimizer.parameters());  // --weights low: fp32 sums; the buckets are fp32 anyway
        }

        run.phase("exchange");
        if (reducer) {
          reducer->wait();  // the compute stream waits for the last bucket: this wait is what is exposed
          times = reducer->times();
        } else {
          reduce_gradients_one_by_one(optimizer.parameters(), world, times);
        }

        run.phase("optimizer");
        const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
        scaler.unscale(gradients,
                       &world);  // fp16: before anybody looks at them; an overflow skips the step on all ranks
        run.gradients_ready(step, optimizer.parameters());
        norm = gradient_norm(gradients);  // the gradients are equal on all ranks by now: no communication
        clip_gradients(gradients, norm, options.clip_norm);
        optimizer.step(lr, scaler.found_inf());
        scaler.update();
      });

      run.after_step(step, loss_sum, norm, scaler, &times);
      run.expect_equal_ranks(optimizer.masters());
      run.save_if_due(step, optimizer, scaler, reducer ? reducer->order() : saved_order);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler, reducer ? reducer->order() : saved_order);
    run.training_ended(optimizer.masters());  // a hash of the parameters must be equal on all ranks
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, device); });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_ddp, argc, argv); }

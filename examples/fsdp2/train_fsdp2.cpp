// train_fsdp2: data parallel training with every parameter sharded by itself (the FSDP2, fully_shard way).
//
// Idea      As train_fsdp: a rank holds 1/n of parameters, gradients and moments, a unit is put together just before it
//           computes and freed after. But a shard is rows of one parameter, an ordinary tensor with its name; a unit's shards
//           travel together in one all-gather. (PyTorch, torch.distributed.fsdp.fully_shard.)
// Holds     per rank, fp32: 16P/n bytes between steps, and up to --max-inflight whole units. --reshard-after-forward off keeps
//           whole parameters from forward to backward: more memory, one gather less.
// Wire      per microbatch: parameters all-gathered before forward (P) and again before backward (P less embedding and
//           head); per optimizer step: gradients reduce-scattered (P). --replicas R (HSDP): shards are cut over n/R ranks,
//           and gradients of a shard (P R/n) all-reduced over the R groups: the bytes that cross the slower wire.
// Run       scripts/launch.sh -n 2 train_fsdp2                                # one GPU only? add --share-gpu
//           scripts/launch.sh -n 3 train_fsdp2 --device cpu --verify
//           scripts/launch.sh -n 4 train_fsdp2 --device cpu --replicas 2 --verify
// Watch     nvidia-smi: less memory with every rank. `--pace gather,free=2`; `--debug info` prints layout and collectives.
// Prints    as train_ddp; how long the compute stream waited for gathers.
// Read      this file -> dim0_unit.cpp (copy-in, all-gather, copy-out) -> ../fsdp/unit_runner.hpp (when).
//
// Flat or per parameter? Beside train_fsdp (examples/fsdp):
//             per parameter (here)                           flat (fsdp)
//   cut       rows of each parameter                         ranges of one tensor a unit, through parameters
//   padding   once a parameter, to equal rows                once a unit
//   copies    into one send buffer, and out of the received  none before the all-gather, none after
//   dtypes    one a unit's group                             one a unit
//   a shard   is an ordinary tensor with its name: the       is no tensor with a meaning: ranges
//             optimizer, frozen parameters and checkpoints
//             need nothing special
//   saved     as it is                                       gathered, or cut again into rows

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "common/communicator.hpp"  // Communicator: all_gather, reduce_scatter and friends on NCCL (GPU) or MPI (CPU)
#include "common/data.hpp"          // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"        // claim_device: before anything touches CUDA
#include "common/error.hpp"         // UsageError: one line, exit code 2
#include "common/launch.hpp"        // who am I, which device is mine, how do I reach the others
#include "common/mesh.hpp"          // HSDP: a grid of shard groups and replicas
#include "common/model.hpp"         // the Transformer classifier and the MLP model
#include "common/optimizer.hpp"     // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"       // the one command line of all trainers
#include "common/precision.hpp"     // Autocast
#include "common/run.hpp"           // banner, progress line, ledgers, checkpoints, verdict
#include "common/shards.hpp"        // pieces of parameters, and whole ones from them
#include "examples/fsdp/shard_options.hpp"
#include "examples/fsdp/unit_runner.hpp"
#include "examples/fsdp2/dim0_unit.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{
    "train_fsdp2",
    "fsdp2",
    "train_fsdp2: parameters, gradients and optimizer state sharded, each parameter by rows (FSDP2)",
    /*many_ranks=*/true,
    /*compares_precisions=*/false,
    /*phases=*/{"data", "gather", "free", "forward", "backward", "exchange", "optimizer"},
    /*no_cuda_graph=*/kNoGraphOfUnits};

struct Fsdp2Options : ShardOptions {
  std::string reshard_after_forward = "on";
  int64_t replicas = 1;
};

int train_fsdp2(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  Fsdp2Options options;
  parse_options(argc, argv, kTrainer, options, [&](CLI::App& app) {
    app.add_option("--reshard-after-forward", options.reshard_after_forward,
                   "on: a unit is freed after its forward; off: it stays whole until its backward (on)")
        ->group("Options");
    app.add_option("--replicas", options.replicas, "HSDP: R copies of the shards, each cut over ranks / R (1)")
        ->group("Options");
    add_inflight_option(app, options);
    add_freeze_option(app, options);
    add_save_options(app, options);
  });
  if (options.reshard_after_forward != "on" && options.reshard_after_forward != "off") {
    throw UsageError(fmt::format("--reshard-after-forward is '{}': choose on or off", options.reshard_after_forward));
  }
  options.shard_strategy = options.reshard_after_forward == "on" ? "full" : "grad";
  check_shard_options(options);

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  if (options.replicas < 1 || options.world % options.replicas != 0) {
    throw UsageError(fmt::format("--replicas {}: {} ranks cannot be cut into so many groups of one size",
                                 options.replicas, options.world));
  }
  const at::ScalarType master = storage_dtype(options.precision);  // of shards, gradients and moments
  const int64_t shards = options.world / options.replicas;
  check_frozen(options, /*flat=*/false);
  const std::vector<UnitSize> sizes = unit_sizes(options, shards, Dim0Unit::padded_numel);
  std::vector<CallPrediction> calls = predict_shard_calls(options, sizes);
  if (options.replicas > 1) calls.push_back(predict_replica_calls(sizes, shards, c10::elementSize(master)));
  const MemoryPattern memory = shard_memory(options, sizes, shards);
  if (const auto code = answer_and_stop(options, launch, memory, calls)) return *code;
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);
  apply_precision(options.precision);
  Communicator world = Communicator::connect(launch, device, options.comm());  // NCCL or MPI, all ranks
  Run run(options, launch, device, &world, memory, calls);

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // The global batch of step s does not depend on the number of ranks; this rank takes its slice of the rows.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows = slice_rows(options.global_batch_size, world.rank(), world.size());

    // 4 ── model, and how it is made parallel ─────────────────────────────────────────────────────────────────────────
    // A shard group are neighbours (inside of a node, where the wire is fast); its replicas lie in the other groups.
    std::optional<MeshGroups> groups;
    if (options.replicas > 1) {
      groups.emplace(
          split_mesh(world, make_mesh(world.size(), static_cast<int>(shards), "--replicas"), "shard", "replica"));
    }
    Communicator& shard_group = groups ? groups->row : world;
    Model model = make_empty_model(options.model, master);  // no values: each rank makes those of its own shards
    freeze(options, named_parameters(*model));  // --freeze; a frozen parameter is gathered and never reduced
    std::vector<std::unique_ptr<Unit>> units;
    for (UnitParameters& unit : units_of(options.model, named_parameters(*model))) {
      units.push_back(std::make_unique<Dim0Unit>(std::move(unit), shard_group, groups ? &groups->column : nullptr,
                                                 master, options.weight_dtype(), options.seed));
    }
    if (options.debug != DebugLevel::off) say(launch, units[1]->layout());
    UnitRunner runner(std::move(units), options.strategy(), options.max_inflight, shard_group);  // hooks in
    runner.watch(
        [&run](const char* what, const std::string& unit) { run.unit_event(what, unit); });  // --pace gather,free
    ShardedParameters pieces = shards_of(runner);
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(pieces.tensors, pieces.dims, options.adamw);  // each rank steps what it holds
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);  // does nothing unless fp16
    ShardLayout layout(parameter_shapes(options.model), pieces.pieces, master, world);
    run.set_layout(&layout);
    run.load(optimizer, scaler);  // --load: a file of any trainer; each rank takes its own pieces

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      optimizer.zero_grad();
      runner.begin_step();
      at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(master).device(device));

      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        run.phase("data");
        const Batch batch = data.rows(step, rows.part(micro, options.accumulate));  // tokens [b, T], labels [b]
        runner.begin_microbatch(/*last=*/micro + 1 == options.accumulate);

        run.phase("forward");
        at::Tensor loss;  // [], this part's share of the mean over the GLOBAL batch
        {
          const Autocast autocast(device, options.autocast());
          const at::Tensor logits = forward_in_units(*model, runner, options.model, batch.tokens);  // [b, classes]
          loss = cross_entropy_sum(logits, batch.labels) / static_cast<double>(options.global_batch_size);
        }
        loss_sum += loss.detach();
        run.inject_inf(step, loss);  // a planned fault; else nothing
        run.phase("backward");
        scaler.scale(loss)
            .backward();  // gathers each unit again, and starts its reduce-scatter when it is done with it
        run.phase("exchange");
        runner.end_microbatch();  // of the last one: the compute stream waits for what backward did not hide
        widen_gradients(named_parameters(*model));  // --accumulate and low weights: whole gradients that stay, in fp32
      }

      run.phase("optimizer");
      const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());  // of this rank's pieces
      scaler.unscale(gradients, &world);  // an overflow in anybody's piece skips the step on all ranks
      run.gradients_ready(step, optimizer.parameters());
      // [], over the pieces of one shard group: the replicas hold the same, and would be counted R times (trial B20).
      const at::Tensor norm = sharded_gradient_norm(gradients, shard_group);
      clip_gradients(gradients, norm, options.clip_norm);
      optimizer.step(run.learning_rate(step), scaler.found_inf());
      scaler.update();

      run.after_step(step, loss_sum, norm, scaler, &runner.times());
      if (options.debug != DebugLevel::off) say(launch, fmt::format("step {}: {}\n", step, runner.event_text()));
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

int main(int argc, char** argv) { return mgp::run_main(mgp::train_fsdp2, argc, argv); }

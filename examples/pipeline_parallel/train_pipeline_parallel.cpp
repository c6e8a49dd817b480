// train_pipeline_parallel: the model cut into stages, one a rank, and the batch into microbatches that follow each other.
//
// Idea      Cut over p devices one after the other, p-1 of them idle (train_model_parallel). Cut the batch into m
//           microbatches too, and while stage 1 works on the first, stage 0 works on the second. What stays idle is the
//           time to fill and to drain: (p-1)/(m+p-1). GPipe runs all forwards, then all backwards, and keeps m
//           microbatches' activations; 1F1B turns round early and keeps min(p-s, m) on stage s.
//           (Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, section 2.2.)
// Holds     per rank: 16 bytes for each parameter of its stage in fp32, and the activations of the microbatches it keeps.
// Wire      per microbatch and cut: the residual stream [b, T, C] down, its gradient up; 2(p-1)m messages a step, together
//           2(p-1) B T C elements. No collective but for the norm and the loss.
// Run       scripts/launch.sh -n 3 train_pipeline_parallel --schedule 1f1b         # one GPU only? add --share-gpu
//           scripts/launch.sh -n 3 train_pipeline_parallel --device cpu --verify
//           scripts/launch.sh -n 3 train_pipeline_parallel --preset base --batch-size 96 --micro-batches 6 --split 4,4,4
//           build/bin/train_pipeline_parallel --predict --world 4 --micro-batches 8 --print-schedule --schedule 1f1b
// Watch     nvidia-smi: with gpipe all stages rise alike, with 1f1b the first one most; more microbatches, more load.
//           --trace FILE.json shows the two schedules as the papers draw them.
// Prints    the stages; the schedule as a table; a progress line whose loss is the mean over the whole batch; the idle share
//           of each stage beside the formula; the ledger of stage 0.
// Read      this file -> schedule.hpp -> schedule.cpp (the order) -> schedule_check.cpp (why nobody waits for ever) ->
//           neighbours.cpp (the messages).

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "common/communicator.hpp"  // Communicator: send, recv and friends on NCCL (GPU) or MPI (CPU)
#include "common/data.hpp"          // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"        // claim_device: before anything touches CUDA
#include "common/launch.hpp"        // who am I, which device is mine, how do I reach the others
#include "common/optimizer.hpp"     // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"       // the one command line of all trainers
#include "common/precision.hpp"     // Autocast
#include "common/run.hpp"           // banner, progress line, ledgers, checkpoints, verdict
#include "common/shards.hpp"        // whole tensors from what the stages hold
#include "common/stage_model.hpp"   // layers [first, last) of the model
#include "examples/pipeline_parallel/idle_meter.hpp"
#include "examples/pipeline_parallel/neighbours.hpp"
#include "examples/pipeline_parallel/pipeline_options.hpp"
#include "examples/pipeline_parallel/schedule.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{
    "train_pipeline_parallel", "pipeline_parallel",
    "train_pipeline_parallel: the model cut into stages, the batch into microbatches that follow each other",
    /*many_ranks=*/true,
    /*compares_precisions=*/false,
    // Where --pace can halt: where all stages come together. Their forwards and backwards are no such places.
    /*phases=*/{"data", "exchange", "optimizer"},
    /*no_cuda_graph=*/"a step of several stages is not captured: they wait for each other's messages",
    /*one_batch=*/true};

/// What a stage keeps of a microbatch from its forward to its backward.
struct InFlight {
  at::Tensor input;           ///< [b, T, C], a leaf of the graph; on the first stage the tokens [b, T]
  at::Tensor output;          ///< [b, T, C], where the graph ends; on the last stage the loss []
  at::Tensor input_gradient;  ///< [b, T, C], after backward, until it is sent
};

int train_pipeline_parallel(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  PipelineOptions options;
  parse_options(argc, argv, kTrainer, options, [&](CLI::App& app) { add_pipeline_options(app, options); });
  check_pipeline_options(options);

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  const PipelinePlan plan = plan_pipeline(options);
  const std::vector<CallPrediction> calls = predict_messages(options);
  const MemoryPattern memory = pipeline_memory(plan);
  if (const auto code = answer_and_stop(options, launch, memory, calls)) {
    if (options.predict) say(launch, plan_table(options, plan));
    return *code;
  }
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);
  apply_precision(options.precision);
  Communicator world = Communicator::connect(launch, device, options.comm());  // NCCL or MPI, all ranks
  Run run(options, launch, device, &world, memory, calls);
  say(launch, plan_table(options, plan));

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // All stages work on the same rows. The first needs their tokens, the last their labels; both can make them.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows{0, options.global_batch_size};
    const int64_t micro_batches = options.micro_batches;

    // 4 ── model, and how it is made parallel ─────────────────────────────────────────────────────────────────────────
    // Only this stage's layers are made. Their values are a function of seed and name: any split is the same model (B57).
    const auto stage = static_cast<size_t>(world.rank());
    const StagePart& part = plan.parts[stage];
    const bool is_first = part.has_embedding, is_last = part.has_head;
    const at::ScalarType master = storage_dtype(options.precision);
    const std::shared_ptr<StageModel> model = make_stage(options.model, part, options.seed, device, master);
    const NamedTensors masters = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(named_parameters(*model), masters, options.adamw);  // each stage steps what it holds
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);  // does nothing unless fp16
    ShardLayout layout(parameter_shapes(options.model), pieces_of(options.model, part), master, world);
    run.set_layout(&layout);
    run.load(optimizer, scaler);  // --load: a file of any trainer; each stage takes its own layers
    // The residual stream, which is what the stages hand on, stays in the dtype of the weights, under autocast too.
    Neighbours neighbours(world, options.weight_dtype(), micro_batches);
    const std::vector<Action>& schedule = plan.schedule.actions[stage];  // this stage's list

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    IdleMeter meter(device);
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      optimizer.zero_grad();
      at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(master).device(device));
      meter.begin_step();

      for (int64_t pass = 0; pass < options.accumulate; ++pass) {  // each fills and drains the pipeline once
        run.phase("data");
        const RowSlice pass_rows = rows.part(pass, options.accumulate);
        std::vector<Batch> batches(static_cast<size_t>(micro_batches));  // tokens [b, T], labels [b]
        for (int64_t m = 0; m < micro_batches && (is_first || is_last); ++m) {
          batches[static_cast<size_t>(m)] = data.rows(step, pass_rows.part(m, micro_batches));
        }

        run.phase("wait");  // all stages end "data" here, so that --pace can halt: later ones wait for each other

        // The schedule says what comes next. Nothing here knows whether it is GPipe or 1F1B.
        std::vector<InFlight> in_flight(static_cast<size_t>(micro_batches));
        for (const Action& action : schedule) {
          const int64_t m = action.microbatch;
          InFlight& micro = in_flight[static_cast<size_t>(m)];
          const Batch& batch = batches[static_cast<size_t>(m)];
          const int64_t b = pass_rows.part(m, micro_batches).size();
          const std::vector<int64_t> shape = {b, options.model.seq_len, options.model.dim};  // [b, T, C]

          switch (action.kind) {
            case ActionKind::recv_activation:
              neighbours.recv_activation(m, shape);  // starts; forward waits
              break;

            case ActionKind::forward: {
              if (is_first) {
                micro.input = batch.tokens;  // [b, T]
              } else {
                // A leaf of this stage's own graph: backward ends here, and leaves the gradient that goes back.
                micro.input = neighbours.activation(m).requires_grad_(true);  // [b, T, C]
              }
              run.phase("forward");
              meter.busy_began();
              const Autocast autocast(device, options.autocast());
              micro.output = model->forward(micro.input);  // [b, T, C], of the last stage [b, classes]
              if (is_last) {
                // Summed over the rows, divided by the rows of the WHOLE step: microbatches of any size then add up to the
                // mean. (Divided by m the gradients would be wrong as soon as the cut is uneven; trials B52, B53.)
                const double global_rows = static_cast<double>(options.global_batch_size);
                micro.output = cross_entropy_sum(micro.output, batch.labels) / global_rows;  // []
                loss_sum += micro.output.detach();
                run.inject_inf(step, micro.output);  // a planned fault; else nothing
              }
              meter.busy_ended();
              run.phase("wait");
              break;
            }

            case ActionKind::send_activation:
              neighbours.send_activation(m, micro.output);  // does not wait
              break;

            case ActionKind::recv_gradient:
              neighbours.recv_gradient(m, shape);  // starts; backward waits
              break;

            case ActionKind::backward: {
              at::Tensor output_gradient;  // [b, T, C]; the last stage begins with its loss, scaled in fp16
              if (is_last) {
                micro.output = scaler.scale(micro.output);  // []
              } else {
                output_gradient = neighbours.gradient(m);
                run.inject_inf(step, output_gradient);
              }
              run.phase("backward");
              meter.busy_began();
              micro.output.backward(output_gradient);   // adds to the gradients of the microbatches before
              widen_gradients(optimizer.parameters());  // --weights low: fp32 sums; else nothing
              meter.busy_ended();
              run.phase("wait");
              // The graph and its activations go here: this is what 1F1B does sooner than GPipe.
              micro = InFlight{{}, {}, is_first ? at::Tensor() : micro.input.grad()};
              break;
            }

            case ActionKind::send_gradient:
              neighbours.send_gradient(m, micro.input_gradient);  // does not wait
              micro = InFlight{};
              break;
          }
        }
        run.phase("exchange");
        neighbours.finish();  // the last messages leave
      }

      run.phase("optimizer");
      const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());  // of this stage's layers
      scaler.unscale(gradients, &world);  // an overflow on one stage skips the step on all
      run.gradients_ready(step, optimizer.parameters());
      const at::Tensor norm = sharded_gradient_norm(gradients, world);  // [], over the parameters of all stages
      meter.end_step();
      clip_gradients(gradients, norm, options.clip_norm);
      optimizer.step(run.learning_rate(step), scaler.found_inf());
      scaler.update();

      // Only the last stage has a loss; the sum over all stages brings it to rank 0, which prints.
      run.after_step(step, loss_sum, norm, scaler);
      run.save_if_due(step, optimizer, scaler);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);  // gathered stage by stage: the same file as any trainer's
    run.training_ended(optimizer.masters());
    const double idle = predicted_idle_share(options.world, micro_batches);
    say(launch, meter.report(world, options.warmup_steps, idle));
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, device); });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_pipeline_parallel, argc, argv); }

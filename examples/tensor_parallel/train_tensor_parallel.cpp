// train_tensor_parallel: every layer cut over the ranks, all of them working on the same rows.
//
// Idea      Of each pair of matrices the first is cut by its outputs and the second by its inputs, so what lies between is
//           never sent. One all-reduce sums the results in forward (g), one sums the gradients in backward (f).
//           (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; f and g stand in collective_functions.cpp.)
// Holds     per rank: 1/n of the layers' matrices L, all of the rest R (embedding, norms, head): 16 (L/n + R) bytes in
//           fp32. Activations: hidden values and heads 1/n, the residual stream whole.
// Wire      per layer and backward pass: MLP 2 all-reduces of [b, T, C], classifier 4; a ring sends 2(n-1)/n of each past
//           a rank. They cannot be hidden: the next matmul waits for the sum. Gradients are never sent.
// Run       scripts/launch.sh -n 2 train_tensor_parallel                       # one GPU only? add --share-gpu
//           scripts/launch.sh -n 3 train_tensor_parallel --device cpu --mlp-dim 100 --verify     # 34, 33 and 33
//           scripts/launch.sh -n 4 train_tensor_parallel --device cpu --model classifier --precision fp64 --verify
// Watch     nvidia-smi: the same load on every GPU, and less memory than train_single --model mlp. `--debug info` prints
//           every all-reduce with the layer it belongs to.
// Prints    settings, which rank holds what, predicted memory and bytes; a progress line; the ledger; a hash that shows
//           that the replicated parameters are the same on all ranks.
// Read      this file -> collective_functions.cpp -> parallel_linear.cpp -> parallel_model.cpp.

#include <fmt/format.h>

#include "common/communicator.hpp"  // Communicator: all_reduce and friends on NCCL (GPU) or MPI (CPU)
#include "common/data.hpp"          // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"        // claim_device: before anything touches CUDA
#include "common/error.hpp"         // UsageError: one line, exit code 2
#include "common/launch.hpp"        // who am I, which device is mine, how do I reach the others
#include "common/model.hpp"         // the whole models, whose names and values the parts have
#include "common/optimizer.hpp"     // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"       // the one command line of all trainers
#include "common/precision.hpp"     // Autocast
#include "common/run.hpp"           // banner, progress line, ledgers, checkpoints, verdict
#include "common/shards.hpp"        // pieces of parameters, and whole ones from them
#include "examples/single/one_device_step.hpp"
#include "examples/tensor_parallel/parallel_model.hpp"
#include "examples/tensor_parallel/predict_tensor_parallel.hpp"

namespace mgp {

const TrainerInfo kTrainer{
    "train_tensor_parallel",
    "tensor_parallel",
    "train_tensor_parallel: every layer cut over the ranks, two all-reduces a pair of matrices (default: --model mlp)",
    /*many_ranks=*/true,
    /*compares_precisions=*/false,
    /*phases=*/{"data", "forward", "backward", "optimizer"},
    /*no_cuda_graph=*/"the all-reduces inside forward and backward are not captured",
    /*one_batch=*/true};

/// "rank 0: hidden values 0-127, heads 0-1" for each rank.
std::string cut_text(const ModelConfig& config, int64_t ranks) {
  std::string text;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const RowSlice hidden = slice_rows(config.mlp_dim, rank, ranks);
    text += fmt::format("rank {}: hidden values {}-{} of {}", rank, hidden.begin, hidden.end - 1, config.mlp_dim);
    if (config.kind == ModelKind::classifier) {
      const RowSlice heads = slice_rows(config.heads, rank, ranks);
      text += fmt::format(", heads {}-{} of {}", heads.begin, heads.end - 1, config.heads);
    }
    text += " in every layer\n";
  }
  return text;
}

int train_tensor_parallel(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  Options options;
  options.model_kind = "mlp";  // unless --model says otherwise
  parse_options(argc, argv, kTrainer, options);
  if (options.dropout > 0) {
    throw UsageError(
        fmt::format("--dropout is {}: the masks of cut and of replicated values would have to differ and to "
                    "agree, which train_tensor_parallel does not do; leave it at 0",
                    options.dropout));
  }

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  // The device is claimed before anything touches CUDA: a single early call would put a context of 500 MB on GPU 0.
  const Launch launch = detect_launch();
  settle(options, launch);  // sizes and batches are complete and checked; nothing has been allocated yet
  check_parallel_sizes(options.model, options.world);
  const at::ScalarType master = storage_dtype(options.precision);  // of parameters, gradients and moments
  const std::vector<CallPrediction> calls = predict_tensor_parallel_calls(options);
  MemoryPattern memory;
  memory.formula = predict_tensor_parallel_memory;
  if (const auto code = answer_and_stop(options, launch, memory, calls)) return *code;
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  limit_threads(launch);
  const at::Device device = claim_device(launch, options.device);
  apply_precision(options.precision);
  Communicator world = Communicator::connect(launch, device, options.comm());  // NCCL or MPI, all ranks
  Run run(options, launch, device, &world, memory, calls);
  say(launch, cut_text(options.model, world.size()));

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.

    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // The ranks hold one model together: all of them take all rows. A rank that took others would add its activations to
    // those of another sentence, and nothing would complain.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
    const RowSlice rows = slice_rows(options.global_batch_size, /*rank=*/0, /*ranks=*/1);

    // 4 ── model, and how it is made parallel ─────────────────────────────────────────────────────────────────────────
    // Each rank makes its own part, never the whole: that is what lets a model train that no device could hold.
    const TensorParallel tp{&world, compute_dtype(options.precision)};
    Model model = make_parallel_model(options.model, options.seed, device, master, tp);
    const NamedTensors masters = lower_weights(*model, options.weight_dtype());  // --weights low; else the parameters
    const std::vector<Piece> pieces = parallel_pieces(options.model, world.rank(), world.size());
    run.measure_memory("parameters");

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    // AdamW works element by element: a part is stepped as it would be inside of the whole.
    AdamW optimizer(named_parameters(*model), masters, options.adamw);
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, device);  // does nothing unless fp16
    ShardLayout layout(parameter_shapes(options.model), pieces, master, world);
    run.set_layout(&layout);
    run.load(optimizer, scaler);  // --load: a file of any trainer; each rank takes its own part
    const NamedTensors replicas = replicas_of(pieces, optimizer.masters());  // nobody sends their gradients: they start
    run.expect_equal_replicas(replicas);                                     // equal, and get equal ones on every rank
    const NamedTensors cut_parameters = parts_of(pieces, optimizer.parameters());
    const NamedTensors whole_parameters = replicas_of(pieces, optimizer.parameters());

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      optimizer.zero_grad();  // gradients are dropped: backward stores fresh ones instead of adding to zeros
      at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(master).device(device));  // []

      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        run.phase("data");
        const Batch batch = data.rows(step, rows.part(micro, options.accumulate));  // tokens [b, T], labels [b]

        run.phase("forward");  // with an all-reduce in each g
        at::Tensor loss;       // [], this part's share of the mean over the GLOBAL batch, the same on every rank
        {
          const Autocast autocast(device, options.autocast());
          const at::Tensor logits = model->forward(batch.tokens);  // [b, classes]
          loss = cross_entropy_sum(logits, batch.labels) / static_cast<double>(options.global_batch_size);
        }
        loss_sum += loss.detach();
        run.inject_inf(step, loss);  // a planned fault; else nothing
        run.phase("backward");       // with an all-reduce in each f
        scaler.scale(loss).backward();
        widen_gradients(optimizer.parameters());  // --weights low: sums over microbatches in fp32
      }

      run.phase("optimizer");
      // There is no exchange: gradients of parts are complete where they are, those of replicas are equal everywhere.
      const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
      scaler.unscale(gradients, &world);  // an overflow in anybody's part skips the step on all ranks
      run.gradients_ready(step, optimizer.parameters());
      const at::Tensor norm =
          parallel_gradient_norm(gradients_of(cut_parameters), gradients_of(whole_parameters), world);
      clip_gradients(gradients, norm, options.clip_norm);  // by the same factor on every rank
      optimizer.step(run.learning_rate(step), scaler.found_inf());
      scaler.update();

      // The shares of all ranks are added for the progress line, and every rank has the whole loss: rank 0 tells it.
      run.after_step(step, world.rank() == 0 ? loss_sum : at::zeros_like(loss_sum), norm, scaler);
      run.expect_equal_ranks(replicas);  // with --debug detail
      run.save_if_due(step, optimizer, scaler);
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);    // whole tensors, gathered one by one: the file of train_single
    run.expect_equal_replicas(replicas);  // they can never have drifted apart
    run.training_ended(optimizer.masters());
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, device); });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_tensor_parallel, argc, argv); }

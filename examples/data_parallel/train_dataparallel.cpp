// train_dataparallel: a replica of the model on each device, driven by one process; what nn.DataParallel does, in the open.
//
// Idea      One process, no ranks. In each step the weights of the first device are copied to the others, the batch is cut
//           over the devices, a host thread for each device runs forward and backward, the gradients are summed on the first
//           device, and the optimizer steps there. nn.DataParallel makes its replicas anew in every step; here they are
//           made once and only their weights are refreshed. Nobody else's copy is trained: a replica that was not refreshed
//           computes with old weights. (PyTorch advises DDP instead: no first device that does more than the others, and no
//           threads that wait for one interpreter. The latter does not apply to C++.)
// Uneven    Every device holds weights P, gradients P and the activations of its rows. The first holds AdamW's moments 2P on
//           top: 16 bytes a parameter there and 8 elsewhere, in fp32. With --gather-outputs on it also holds the logits
//           of ALL rows, and computes the loss of all rows while the others wait. With outputs as large as a language
//           model's that is gigabytes on one device; here, with a few classes a row, you see it in the time alone. So the
//           default computes the loss inside of each replica, and one number leaves it. The tables below show each device.
// Wire      per step and further replica: P weights out, P gradients back. NCCL on distinct GPUs, else copies and sums.
// Run       build/bin/train_dataparallel                              # all GPUs; on a CPU two replicas
//           build/bin/train_dataparallel --devices 0,1,2 --batch-size 64
//           build/bin/train_dataparallel --devices cpu,cpu,cpu --verify   # three replicas on the CPU, proved equal
//           build/bin/train_dataparallel --gather-outputs on              # the classic form, to compare
// Watch     nvidia-smi: one process on all GPUs, more memory on the first, and its work while the others are idle.
// Prints    as train_single; rows of each replica, memory of each device, copies predicted and counted.
// Read      this file -> replica_threads.cpp (a thread for each device) -> replica_exchange.cpp (weights and gradients).

#include <ATen/Context.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "common/counter_random.hpp"  // counter_hash: a seed for each replica
#include "common/data.hpp"            // SyntheticTokens: row i is a function of (seed, i)
#include "common/device.hpp"          // claim_device: before anything touches CUDA
#include "common/device_list.hpp"     // --devices, and what each device holds
#include "common/error.hpp"           // exit codes
#include "common/launch.hpp"          // who am I
#include "common/model.hpp"           // the Transformer classifier and the MLP model
#include "common/optimizer.hpp"       // AdamW over at::_fused_adamw_, clipping
#include "common/options.hpp"         // the one command line of all trainers
#include "common/precision.hpp"       // Autocast
#include "common/run.hpp"             // banner, progress line, checkpoints, verdict
#include "common/text.hpp"
#include "examples/data_parallel/replica_exchange.hpp"
#include "examples/data_parallel/replica_options.hpp"
#include "examples/data_parallel/replica_threads.hpp"
#include "examples/single/one_device_step.hpp"

namespace mgp {

const TrainerInfo kTrainer{"train_dataparallel",
                           "dataparallel",
                           "train_dataparallel: a replica on each device, one process drives them all",
                           /*many_ranks=*/false,
                           /*compares_precisions=*/false,
                           /*phases=*/{"refresh", "data", "forward", "backward", "reduce", "optimizer"},
                           /*no_cuda_graph=*/"a graph is of one device, and a step here goes over several"};

/// One replica on its device, and what it works on in the current pass.
struct Replica {
  at::Device device;
  Model model;
  at::Tensor tokens, labels;  // [b, T], [b]; undefined if it has no rows in this pass
  at::Tensor logits, loss;    // [b, classes], [] this replica's share of the mean over the whole batch
};

/// Dropout: a generator belongs to a device, so its seed is set before each replica's pass. Masks are then a function of
/// (seed, step, pass, replica), whichever thread comes first.
void seed_dropout(const ReplicaOptions& options, int64_t step, int64_t micro, size_t replica) {
  if (options.dropout <= 0) return;
  at::Generator generator = at::globalContext().defaultGenerator(options.devices[replica]);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(
      counter_hash(counter_hash(options.seed, replica), static_cast<uint64_t>(step * options.accumulate + micro)));
}

/// What was copied beside what was predicted, and the peak of each device.
std::string device_report(const ReplicaOptions& options, const ReplicaExchange& exchange, int64_t steps) {
  const std::vector<CallPrediction> predicted = predict_replica_copies(options);
  const int64_t calls = predicted.empty() ? 0 : predicted.front().calls * steps;
  const int64_t bytes = predicted.empty() ? 0 : predicted.front().payload_bytes * steps;
  const bool equal = calls == exchange.copies() && bytes == exchange.bytes();
  std::string text = fmt::format(
      "weights and gradients between replicas in {} steps, by {}: predicted {} tensors with {} bytes, measured {} with "
      "{}: {}\n",
      steps, exchange.by_nccl() ? "NCCL" : "copies", calls, with_commas(bytes), exchange.copies(),
      with_commas(exchange.bytes()), equal ? "equal" : "DIFFERENT");
  if (!options.cuda) return text;
  return text + measured_memory_table(options.devices,
                                      [&](at::Device device) { return predict_replica_memory(options, device); });
}

int train_dataparallel(int argc, char** argv) {
  // 1 ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────
  ReplicaOptions options;
  parse_options(argc, argv, kTrainer, options, [&](CLI::App& app) { add_replica_flags(app, options); });

  // 2 ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────
  const Launch launch = detect_launch();
  settle_replicas(options, launch);  // devices and batches are complete and checked; nothing is allocated yet
  const MemoryPattern memory = first_replica_memory(options);
  const std::vector<CallPrediction> copies = predict_replica_copies(options);
  if (const auto code = answer_and_stop(options, launch, memory, copies)) {
    if (options.predict) say(launch, replica_tables(options));
    return *code;
  }
  if (options.deterministic) apply_deterministic(options.cuda ? at::kCUDA : at::kCPU);
  const int cpu_threads = limit_threads(launch);
  const at::Device first = claim_device(launch, options.device);  // optimizer, checkpoints and the clock are here
  refuse_if_too_large(options, launch);
  apply_precision(options.precision);
  Run run(options, launch, first, /*world=*/nullptr, memory, copies);
  say(launch, replica_tables(options));

  {  // Everything of the training lives in this block, so that the proof in step 8 has the memory to itself.
    // 3 ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────
    // As in nn.DataParallel the batch begins on the first device and is scattered from there.
    const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), first);

    // 4 ── model, and how it is made parallel ─────────────────────────────────────────────────────────────────────────
    // replicas[0] is the model: it is trained and saved. The others are made once, and refreshed from it in every step.
    std::vector<Replica> replicas;
    std::vector<NamedTensors> weights;  // of each replica, in the same order
    NamedTensors masters;               // --weights low: fp32, on the first device alone; else its parameters
    for (const at::Device device : options.devices) {
      Model model = make_model(options.model, options.seed, device, storage_dtype(options.precision));
      NamedTensors wide = lower_weights(*model, options.weight_dtype());
      if (replicas.empty()) masters = std::move(wide);
      weights.push_back(named_parameters(*model));
      for (auto& [name, parameter] : weights.back()) {
        if (options.adamw.is_frozen(name)) parameter.set_requires_grad(false);
      }
      replicas.push_back({device, std::move(model), {}, {}, {}, {}});
    }
    run.measure_memory("parameters");
    ReplicaExchange exchange(options.devices);  // NCCL communicators, or nothing
    const bool shared = distinct_devices(options.devices).size() < options.devices.size();
    const int replicas_at_once = first.is_cpu() ? static_cast<int>(replicas.size()) : 1;
    ReplicaThreads threads(options.devices, std::max(1, cpu_threads / replicas_at_once),
                           /*take_turns=*/shared && options.dropout > 0);

    // 5 ── optimizer ──────────────────────────────────────────────────────────────────────────────────────────────────
    AdamW optimizer(weights.front(), masters, options.adamw);  // on the first device, and nowhere else
    run.measure_memory("optimizer");
    LossScaler scaler(options.loss_scaling == "on", options.scaler, first);
    run.load(optimizer, scaler);  // --load: into replica 0; the others get it with the first refresh

    // 6 ── training loop ──────────────────────────────────────────────────────────────────────────────────────────────
    int64_t steps_done = 0;
    for (int64_t step = run.first_step(); run.wants(step); ++step) {
      run.before_step(step);
      run.phase("refresh");
      exchange.refresh(weights);  // the optimizer has changed the weights of replica 0, and only those
      optimizer.zero_grad();      // those of the other replicas went with the last reduce
      const auto loss_options = at::TensorOptions().dtype(storage_dtype(options.precision)).device(first);
      at::Tensor loss_sum = at::zeros({}, loss_options);  // []
      const auto rows_of_the_step = static_cast<double>(options.global_batch_size);
      // The loss scale lives on the first device, and a kernel takes operands of its own device alone.
      const at::Tensor scale = scaler.scale(at::ones({}, loss_options));  // []

      for (int64_t micro = 0; micro < options.accumulate; ++micro) {
        run.phase("data");
        const RowSlice pass = RowSlice{0, options.global_batch_size}.part(micro, options.accumulate);
        const Batch batch = data.rows(step, pass);  // tokens [B, T], labels [B], of this pass
        for (size_t r = 0; r < replicas.size(); ++r) {
          Replica& replica = replicas[r];
          const RowSlice rows = options.rows_of(micro, r);
          replica.tokens = replica.labels = replica.logits = replica.loss = at::Tensor();
          if (rows.size() == 0) continue;  // fewer rows than devices: the last devices have nothing to do
          replica.tokens = batch.tokens.narrow(0, rows.begin - pass.begin, rows.size()).to(replica.device);  // [b, T]
          replica.labels = batch.labels.narrow(0, rows.begin - pass.begin, rows.size()).to(replica.device);  // [b]
        }

        run.phase("forward");
        threads.run(fmt::format("forward of step {}", step), [&](size_t r) {
          Replica& replica = replicas[r];
          if (options.injects("throw", r, step)) throw RunError("injected failure");
          if (!replica.tokens.defined()) return;
          seed_dropout(options, step, micro, r);
          const Autocast autocast(replica.device, options.autocast());  // belongs to a thread: so inside of it
          replica.logits = replica.model->forward(replica.tokens);      // [b, classes]
          if (options.gathers()) return;
          // Summed over the rows of the replica and divided by the rows of the WHOLE step. The sum over replicas is then
          // the mean over the batch, for uneven cuts too, where a mean of the replicas' means is not.
          replica.loss = cross_entropy_sum(replica.logits, replica.labels) / rows_of_the_step;
        });

        if (options.gathers()) {
          // The classic form. Autograd knows the copies as operations and carries the gradients back to the replicas.
          std::vector<at::Tensor> outputs;  // [b, classes] each, on the first device
          for (size_t r = 0; r < replicas.size(); ++r) {
            if (!replicas[r].logits.defined()) continue;
            at::Tensor output = replicas[r].logits.to(first);  // [b, classes]
            // A planned fault: the gradients of this replica overflow.
            if (options.injects("inf", r, step)) output.register_hook([](const at::Tensor& g) { return g * INFINITY; });
            outputs.push_back(std::move(output));
          }
          const Autocast autocast(first, options.autocast());
          const at::Tensor loss =
              cross_entropy_sum(at::cat(outputs), batch.labels) / rows_of_the_step;  // [B, classes] -> []
          outputs.clear();
          loss_sum += loss.detach();
          run.phase("backward");
          // One backward through all replicas: on GPUs autograd has a thread for each device, on CPUs it is this one.
          (loss * scale.to(loss.dtype())).backward();
        } else {
          for (const Replica& replica : replicas) {
            if (replica.loss.defined()) loss_sum += replica.loss.detach().to(first);  // one number leaves the replica
          }
          run.phase("backward");
          threads.run(fmt::format("backward of step {}", step), [&](size_t r) {
            Replica& replica = replicas[r];
            if (!replica.loss.defined()) return;
            if (options.injects("inf", r, step)) replica.loss = replica.loss * INFINITY;  // a planned fault
            (replica.loss * scale.to(replica.device)).backward();  // outside of autocast: operations know their dtype
          });
        }
        for (const NamedTensors& mine : weights) widen_gradients(mine);  // --weights low: fp32 sums from here on
      }
      // The graph goes, and with it what it keeps, before the gradients of all replicas come together.
      for (Replica& replica : replicas) replica.logits = replica.loss = at::Tensor();

      // Replicas that share a generator leave it as the last of them did. A checkpoint holds it, so it gets a state of its own.
      seed_dropout(options, step, options.accumulate, 0);

      run.phase("reduce");
      exchange.reduce(weights);  // the sum over all replicas, on the first device

      run.phase("optimizer");
      const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
      scaler.unscale(gradients, /*world=*/nullptr);  // an inf of one replica is in the sum: the step is skipped
      run.gradients_ready(step, optimizer.parameters());
      const at::Tensor norm = gradient_norm(gradients);  // []
      clip_gradients(gradients, norm, options.clip_norm);
      optimizer.step(run.learning_rate(step), scaler.found_inf());
      scaler.update();

      run.after_step(step, loss_sum, norm, scaler);
      run.save_if_due(step, optimizer, scaler);
      ++steps_done;
    }

    // 7 ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────
    run.save_final(optimizer, scaler);
    run.training_ended(optimizer.masters());
    say(launch, device_report(options, exchange, steps_done));
  }

  // 8 ── report and verdict ───────────────────────────────────────────────────────────────────────────────────────────
  return run.finish([&](const TrainingRecord& record) { return compare_with_one_device(options, record, first); });
}

}  // namespace mgp

int main(int argc, char** argv) { return mgp::run_main(mgp::train_dataparallel, argc, argv); }

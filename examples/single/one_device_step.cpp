#include "examples/single/one_device_step.hpp"

#include <algorithm>

#include "common/checkpoint.hpp"
#include "common/data.hpp"
#include "common/loss_scaler.hpp"
#include "common/model.hpp"
#include "common/optimizer.hpp"
#include "common/precision.hpp"
#include "common/sharded_checkpoint.hpp"

namespace mgp {
TrainingRecord train_on_one_device(const Options& options, at::Device device, Precision precision,
                                   const TrainingRecord& run) {
  apply_precision(precision);
  const SyntheticTokens data(options.model, options.seed, options.global_batch_size, options.data_mode(), device);
  Model model = make_model(options.model, options.seed, device, storage_dtype(precision));
  const bool low_weights = options.low_weights() && precision == options.precision;
  const NamedTensors masters = lower_weights(*model, low_weights ? options.weight_dtype() : storage_dtype(precision));
  for (auto& [name, parameter] : named_parameters(*model)) {
    if (options.adamw.is_frozen(name)) parameter.set_requires_grad(false);
  }
  AdamW optimizer(named_parameters(*model), masters, options.adamw);
  // Whether a step overflows under a large scale hangs on the last bit of a sum. So this run takes a scale that was safe,
  // and leaves out the steps that the other run had to leave out. fp32 beside a low precision is the truth that both are
  // measured against: it needs no scale.
  const bool scaled = options.loss_scaling == "on" && precision == options.precision;
  LossScaler scaler(scaled, {run.lowest_scale / 4, options.scaler.growth_interval}, device);
  int64_t first_step = 1;
  if (!options.load.empty()) {
    const FullState file = load_checkpoint(options.load);
    restore(file, optimizer);
    first_step = file.training.step + 1;
  }

  TrainingRecord record;
  record.initial_parameters = copies_on_cpu(optimizer.masters());
  // Half of what a rank of the run takes at once: fits where the run fitted, and never the same sums.
  // In low precision it takes just as much: sums over rows lose digits with each row, and the limit is the distance of a
  // one-device run that rounds as much as the run does.
  const int64_t parts = uses_autocast(options.precision) ? 1 : 2;
  const int64_t micro_rows = std::max<int64_t>(1, options.batch_size / options.accumulate / parts);
  const int64_t micro_count = (options.global_batch_size + micro_rows - 1) / micro_rows;

  for (int64_t step = first_step; step < first_step + static_cast<int64_t>(run.losses.size()); ++step) {
    optimizer.zero_grad();
    at::Tensor loss_sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
    for (int64_t micro = 0; micro < micro_count; ++micro) {
      const RowSlice rows = RowSlice{0, options.global_batch_size}.part(micro, micro_count);
      const Batch batch = data.rows(step, rows);  // tokens [b, T], labels [b]
      at::Tensor loss;                            // [], this microbatch's share of the global mean
      {
        const Autocast autocast(device, low_weights ? Precision::fp32 : precision);
        const at::Tensor logits = model->forward(batch.tokens);  // [b, classes]
        loss = cross_entropy_sum(logits, batch.labels) / static_cast<double>(options.global_batch_size);
      }
      scaler.scale(loss).backward();
      widen_gradients(optimizer.parameters());
      loss_sum += loss.detach().to(at::kDouble);
    }

    const std::vector<at::Tensor> gradients = gradients_of(optimizer.parameters());
    scaler.unscale(gradients, /*world=*/nullptr);
    if (step == first_step) {
      for (const auto& [name, parameter] : optimizer.parameters()) {
        record.first_gradients.emplace_back(
            name, copy_on_cpu(parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter)));
      }
    }
    const at::Tensor norm = gradient_norm(gradients);
    clip_gradients(gradients, norm, options.clip_norm);
    if (!run.skipped[static_cast<size_t>(step - first_step)]) optimizer.step(options.lr.at(step), scaler.found_inf());
    record.losses.push_back(loss_sum.item<double>());
    record.norms.push_back(norm.item<double>());
  }
  record.final_parameters = copies_on_cpu(optimizer.masters());
  return record;
}

Verdict compare_with_one_device(const Options& options, const TrainingRecord& run, at::Device device) {
  const TrainingRecord same = train_on_one_device(options, device, options.precision, run);
  if (options.precision == Precision::fp32 || options.precision == Precision::fp64) {
    return compare_exact(run, same, options.precision);
  }
  const TrainingRecord fp32 = train_on_one_device(options, device, Precision::fp32, run);
  return compare_low(run, same, fp32);
}

}  // namespace mgp

// Checkpoints of a run: when they are due, on whose thread they are written, and what is said of them.
#include <fmt/format.h>

#include <cstdio>

#include "common/device_list.hpp"
#include "common/error.hpp"
#include "common/run_state.hpp"
#include "common/watchdog.hpp"

namespace mgp {

void Run::State::write_checkpoint(int64_t step, const AdamW& optimizer, const LossScaler& scaler,
                                  const std::vector<std::string>& bucket_order) {
  finish_save();  // one at a time: a second save waits for the first
  saved_step = step;
  if (launch.rank != 0 && layout == nullptr) return;  // rank 0 has everything; the others go on
  TrainingState training;
  training.step = step;
  training.seed = options.seed;
  training.global_batch_size = options.global_batch_size;
  training.next_sample = options.data == "repeat" ? 0 : step * options.global_batch_size;
  training.data = options.data;
  training.precision = to_string(options.precision);
  training.bucket_order = bucket_order;
  if (scaler.enabled()) training.loss_scale = scaler.current_scale();
  training.good_steps = scaler.good_steps();
  capture_rng(training, device);
  // Ranks wait for each other meanwhile: no deadline runs while a disk is slow.
  std::optional<Watchdog::Pause> pause;
  if (world != nullptr) pause.emplace(world->watchdog());
  if (options.async_save) return begin_save(step, optimizer, training);
  if (options.save) save_full(step, optimizer, training);
  if (options.save_sharded && layout != nullptr) save_shards(step, optimizer, training);
}

/// Days of training are worth more than one file: the run goes on, the exit code tells (trial B34).
void Run::State::save_failed_because(const std::exception& error) {
  save_failed = true;
  if (launch.rank == 0) warn(fmt::format("checkpoint not written, the run goes on: {}", error.what()));
}

// ── at once ──

void Run::State::save_full(int64_t step, const AdamW& optimizer, const TrainingState& training) {
  try {
    if (layout != nullptr) {  // collective
      save_full_state_of_pieces(launch.rank == 0 ? *options.save : "", options.model, optimizer, training, *layout);
    } else {
      save_full_state(*options.save, options.model, optimizer, training);
    }
    say(launch, fmt::format("saved {} at step {}\n", *options.save, step));
  } catch (const std::exception& error) {
    save_failed_because(error);
  }
}

void Run::State::save_shards(int64_t step, const AdamW& optimizer, const TrainingState& training) {
  try {
    save_sharded(*options.save_sharded, options.model, *layout, optimizer.masters(), optimizer.exp_avg(),
                 optimizer.exp_avg_sq(), optimizer.step_count(), training, *world);
    say(launch, fmt::format("saved {} at step {}, {} ranks\n", *options.save_sharded, step, launch.world_size));
  } catch (const RunError& error) {  // the same one on all ranks
    save_failed_because(error);
  }
}

// ── beside training ──

/// Copies what is to be saved to host memory: training goes on as soon as the copies are queued on the compute stream.
/// (Whole tensors of pieces are gathered first, parameter by parameter, which the host waits for.)
void Run::State::begin_save(int64_t step, const AdamW& optimizer, const TrainingState& training) {
  auto save = std::make_unique<SaveUnderWay>();
  save->step = step;
  const bool full = options.save && launch.rank == 0;
  if (options.save) {
    save->full = layout != nullptr ? host_copy_of_pieces(options.model, optimizer, training, *layout)
                                   : host_copy_of(options.model, optimizer, training);
    std::vector<at::Device> holders;
    for (const auto& [name, tensor] : optimizer.masters()) holders.push_back(tensor.device());
    for (const at::Device on : distinct_devices(holders)) save->copied.push_back(Moment::record(on));
  }
  if (options.save_sharded && layout != nullptr) {
    try {
      save->sharded.emplace(*options.save_sharded, options.model, *layout, optimizer.masters(), optimizer.exp_avg(),
                            optimizer.exp_avg_sq(), optimizer.step_count(), training, *world, /*snapshot=*/true);
    } catch (const RunError& error) {  // the same one on all ranks
      save_failed_because(error);
    }
  }
  save->writer = std::async(std::launch::async, [&of = *save, full, path = options.save.value_or("")] {
    if (full) {
      try {
        for (const Moment& mark : of.copied) mark.synchronize();
        write_full_state(path, of.full);
      } catch (const std::exception& error) {
        of.full_error = error.what();
      }
      of.full = {};  // host memory, given back at once
    }
    if (of.sharded) of.sharded->write();
  });
  saving = std::move(save);
}

void Run::State::finish_save() {
  if (!saving) return;
  const std::unique_ptr<SaveUnderWay> save = std::move(saving);
  std::optional<Watchdog::Pause> pause;
  if (world != nullptr) pause.emplace(world->watchdog());
  save->writer.get();
  const auto said = [&](const std::string& path) {
    say(launch, fmt::format("saved {} at step {}, while training went on\n", path, save->step));
  };
  if (!save->full_error.empty()) {
    save_failed_because(RunError(save->full_error));
  } else if (options.save) {
    said(*options.save);
  }
  if (!save->sharded) return;
  try {
    save->sharded->publish();
    said(*options.save_sharded);
  } catch (const RunError& error) {
    save_failed_because(error);
  }
}

// ── when ──

void Run::save_if_due(int64_t step, const AdamW& optimizer, const LossScaler& scaler,
                      const std::vector<std::string>& bucket_order) {
  State& s = *state_;
  if (s.saves() && s.options.save_every > 0 && step % s.options.save_every == 0) {
    s.write_checkpoint(step, optimizer, scaler, bucket_order);
    s.step_began = Moment::record(s.device);
  }
}

void Run::save_final(const AdamW& optimizer, const LossScaler& scaler, const std::vector<std::string>& bucket_order) {
  State& s = *state_;
  const int64_t step = std::max(s.loaded.step, s.report.last_step());
  if (s.saves() && s.saved_step != step) s.write_checkpoint(step, optimizer, scaler, bucket_order);
  s.finish_save();
}

}  // namespace mgp

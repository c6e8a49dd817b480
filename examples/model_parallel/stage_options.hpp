// The flags of train_model_parallel: which devices, and which layers stand on each.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "common/options.hpp"
#include "common/stage_model.hpp"

namespace mgp {

struct StageOptions : Options {
  std::string devices_flag, split_flag;  ///< as given, "" if not
  std::vector<at::Device> devices;       ///< after settle_stages(): of each stage; one may serve several stages
  std::vector<StagePart> parts;          ///< after settle_stages(): what each stage holds
  at::Device first_device() const { return devices.front(); }
  at::Device last_device() const { return devices.back(); }
};

void add_stage_flags(CLI::App& app, StageOptions& options);  ///< --devices, --split

/// Stage s of `stages` on `gpus` visible GPUs where nobody named any: as many GPUs as there are stages, or all of them
/// with neighbouring stages together.
std::vector<at::Device> spread_over_gpus(int64_t stages, int gpus);

/// Settles the shared options (settle() of options.hpp) and the stages. `--devices` gives their number, else the counts of
/// --split, else 3, or the layers if there are fewer. Asks CUDA only for the number of devices (with --predict not even
/// that). Throws UsageError in one line: devices that are not there or contradict --device, a split that does not fit,
/// more stages than layers.
void settle_stages(StageOptions& options, const Launch& launch);

}  // namespace mgp

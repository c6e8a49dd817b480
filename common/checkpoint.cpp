#include "common/checkpoint.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "common/error.hpp"

namespace mgp {
namespace {

/// Of any parameter, also one of which this rank holds nothing: what is trained has taken the same steps.
at::Tensor steps_of(const AdamW& optimizer, const std::string& name) {
  const at::Tensor count = copy_on_cpu(optimizer.step_count());
  return optimizer.is_frozen(name) ? count.zero_() : count;
}

}  // namespace

void save_full_state(const std::string& path, const ModelConfig& config, const AdamW& optimizer,
                     const TrainingState& training) {
  write_pt(path, full_state_value({config, optimizer.masters(), optimizer.exp_avg(), optimizer.exp_avg_sq(),
                                   optimizer.steps(), training}));
}

FullState host_copy_of(const ModelConfig& config, const AdamW& optimizer, const TrainingState& training) {
  const auto copies = [](const NamedTensors& tensors) {
    NamedTensors result;
    for (const auto& [name, tensor] : tensors) result.emplace_back(name, host_copy(tensor));
    return result;
  };
  return {config,
          copies(optimizer.masters()),
          copies(optimizer.exp_avg()),
          copies(optimizer.exp_avg_sq()),
          copies(optimizer.steps()),
          training};
}

FullState host_copy_of_pieces(const ModelConfig& config, const AdamW& optimizer, const TrainingState& training,
                              ShardLayout& layout) {
  FullState state{config,
                  layout.gather(optimizer.masters()),
                  layout.gather(optimizer.exp_avg()),
                  layout.gather(optimizer.exp_avg_sq()),
                  {},
                  training};
  for (const auto& [name, tensor] : state.model) state.steps.emplace_back(name, steps_of(optimizer, name));
  return state;
}

void write_full_state(const std::string& path, const FullState& state) { write_pt(path, full_state_value(state)); }

void save_full_state_of_pieces(const std::string& path, const ModelConfig& config, const AdamW& optimizer,
                               const TrainingState& training, ShardLayout& layout) {
  const NamedTensors kinds[] = {optimizer.masters(), optimizer.exp_avg(), optimizer.exp_avg_sq()};
  const size_t count = layout.parameters().size();
  size_t gathered = 0;  // parameters of all kinds, one after the other: the order of the file
  const auto next = [&] {
    const at::Tensor whole = layout.gather_one(gathered % count, kinds[gathered / count]);
    ++gathered;
    return whole;
  };
  std::exception_ptr failure;
  if (!path.empty()) {
    FullState state{config, {}, {}, {}, {}, training};
    const at::ScalarType dtype = kinds[0].front().second.scalar_type();  // rank 0 holds the first rows of everything
    for (const ParameterShape& parameter : layout.parameters()) {
      const auto placeholder = [&] {
        return at::empty(parameter.shape, at::TensorOptions().dtype(dtype).device(at::kMeta));
      };
      state.model.emplace_back(parameter.name, placeholder());
      state.exp_avg.emplace_back(parameter.name, placeholder());
      state.exp_avg_sq.emplace_back(parameter.name, placeholder());
      state.steps.emplace_back(parameter.name, steps_of(optimizer, parameter.name));
    }
    try {
      write_pt(path, full_state_value(state), [&](const std::string&, const at::Tensor&) { return next(); });
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  while (gathered < 3 * count) next();  // the others wait in these gathers
  if (failure) std::rethrow_exception(failure);
}

void restore(const FullState& state, AdamW& optimizer, const ShardLayout* layout) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  const auto plan = [&](const NamedTensors& live, const NamedTensors& saved, bool counts) {
    const std::unordered_map<std::string, at::Tensor> values(saved.begin(), saved.end());
    for (size_t i = 0; i < live.size(); ++i) {
      const auto& [name, tensor] = live[i];
      const auto value = values.find(name);
      const bool is_piece = layout != nullptr && !counts;
      if (&saved != &state.model && optimizer.is_frozen(name)) continue;  // no moments, never stepped
      if (value == values.end() || (!is_piece && value->second.sizes() != tensor.sizes())) {
        throw RunError("cannot restore " + name + ": the file was not checked against this model");
      }
      copies.emplace_back(tensor, is_piece ? layout->cut(i, value->second).view(tensor.sizes()) : value->second);
    }
  };
  plan(optimizer.masters(), state.model, /*counts=*/false);
  if (!state.exp_avg.empty()) {
    plan(optimizer.exp_avg(), state.exp_avg, /*counts=*/false);
    plan(optimizer.exp_avg_sq(), state.exp_avg_sq, /*counts=*/false);
    plan(optimizer.steps(), state.steps, /*counts=*/true);
  }
  const at::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
  optimizer.publish_masters();
}

void capture_rng(TrainingState& training, at::Device device) {
  const auto state_of = [](at::Device of) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  };
  training.rng_cpu = state_of(at::kCPU);
  training.rng_cuda = device.is_cuda() ? state_of(device) : at::Tensor();
}

void restore_rng(const TrainingState& training, at::Device device) {
  const auto set = [](at::Device of, const at::Tensor& state) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    try {
      generator.set_state(state);
    } catch (const c10::Error&) {
      throw UsageError("--load: the random state in the file does not fit this version of LibTorch");
    }
  };
  if (training.rng_cpu.defined()) set(at::kCPU, training.rng_cpu);
  if (device.is_cuda() && training.rng_cuda.defined()) set(device, training.rng_cuda);
}

}  // namespace mgp

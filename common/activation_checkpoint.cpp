#include "common/activation_checkpoint.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <optional>

#include "common/error.hpp"

#if MGP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace mgp {
namespace {

// ── what must be the same in both runs ──────────────────────────────────────────────────────────────────────────────

/// Autocast on this thread for one kind of device. Backward of a GPU runs on another thread, whose dtype would be the
/// default, fp16.
struct AutocastState {
  bool enabled = false;
  at::ScalarType dtype = at::kFloat;
  bool cache = true;

  static AutocastState of(at::DeviceType type) {
    return {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type),
            at::autocast::is_autocast_cache_enabled()};
  }
  void apply(at::DeviceType type) const {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
  }
};

/// Autocast as it was in forward, for one scope, with the cache of casts off: nothing gets in, nothing is to be
/// cleared.
class AutocastAsInForward {
 public:
  AutocastAsInForward(at::DeviceType type, AutocastState forward) : type_(type), before_(AutocastState::of(type)) {
    forward.cache = false;
    forward.apply(type_);
  }
  ~AutocastAsInForward() { before_.apply(type_); }
  AutocastAsInForward(const AutocastAsInForward&) = delete;
  AutocastAsInForward& operator=(const AutocastAsInForward&) = delete;

 private:
  at::DeviceType type_;
  AutocastState before_;
};

at::Tensor random_state(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

/// The device's generator as it was in forward, for one scope. An undefined state leaves the generator alone.
class RandomAsInForward {
 public:
  RandomAsInForward(at::Device device, const at::Tensor& forward) : device_(device) {
    if (!forward.defined()) return;
    before_ = random_state(device_);
    set_random_state(device_, forward);
  }
  ~RandomAsInForward() {
    if (before_.defined()) set_random_state(device_, before_);
  }
  RandomAsInForward(const RandomAsInForward&) = delete;
  RandomAsInForward& operator=(const RandomAsInForward&) = delete;

 private:
  at::Device device_;
  at::Tensor before_;
};

/// A state that is read while a CUDA graph is captured would be the same in each replay; LibTorch refuses to give it.
void refuse_capture([[maybe_unused]] at::Device device) {
#if MGP_WITH_CUDA
  if (!device.is_cuda()) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status));
  if (status == cudaStreamCaptureStatusNone) return;
  throw RunError(
      "activation checkpointing with dropout cannot be captured in a CUDA graph: the random state that the second run "
      "needs cannot be read then; leave out the graph, --dropout or --checkpoint-activations");
#endif
}

// ── the node of the graph ───────────────────────────────────────────────────────────────────────────────────────────

/// What backward needs beside x to run the block again.
struct Recipe : torch::CustomClassHolder {
  Block block;
  AutocastState autocast;
  at::Tensor random;  ///< state of the generator before the block; undefined if it draws no numbers
};

class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  /// Runs with gradients off, as every forward of a Function: whatever the block makes is freed when it ends.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& /*trigger*/, const c10::intrusive_ptr<Recipe>& recipe) {
    context->save_for_backward({x});
    context->saved_data["recipe"] = at::IValue::make_capsule(recipe);
    const AutocastAsInForward autocast(x.device().type(), recipe->autocast);
    return recipe->block(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw RunError(
          "activation checkpointing: backward with create_graph needs a graph of the gradients, which a nested "
          "backward does not give");
    }
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw RunError(
          "activation checkpointing: gradients of chosen tensors (torch::autograd::grad, or inputs of backward) "
          "cannot be given, since the block's parameters stand in no graph before it runs again; use backward()");
    }
    const at::Tensor x = context->get_saved_variables().at(0);  // throws after a backward that freed the graph
    const auto recipe = c10::static_intrusive_pointer_cast<Recipe>(context->saved_data.at("recipe").toCapsule());

    // The same memory as x, but the begin of a graph of its own, which ends with the block.
    const at::Tensor input = x.detach().set_requires_grad(x.requires_grad());  // [B, T, C]
    at::Tensor y;                                                              // [B, T, C]
    {
      const AutocastAsInForward autocast(x.device().type(), recipe->autocast);
      const RandomAsInForward random(x.device(), recipe->random);
      const at::AutoGradMode with_graph(true);
      y = recipe->block(input);
    }
    // Outside of autocast, as every backward. It frees the block's tensors on its way, and the rest goes with y, before
    // the next block begins. The parameters' gradients are accumulated here; x's is handed to the block before.
    if (y.requires_grad()) torch::autograd::backward({y}, {gradients.at(0)});
    return {input.grad(), {}, {}};
  }
};

}  // namespace

at::Tensor checkpointed(const Block& block, const at::Tensor& x, bool draws_random_numbers) {
  if (!at::GradMode::is_enabled()) return block(x);
  const auto recipe = c10::make_intrusive<Recipe>();
  recipe->block = block;
  recipe->autocast = AutocastState::of(x.device().type());
  if (draws_random_numbers) {
    refuse_capture(x.device());
    recipe->random = random_state(x.device());
  }
  // A Function stands in the graph only if one of its inputs requires a gradient. Where x does not (it is data), the
  // block's parameters still may: an empty tensor that does takes its place.
  std::optional<at::Tensor> trigger;
  if (!x.requires_grad()) trigger = at::empty({0}, x.options().dtype(at::kFloat)).set_requires_grad(true);
  return Checkpoint::apply(x, trigger, recipe);
}

}  // namespace mgp

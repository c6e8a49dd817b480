// What a stage says to the stage before it and to the one behind it.
//
// Activations go down the pipeline over one communicator, gradients come up over another. On GPUs each has a stream of its
// own: with one for both, a stage that waits for a gradient could not send its next activation meanwhile, and 1F1B would
// become one after the other.
//
// No tags: messages between two ranks arrive in the order of the calls, and both sides make their calls in the order of the
// schedule, of which check_schedule() has proved that it ends. Even the first message of two ranks is safe there: NCCL
// connects them in it, which holds up the host of each until the other has come.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <vector>

#include "common/communicator.hpp"

namespace mgp {

class Neighbours {
 public:
  /// Collective over `world`, whose ranks are the stages in order. `dtype`: of the residual stream, which is what crosses
  /// the wire.
  Neighbours(Communicator& world, at::ScalarType dtype, int64_t micro_batches);

  /// Starts to receive the residual stream of microbatch `m`, [b, T, C], from the stage before. Needs no memory of its own
  /// on the other side: the shape follows from the rows, which every stage knows, so uneven cuts are right too (trial B55).
  void recv_activation(int64_t m, at::IntArrayRef shape);
  /// The same for the gradient of the loss by this stage's output, [b, T, C], from the stage behind.
  void recv_gradient(int64_t m, at::IntArrayRef shape);

  /// What was received. On a GPU the compute stream waits for it, on a CPU the process does. Once each.
  at::Tensor activation(int64_t m);
  at::Tensor gradient(int64_t m);

  /// Sends and does not wait. The tensor must not change until finish(); its memory is kept until the message has left.
  void send_activation(int64_t m, const at::Tensor& y);
  void send_gradient(int64_t m, const at::Tensor& dx);

  /// Waits for the sends. Call at the end of a step.
  void finish();

 private:
  /// One direction.
  struct Direction {
    Communicator communicator;
    const char* label;
    struct Message {
      at::Tensor tensor;
      Work work;
    };
    std::vector<Message> received = {};  // [microbatch], empty where none is under way
    std::deque<Work> sent = {};
    void recv(int64_t m, at::IntArrayRef shape, const at::TensorOptions& options, int peer);
    at::Tensor take(int64_t m);
    void send(int64_t m, const at::Tensor& tensor, int peer);
  };

  const int stage_;
  const at::TensorOptions options_;
  Direction down_, up_;
};

}  // namespace mgp

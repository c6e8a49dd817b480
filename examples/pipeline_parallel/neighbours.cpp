#include "examples/pipeline_parallel/neighbours.hpp"

#include <fmt/format.h>

#include <utility>

namespace mgp {

Neighbours::Neighbours(Communicator& world, at::ScalarType dtype, int64_t micro_batches)
    : stage_(world.rank()),
      options_(at::TensorOptions().dtype(dtype).device(world.device())),
      down_{world.split(/*color=*/0, /*key=*/stage_, "activations").value(), "activation"},
      up_{world.split(/*color=*/0, /*key=*/stage_, "gradients").value(), "gradient"} {
  down_.received.resize(static_cast<size_t>(micro_batches));
  up_.received.resize(static_cast<size_t>(micro_batches));
}

void Neighbours::recv_activation(int64_t m, at::IntArrayRef shape) { down_.recv(m, shape, options_, stage_ - 1); }
void Neighbours::recv_gradient(int64_t m, at::IntArrayRef shape) { up_.recv(m, shape, options_, stage_ + 1); }
at::Tensor Neighbours::activation(int64_t m) { return down_.take(m); }
at::Tensor Neighbours::gradient(int64_t m) { return up_.take(m); }
void Neighbours::send_activation(int64_t m, const at::Tensor& y) { down_.send(m, y, stage_ + 1); }
void Neighbours::send_gradient(int64_t m, const at::Tensor& dx) { up_.send(m, dx, stage_ - 1); }

void Neighbours::finish() {
  for (Direction* direction : {&down_, &up_}) {
    for (Work& work : direction->sent) work.wait();
    direction->sent.clear();
  }
}

void Neighbours::Direction::recv(int64_t m, at::IntArrayRef shape, const at::TensorOptions& options, int peer) {
  Message& message = received.at(static_cast<size_t>(m));
  message.tensor = at::empty(shape, options);  // [b, T, C]
  message.work = communicator.recv(message.tensor, peer, {fmt::format("{} {}", label, m)});
}

at::Tensor Neighbours::Direction::take(int64_t m) {
  Message message = std::exchange(received.at(static_cast<size_t>(m)), Message{});
  message.work.wait();
  return message.tensor;
}

void Neighbours::Direction::send(int64_t m, const at::Tensor& tensor, int peer) {
  // Messages that have left give their memory back. (MPI moves messages only when it is asked.)
  while (!sent.empty() && sent.front().done()) sent.pop_front();
  sent.push_back(communicator.send(tensor.detach().contiguous(), peer, {fmt::format("{} {}", label, m)}));
}

}  // namespace mgp

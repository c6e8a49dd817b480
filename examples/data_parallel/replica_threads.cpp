#include "examples/data_parallel/replica_threads.hpp"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "common/error.hpp"

namespace mgp {
namespace {

/// The cause on one line. LibTorch appends its own stack.
std::string one_line(const std::exception_ptr& error) {
  std::string text = "an exception of unknown type";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    text = known.what();
  } catch (...) {
  }
  text.erase(std::min(text.find("\nException raised from"), text.size()));
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

ReplicaThreads::ReplicaThreads(std::vector<at::Device> devices, int cpu_threads, bool take_turns)
    : devices_(std::move(devices)), take_turns_(take_turns), errors_(devices_.size()) {
  for (const at::Device device : devices_) turns_[device.str()];  // made here: threads only look them up
  try {
    for (size_t replica = 0; replica < devices_.size(); ++replica) {
      threads_.emplace_back([this, replica, cpu_threads] { serve(replica, cpu_threads); });
    }
  } catch (const std::exception& error) {  // the limit on threads; those that run already must be joined
    stop();
    throw RunError(fmt::format("no thread for replica {}: {}", threads_.size(), error.what()));
  }
}

ReplicaThreads::~ReplicaThreads() { stop(); }

void ReplicaThreads::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ReplicaThreads::run(const std::string& what, const std::function<void(size_t)>& work) {
  const at::ThreadLocalState state;  // grad mode and the like, of the caller
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = [&](size_t replica) {
    const at::ThreadLocalStateGuard as_in_caller(state);
    std::unique_lock<std::mutex> turn;
    if (take_turns_) turn = std::unique_lock<std::mutex>(turns_.at(devices_[replica].str()));
    work(replica);
  };
  std::fill(errors_.begin(), errors_.end(), nullptr);
  running_ = devices_.size();
  ++number_;
  wake_.notify_all();
  done_.wait(lock, [&] { return running_ == 0; });
  job_ = nullptr;
  for (size_t replica = 0; replica < errors_.size(); ++replica) {
    if (errors_[replica] == nullptr) continue;
    throw RunError(
        fmt::format("replica {} on {}, {}: {}", replica, devices_[replica].str(), what, one_line(errors_[replica])));
  }
}

void ReplicaThreads::serve(size_t replica, int cpu_threads) {
  std::optional<c10::DeviceGuard> device;
  std::exception_ptr start;  // said with the first job: nobody listens before
  try {
    if (devices_[replica].is_cuda()) device.emplace(devices_[replica]);
    at::set_num_threads(cpu_threads);
  } catch (...) {
    start = std::current_exception();
  }
  int64_t served = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || number_ > served; });
    if (stopping_) return;
    served = number_;
    lock.unlock();
    std::exception_ptr error = start;
    if (error == nullptr) {
      try {
        job_(replica);  // set before the number, and not changed until all are done
      } catch (...) {
        error = std::current_exception();
      }
    }
    lock.lock();
    errors_[replica] = error;
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace mgp

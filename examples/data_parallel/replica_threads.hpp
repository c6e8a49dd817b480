// A host thread for each replica, so that all devices work at once.
//
// Why       One thread could launch kernels on all GPUs in turn, but launching is what takes a host its time, and on CPUs
//           the work itself is the host's. The threads live as long as the training: a new thread would set up a new
//           OpenMP team and new library handles in every step.
// State     Grad mode, autocast, current device and number of threads belong to a thread. Each job gets the caller's
//           (at::ThreadLocalState); device and CPU threads are set once.
// Errors    A thread whose function throws ends the process (std::terminate). So each job catches everything, and the
//           caller throws it again after all replicas have come back.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mgp {

class ReplicaThreads {
 public:
  /// One thread for each of `devices`. `cpu_threads`: what each of them may use for an operation on the CPU.
  /// `take_turns`: replicas that share a device work one after another. Needed with dropout: a device has one random
  /// generator, and activation checkpointing sets it back while it runs a layer again.
  ReplicaThreads(std::vector<at::Device> devices, int cpu_threads, bool take_turns);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Calls work(replica) on all threads at once and waits for all of them. Throws RunError that names the first replica
  /// that failed, its device, `what` it was doing, and the cause. Not for calls of several threads.
  void run(const std::string& what, const std::function<void(size_t)>& work);

 private:
  void serve(size_t replica, int cpu_threads);
  void stop();

  std::vector<at::Device> devices_;
  bool take_turns_;
  std::map<std::string, std::mutex> turns_;  // by device
  std::mutex mutex_;                         // of all that follows
  std::condition_variable wake_, done_;
  std::function<void(size_t)> job_;
  int64_t number_ = 0;  // jobs so far: a thread that has done fewer has work
  size_t running_ = 0;
  bool stopping_ = false;
  std::vector<std::exception_ptr> errors_;  // of each replica
  std::vector<std::thread> threads_;
};

}  // namespace mgp

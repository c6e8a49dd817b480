// Meeting the other ranks: a key-value store (c10d::TCPStore), the only part of c10d that this project uses.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/launch.hpp"

namespace mgp {

class Rendezvous {
 public:
  /// Meets all ranks. Rank 0 serves the store (except under torchrun's agent) on master_port, or on any free port that
  /// it tells through the rendezvous file or, where `tell_all` is given (MPI), through it: called on every rank with
  /// rank 0's "host:port" (others pass ""), returns it everywhere. Throws UsageError with host:port and the way out if
  /// the port is taken, RunError if the others do not come within `timeout`.
  static std::unique_ptr<Rendezvous> meet(const Launch& launch, std::chrono::seconds timeout,
                                          const std::function<std::string(const std::string&)>& tell_all = nullptr);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  void set(const std::string& key, const std::string& value);
  /// Waits for the key up to the timeout; throws RunError naming the key.
  std::string get(const std::string& key, std::chrono::milliseconds timeout);
  /// The value if the key is there now.
  std::optional<std::string> peek(const std::string& key);
  int64_t add(const std::string& key, int64_t amount);
  void erase(const std::string& key);

  /// Everybody's string in rank order ("all-gather" of text over the store). `key` must be new for each call. Throws
  /// RunError naming the ranks that did not answer.
  std::vector<std::string> exchange(const std::string& key, const std::string& mine, std::chrono::milliseconds timeout);

  /// A second connection for another thread: one store object must not be used by two threads at once.
  std::unique_ptr<Rendezvous> second_client() const;

  /// Waits (bounded) until every rank said goodbye, so that rank 0's store outlives its last client.
  void goodbye();

  const std::string& address() const;  ///< "host:port" that was used
  int rank() const;
  int size() const;

 private:
  struct State;
  explicit Rendezvous(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace mgp

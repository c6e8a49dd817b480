// What all communicators of a process share: the store, the watchdog, the ledger, MPI's life. Internal to common/.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/communicator.hpp"
#include "common/mpi_runtime.hpp"
#include "common/rendezvous.hpp"
#include "common/watchdog.hpp"
#include "common/wire.hpp"

namespace mgp {

struct Session {
  Session(const Launch& launch_in, at::Device device_in, const CommOptions& options_in);
  /// In order: watchdog, goodbye, store, MPI.
  ~Session();

  /// Meets the others and starts the watchdog. Throws UsageError or RunError.
  static std::shared_ptr<Session> start(const Launch& launch, at::Device device, const CommOptions& options);

  /// Keeps the session for the rest of the process: after a failure the store must serve the others, and the watchdog
  /// must see to it that this process ends.
  static void abandon(const std::shared_ptr<Session>& session);

  /// Waits on the host until `ready`, for a call that was started. Spins, then sleeps (ranks may share a core), at most
  /// `longest_sleep` at a time. Throws RunError when the deadline has passed or another rank has failed.
  void poll_until(const std::function<bool()>& ready, const std::string& what,
                  std::chrono::microseconds longest_sleep = std::chrono::microseconds(50));
  /// The same for something that is not a started call: the watchdog is told of it meanwhile.
  void poll_until(const std::function<bool()>& ready, const std::string& what, const CallParty& party,
                  std::chrono::microseconds longest_sleep);

  /// Text of all ranks of a group over the store, in the group's order. Collective; `number` counts these exchanges in
  /// the group, from 1. Leaves no keys behind.
  std::vector<std::string> exchange_text(const GroupFacts& group, int64_t number, const std::string& mine,
                                         const std::string& what);

  void add_wire(Wire* wire);
  void remove_wire(Wire* wire);

  const Launch launch;
  const at::Device device;
  CommOptions options;  ///< of these only `debug` changes
  std::vector<DeviceFacts> devices;
  Ledger ledger;
  std::unique_ptr<MpiRuntime> mpi;         ///< null: not needed
  std::unique_ptr<Rendezvous> rendezvous;  ///< null: alone
  std::unique_ptr<Watchdog> watchdog;
  std::function<void(const PastCall&)> observer;  ///< --trace; null: nobody looks
  std::atomic<bool> failed{false};                ///< leave without waiting for anybody

 private:
  std::mutex wires_mutex_;
  std::vector<Wire*> wires_;
};

}  // namespace mgp

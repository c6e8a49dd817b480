// Connections to c10d::TCPStore that neither hang nor fill the screen with LibTorch's stack traces.
#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "common/socket.hpp"

namespace mgp {

/// When a peer has gone, LibTorch logs a page of stack trace for each call on its connection; we say it in one line. Its
/// log is off only while one of these lives, because the same switch would swallow TORCH_WARN. A TORCH_CPP_LOG_LEVEL that
/// the user set keeps it on.
class QuietLog {
 public:
  QuietLog();
  ~QuietLog();
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  bool active_ = true;
};

/// A connection to the store at `endpoint`, where somebody is known to listen. `listening` >= 0: serves the store on this
/// socket and connects to it. Null when what answers there is no store.
c10::intrusive_ptr<c10d::Store> open_store(const Endpoint& endpoint, int listening, std::chrono::milliseconds timeout);

}  // namespace mgp

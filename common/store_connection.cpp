#include "common/store_connection.hpp"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace mgp {
namespace {

struct LogState {
  std::mutex mutex;
  int users = 0;
  int level_before = 0;
  bool asked_for = false;  // by TORCH_CPP_LOG_LEVEL
};

/// Never destroyed: a thread that was given up may still use it when the process ends.
LogState& log_state() {
  static LogState* const state = [] {
    c10::initLogging();  // makes TORCH_CPP_LOG_LEVEL count; in a C++ program nobody else does
    auto* made = new LogState;
    made->asked_for = std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr;
    return made;
  }();
  return *state;
}

}  // namespace

QuietLog::QuietLog() {
  constexpr int kOnlyFatal = 3;
  LogState& state = log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  active_ = !state.asked_for;
  if (!active_ || state.users++ > 0) return;
  state.level_before = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = kOnlyFatal;
}

QuietLog::~QuietLog() {
  LogState& state = log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (active_ && --state.users == 0) FLAGS_caffe2_log_level = state.level_before;
}

c10::intrusive_ptr<c10d::Store> open_store(const Endpoint& endpoint, int listening, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint.port);
  options.isServer = listening >= 0;
  if (listening >= 0) options.masterListenFd = listening;
  options.waitWorkers = false;
  options.timeout = std::max(timeout, std::chrono::milliseconds(1000));

  // LibTorch's constructor sends a ping and waits for the answer without a limit. A program that listens here and is no
  // store would hold us for ever, so it runs in a thread of its own, which is given up when the answer does not come and
  // ends with the process.
  auto opened = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto result = opened->get_future();
  std::thread([opened, options, host = endpoint.host] {
    const QuietLog quiet;
    try {
      opened->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      opened->set_exception(std::current_exception());
    }
  }).detach();
  try {
    if (result.wait_for(options.timeout) == std::future_status::ready) return result.get();
  } catch (const c10::Error&) {
    // It answered, but not as a store does.
  }
  return {};
}

}  // namespace mgp

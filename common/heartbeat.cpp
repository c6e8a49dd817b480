#include "common/heartbeat.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace mgp {

namespace {

const char kVersion[] = "heartbeat 1";

}  // namespace

// One field a line. The description comes last because it is the only one that a program's user can choose.
std::string serialize(const Heartbeat& heartbeat) {
  std::string groups;
  for (const auto& [name, count] : heartbeat.groups) groups += fmt::format("{}={};", name, count);
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", kVersion, heartbeat.calls, heartbeat.step, heartbeat.pid,
                     heartbeat.host, int{heartbeat.traced}, int{heartbeat.paused}, int{heartbeat.left}, groups,
                     heartbeat.last);
}

Heartbeat parse_heartbeat(const std::string& text) {
  Heartbeat result;
  std::istringstream lines(text);
  std::string version;
  std::string host;
  std::string groups;
  int traced = 0;
  int paused = 0;
  int left = 0;
  std::getline(lines, version);
  if (version != kVersion) return {};
  lines >> result.calls >> result.step >> result.pid;
  lines.ignore(1);
  std::getline(lines, result.host);
  lines >> traced >> paused >> left;
  lines.ignore(1);
  std::getline(lines, groups);
  if (!lines) return {};
  std::getline(lines, result.last, '\0');
  result.traced = traced != 0;
  result.paused = paused != 0;
  result.left = left != 0;
  std::istringstream items(groups);
  for (std::string item; std::getline(items, item, ';');) {
    const size_t equals = item.rfind('=');
    if (equals != std::string::npos) {
      result.groups[item.substr(0, equals)] = std::strtoll(item.c_str() + equals + 1, nullptr, 10);
    }
  }
  return result;
}

std::string describe(int rank, const Heartbeat& heartbeat) {
  if (!heartbeat.heard()) return fmt::format("rank {}, of which nothing was heard yet", rank);
  if (heartbeat.left) return fmt::format("rank {}, which has ended in order at step {}", rank, heartbeat.step);
  if (heartbeat.last.empty()) return fmt::format("rank {}, which made no call yet", rank);
  return fmt::format("rank {}, which last made {} at step {}", rank, heartbeat.last, heartbeat.step);
}

int tracer_of(int pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("TracerPid:", 0) == 0) return std::atoi(line.c_str() + sizeof("TracerPid:") - 1);
  }
  return 0;
}

bool process_ended(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return true;
  // "pid (name) state ...": the name may hold brackets and spaces, so look behind the last bracket.
  const size_t bracket = line.rfind(')');
  const char state = bracket != std::string::npos && bracket + 2 < line.size() ? line[bracket + 2] : '?';
  return state == 'Z' || state == 'X';
}

}  // namespace mgp

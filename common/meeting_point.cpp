#include "common/meeting_point.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "common/error.hpp"

namespace mgp {
namespace {

/// The port when nobody gave one and there is no other way to tell it: all ranks compute the same from the job's name.
int port_of_job(const std::string& job) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return static_cast<int>(10000 + hash % 20000);
}

}  // namespace

void write_rendezvous_file(const std::string& path, const std::string& text) {
  const std::string temporary = fmt::format("{}.{}", path, getpid());
  std::ofstream file(temporary);
  file << text << '\n';
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    throw UsageError(
        fmt::format("cannot write the rendezvous file {}: {} (MGP_RENDEZVOUS_FILE)", path, std::strerror(errno)),
        /*every_rank=*/true);
  }
}

std::string read_rendezvous_file(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool all_local(const Launch& launch) { return launch.local_size == launch.world_size; }

Endpoint agreed_endpoint(const Launch& launch) {
  int port = launch.master_port;
  if (port == 0 && !launch.store_prefix.empty()) port = port_of_job(launch.store_prefix);
  if (port == 0) {
    throw UsageError(
        "MASTER_PORT is not set, and nothing else tells the ranks where to meet: start with scripts/launch.sh, "
        "or set MASTER_ADDR and MASTER_PORT");
  }
  const std::string host = all_local(launch) && !launch.agent_store ? "127.0.0.1" : launch.master_addr;
  if (host.empty()) {
    throw UsageError(
        fmt::format("MASTER_ADDR is not set, and the {} ranks are on several hosts ({} on this one): set it to "
                    "the host of rank 0",
                    launch.world_size, launch.local_size));
  }
  return {host, port};
}

}  // namespace mgp

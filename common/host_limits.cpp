// What this process may use of its host: cores, CPU threads, memory. A container's limits count, not the machine's
// size.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "common/device.hpp"
#include "common/error.hpp"

namespace mgp {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Folders of one controller that apply to this process, innermost first. Version 2 has one hierarchy ("0::/path"),
/// version 1 one for each set of controllers ("4:cpu,cpuacct:/path"). In a container the path may not exist under the
/// root that is mounted there; then the root itself is the container's group, and it is always in the list.
struct CgroupFolders {
  std::vector<std::string> version2, version1;
};

CgroupFolders cgroup_folders(const std::string& root, const std::string& self, const std::string& controller) {
  CgroupFolders folders;
  std::istringstream lines(self);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_version2 = controllers.empty();
    if (!is_version2 && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    std::string path = line.substr(second + 1);
    auto& list = is_version2 ? folders.version2 : folders.version1;
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      if (is_version2) {
        list.push_back(root + path);
      } else {  // mounted under the name of the set, and under that of the controller
        list.push_back(root + "/" + controllers + path);
        list.push_back(root + "/" + controller + path);
      }
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return folders;
}

std::optional<int64_t> first_number(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

/// The number that follows `key` in a file of "key value" lines; 0 if it is not there.
int64_t value_of(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const size_t digit = line.find_first_of("0123456789", key.size());
    if (digit != std::string::npos) return first_number(line.substr(digit)).value_or(0);
  }
  return 0;
}

/// Bytes that the memory groups allow and that they still have; cached file pages count as free, the kernel drops them.
void limit_by_cgroup(HostMemory& memory, const std::string& root, const std::string& self) {
  const CgroupFolders folders = cgroup_folders(root, self, "memory");
  const auto apply = [&](const std::string& folder, const char* limit_file, const char* used_file, const char* prefix) {
    const std::optional<int64_t> limit = first_number(read_file(folder + limit_file));  // "max": no limit
    const std::optional<int64_t> used = first_number(read_file(folder + used_file));
    if (!limit || !used || *limit >= memory.total_bytes) return;
    const std::string statistics = read_file(folder + "/memory.stat");
    const int64_t cached = value_of(statistics, std::string(prefix) + "inactive_file ") +
                           value_of(statistics, std::string(prefix) + "active_file ");
    memory.total_bytes = *limit;
    memory.available_bytes = std::min(memory.available_bytes, std::max<int64_t>(0, *limit - *used + cached));
  };
  for (const std::string& folder : folders.version2) apply(folder, "/memory.max", "/memory.current", "");
  for (const std::string& folder : folders.version1) {
    apply(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_");
  }
}

}  // namespace

double cgroup_cpu_quota(const std::string& root, const std::string& self) {
  const CgroupFolders folders = cgroup_folders(root, self, "cpu");
  double smallest = 0;
  const auto apply = [&](double quota, double period) {
    if (quota <= 0 || period <= 0) return;
    smallest = smallest == 0 ? quota / period : std::min(smallest, quota / period);
  };
  for (const std::string& folder : folders.version2) {
    std::istringstream text(read_file(folder + "/cpu.max"));  // "max 100000" or "150000 100000"
    double quota = 0;
    double period = 0;
    if (text >> quota >> period) apply(quota, period);
  }
  for (const std::string& folder : folders.version1) {
    apply(static_cast<double>(first_number(read_file(folder + "/cpu.cfs_quota_us")).value_or(-1)),
          static_cast<double>(first_number(read_file(folder + "/cpu.cfs_period_us")).value_or(0)));
  }
  return smallest;
}

int usable_cores() {
  int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  // The mask can be larger than cpu_set_t on big machines: the call fails until it is given enough room.
  for (int room = CPU_SETSIZE; room <= 1 << 20; room *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(room));
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(room));
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    if (known) cores = std::max(1, CPU_COUNT_S(bytes, set));
    CPU_FREE(set);
    if (known) break;
  }
  const double quota = cgroup_cpu_quota("/sys/fs/cgroup", read_file("/proc/self/cgroup"));
  // A thread more than the quota would be stopped in every period, and the others would wait for it.
  if (quota > 0) cores = std::min(cores, std::max(1, static_cast<int>(std::floor(quota + 1e-6))));
  return cores;
}

int thread_limit(const std::string& omp_num_threads, int cores, int local_size) {
  const int most = std::max(1, cores / std::max(1, local_size));
  if (omp_num_threads.empty()) return most;
  // A list such as "4,2" gives the threads of nested levels; the outermost counts.
  const std::string outermost = omp_num_threads.substr(0, omp_num_threads.find(','));
  const std::optional<int64_t> wanted = first_number(outermost);
  if (!wanted || *wanted < 1 || outermost.find_first_not_of("0123456789 ") != std::string::npos) {
    throw UsageError(fmt::format("OMP_NUM_THREADS is '{}'; it must be a whole number, 1 or more", omp_num_threads));
  }
  return static_cast<int>(std::min<int64_t>(*wanted, most));
}

int limit_threads(const Launch& launch) {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int threads = thread_limit(text == nullptr ? "" : text, usable_cores(), launch.local_size);
  at::set_num_threads(threads);
  // The pool between operations is not used by the trainers. LibTorch lets it be set once, before its first use.
  static const bool once = [] {
    try {
      at::set_num_interop_threads(1);
    } catch (const c10::Error&) {
      // Somebody started the pool before: it stays as it is.
    }
    return true;
  }();
  (void)once;
  return threads;
}

HostMemory host_memory() {
  const std::string text = read_file("/proc/meminfo");
  HostMemory memory;
  memory.total_bytes = value_of(text, "MemTotal:") * 1024;
  memory.available_bytes = value_of(text, "MemAvailable:") * 1024;
  limit_by_cgroup(memory, "/sys/fs/cgroup", read_file("/proc/self/cgroup"));
  return memory;
}

std::string cpu_name() {
  std::istringstream lines(read_file("/proc/cpuinfo"));
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  utsname machine{};
  return uname(&machine) == 0 ? machine.machine : "unknown CPU";
}

}  // namespace mgp

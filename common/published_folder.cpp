#include "common/published_folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "common/atomic_file.hpp"
#include "common/error.hpp"

namespace mgp {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw RunError(fmt::format("cannot {} {}: {}", what, path, std::strerror(errno)));
}

bool exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool starts_with(const std::string& text, std::string_view part) { return text.compare(0, part.size(), part) == 0; }

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<std::string> names_in(const std::string& folder) {
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) fail("read the folder", folder);
  std::vector<std::string> names;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(directory);
  return names;
}

/// A file of a checkpoint, or the temporary name under which AtomicFile was writing one.
bool is_ours(const std::string& name) {
  if (name == kIndexName || is_shard_file_name(name)) return true;
  const size_t end = name.rfind(".tmp-");
  return end != std::string::npos && end > 1 && name[0] == '.' && is_number(name.substr(end + 5)) &&
         is_ours(name.substr(1, end - 1));
}

std::optional<std::string> foreign_file(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    if (!is_ours(name)) return name;
  }
  return std::nullopt;
}

/// The index goes first: from then on nobody takes the rest for a checkpoint.
void remove_checkpoint(const std::string& folder) {
  const std::string index = folder + "/" + kIndexName;
  if (unlink(index.c_str()) != 0 && errno != ENOENT) fail("remove", index);
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (is_ours(name) && unlink(path.c_str()) != 0 && errno != ENOENT) fail("remove", path);
  }
  if (rmdir(folder.c_str()) != 0) fail("remove", folder);
}

/// Names in a folder are durable once the folder is synced.
void sync_folder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("open the folder", folder);
  const bool synced = fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP;  // some file systems cannot
  const int reason = errno;
  close(descriptor);
  errno = reason;
  if (!synced) fail("sync the folder", folder);
}

void rename_folder(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) fail("rename " + from + " to", to);
}

/// Complains unless `folder` may be replaced and removed.
void check_replaceable(const std::string& folder) {
  struct stat status {};
  if (lstat(folder.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    fail("look at", folder);
  }
  if (!S_ISDIR(status.st_mode)) {
    throw RunError(fmt::format("cannot write {}: it exists and is {}", folder,
                               S_ISLNK(status.st_mode) ? "a link; name the folder itself" : "not a folder"));
  }
  if (const std::optional<std::string> name = foreign_file(folder)) {
    throw RunError(fmt::format("cannot replace the folder {}: {} in it is no file of a checkpoint", folder, *name));
  }
}

}  // namespace

PublishedFolder::PublishedFolder(const std::string& folder, int64_t step) : folder_(without_slashes(folder)) {
  const size_t slash = folder_.rfind('/');
  const std::string name = slash == std::string::npos ? folder_ : folder_.substr(slash + 1);
  if (name.empty() || name == "." || name == "..") {
    throw RunError(fmt::format("cannot write a checkpoint to \"{}\": name a folder that can be renamed", folder));
  }
  old_ = folder_ + ".old";
  temporary_ = fmt::format("{}.tmp-{}", folder_, step);
}

void PublishedFolder::prepare() {
  check_replaceable(folder_);
  check_replaceable(old_);
  const std::string parent = parent_of(folder_);
  const std::string prefix = folder_.substr(folder_.rfind('/') + 1) + ".tmp-";
  for (const std::string& name : names_in(parent)) {
    const std::string left = (parent == "/" ? "" : parent) + "/" + name;
    if (starts_with(name, prefix) && is_number(name.substr(prefix.size())) && is_folder(left)) remove_checkpoint(left);
  }
  if (mkdir(temporary_.c_str(), 0777) != 0) fail("make the folder", temporary_);
}

void PublishedFolder::publish() {
  sync_folder(temporary_);
  // Without an index (an empty folder that somebody made) it is no checkpoint: rename replaces it.
  const bool replaces = exists(folder_ + "/" + kIndexName);
  if (replaces) {
    if (exists(old_)) remove_checkpoint(old_);
    rename_folder(folder_, old_);
  } else if (exists(folder_) && !names_in(folder_).empty()) {
    remove_checkpoint(folder_);  // half removed by hand: its index is gone
  }
  try {
    rename_folder(temporary_, folder_);
  } catch (const RunError&) {
    if (replaces) (void)std::rename(old_.c_str(), folder_.c_str());  // if not: the loader finds it under .old
    throw;
  }
  sync_folder(parent_of(folder_));
  if (exists(old_)) remove_checkpoint(old_);
}

void PublishedFolder::discard() noexcept {
  try {
    remove_checkpoint(temporary_);
  } catch (const std::exception&) {  // the next save tries again
  }
}

void check_publishable(const std::string& folder, const std::string& flag) {
  const std::string path = without_slashes(folder);
  if (exists(path) && !is_folder(path)) {
    throw UsageError(fmt::format("{} {}: a file stands there, a folder is needed", flag, path));
  }
  check_writable(path + ".tmp", flag);  // beside it, where the folder is made before it gets its name
}

std::string folder_to_load(const std::string& path) {
  const std::string folder = without_slashes(path), old = folder + ".old";
  return !exists(folder) && is_folder(old) ? old : folder;
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::string shard_file_name(int rank) { return fmt::format("shard-{:05}-model-00001-of-00001.safetensors", rank + 1); }

bool is_shard_file_name(const std::string& name) {
  constexpr std::string_view kEnd = ".safetensors";
  const auto fits = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '.'; };
  return starts_with(name, "shard-") && name.size() > kEnd.size() && name.size() <= 100 &&
         name.compare(name.size() - kEnd.size(), kEnd.size(), kEnd) == 0 &&
         std::all_of(name.begin(), name.end(), fits) && name.find("..") == std::string::npos;
}

}  // namespace mgp

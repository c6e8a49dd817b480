#include "common/atomic_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/error.hpp"

namespace mgp {
namespace {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string name_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string in_folder(const std::string& folder, const std::string& name) {
  return folder == "/" ? "/" + name : folder + "/" + name;
}

/// Whether the writer of a temporary file is gone. The lock decides, because a process id comes back (in containers
/// often the same one in each run). Only where the file system knows no locks the process id has to do.
bool is_abandoned(const std::string& path, pid_t pid) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return false;
  const bool free = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  const bool no_locks = !free && errno != EWOULDBLOCK && errno != EINTR;
  close(descriptor);
  if (no_locks) return pid != getpid() && kill(pid, 0) != 0 && errno == ESRCH;
  return free;
}

/// Removes what killed runs left of the same target.
void remove_abandoned(const std::string& folder, const std::string& prefix) {
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.size() <= prefix.size() || name.compare(0, prefix.size(), prefix) != 0) continue;
    const std::string digits = name.substr(prefix.size());
    if (digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string path = in_folder(folder, name);
    if (is_abandoned(path, static_cast<pid_t>(std::stol(digits)))) unlink(path.c_str());
  }
  closedir(directory);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  if (path_.empty()) throw RunError("cannot write a file without a name");
  const std::string name = name_of(path_);
  struct stat status {};
  if (name.empty() || name == "." || name == "..") {
    errno = EISDIR;
    fail("write");
  }
  if (lstat(path_.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) {
    char* resolved = realpath(path_.c_str(), nullptr);
    if (resolved == nullptr) fail("follow the link");
    target_ = resolved;
    std::free(resolved);
  }
  // Renaming over a device such as /dev/null would replace the device itself.
  if (stat(target_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    if (!S_ISDIR(status.st_mode)) throw RunError("cannot write " + path_ + ": it exists and is not a regular file");
    errno = EISDIR;
    fail("write");
  }

  const std::string folder = folder_of(target_);
  const std::string prefix = "." + name_of(target_) + ".tmp-";
  remove_abandoned(folder, prefix);
  const std::string temporary = in_folder(folder, prefix + std::to_string(getpid()));
  for (;;) {
    descriptor_ = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno == EINTR) continue;
    if (descriptor_ < 0 && errno == EEXIST) throw RunError("cannot write " + path_ + ": it is being written already");
    if (descriptor_ < 0) fail("create a file in the folder of");
    // Between open and flock another writer may take the new file for an abandoned one and remove it: then once more.
    while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EINTR) {
    }
    if (fstat(descriptor_, &status) == 0 && status.st_nlink == 1) break;
    close(descriptor_);
    descriptor_ = -1;
  }
  temporary_ = temporary;
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  // Removed before the lock goes with the descriptor, so that nobody sees it unlocked.
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (descriptor_ >= 0) close(descriptor_);
  temporary_.clear();
  descriptor_ = -1;
}

void AtomicFile::fail(const std::string& what) {
  const int reason = errno;
  discard();
  throw RunError("cannot " + what + " " + path_ + ": " + std::strerror(reason));
}

void AtomicFile::write(const void* data, size_t bytes) {
  if (descriptor_ < 0) throw RunError("cannot write " + path_ + ": the file is closed already");
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, from, std::min(bytes, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  if (descriptor_ < 0) throw RunError("cannot write " + path_ + ": the file is closed already");
  // Without the sync a power cut after the rename can leave an empty file under the good name.
  while (fsync(descriptor_) != 0) {
    if (errno != EINTR) fail("sync");
  }
  if (rename(temporary_.c_str(), target_.c_str()) != 0) fail("rename the finished file to");
  temporary_.clear();
  close(descriptor_);  // fsync has reported what could be reported
  descriptor_ = -1;

  const int folder = open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;  // a folder that may be written but not read: the file is there, its name may be lost
  const bool synced = fsync(folder) == 0 || errno == EINVAL || errno == ENOTSUP;  // some file systems cannot
  const int reason = errno;
  close(folder);
  if (!synced) {
    errno = reason;
    fail("sync the folder of");
  }
}

void check_writable(const std::string& path, const std::string& flag) {
  try {
    const AtomicFile probe(path);
  } catch (const RunError& error) {
    throw UsageError(flag + ": " + error.what());
  }
}

}  // namespace mgp

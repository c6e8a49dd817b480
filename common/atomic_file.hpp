// Files that are there whole or not at all: written to a temporary name, synced, renamed.
#pragma once

#include <cstddef>
#include <string>

namespace mgp {

/// A file being written. commit() syncs it, renames it over `path` and syncs the folder. Destroyed without commit, the
/// temporary file is removed and what stood at `path` is untouched. Throws RunError with path and errno text.
///
/// The temporary file lies in the same folder as `.<name>.tmp-<pid>` and is locked (flock) while its writer lives. One
/// that nobody holds was left by a run that was killed: the next writer of the same path removes it. A symbolic link at
/// `path` stays a link, the file that it names is replaced. Devices and folders are refused.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const std::string& what);
  void discard();

  std::string path_;       // as the caller named it, for messages
  std::string target_;     // symbolic links resolved
  std::string temporary_;  // "" once renamed or removed
  int descriptor_ = -1;
};

/// Throws UsageError naming the path, the reason and `flag` when a file could not be created at `path` (missing or
/// unwritable folder, path is a folder). Leaves nothing behind.
void check_writable(const std::string& path, const std::string& flag);

}  // namespace mgp

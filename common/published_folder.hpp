// Folders of files that are there whole or not at all: filled under a temporary name, then renamed.
#pragma once

#include <cstdint>
#include <string>

namespace mgp {

/// The file that makes a folder a checkpoint. It is written last and removed first.
inline constexpr const char* kIndexName = "index.json";

/// The folder of a sharded checkpoint while it is written. Every rank may make the object; rank 0 alone prepares,
/// publishes and discards. Folders cannot be renamed over each other, so publishing takes two renames:
///
///   <folder> -> <folder>.old,   <folder>.tmp-<step> -> <folder>,   then <folder>.old is removed
///
/// A kill between the two leaves the previous checkpoint under `.old` alone: folder_to_load() finds it there, and the
/// next save removes it. A kill at another moment leaves a whole `<folder>`.
///
/// Nothing but a checkpoint's own files is ever removed. One run at a time saves to a folder.
class PublishedFolder {
 public:
  /// Throws RunError for a path that names no folder that can be renamed ("", "/", "..").
  PublishedFolder(const std::string& folder, int64_t step);

  const std::string& folder() const { return folder_; }        ///< without slashes at the end
  const std::string& temporary() const { return temporary_; }  ///< "<folder>.tmp-<step>": files go here
  std::string file(const std::string& name) const { return temporary_ + "/" + name; }

  /// Removes what killed saves left and makes the temporary folder. Throws RunError with path and errno text, and for
  /// a `folder` that is something else than a checkpoint or an empty folder: it would be lost.
  void prepare();
  /// Makes the temporary folder durable and puts it in place of the one before. Throws RunError with path and errno
  /// text; the checkpoint before is then in place again.
  void publish();
  /// Removes the temporary folder. Says nothing if that fails: it is called where something has failed already.
  void discard() noexcept;

 private:
  std::string folder_, old_, temporary_;
};

/// Throws UsageError naming `flag`, the path and the reason when no folder can be published at `folder`: a file stands
/// there, or its parent is missing or cannot be written. Leaves nothing behind.
void check_publishable(const std::string& folder, const std::string& flag);

/// Where the checkpoint that was saved to `path` lies: `path`, or `path.old` where a kill left only that one.
std::string folder_to_load(const std::string& path);

/// Whether `path` is a folder (links are followed).
bool is_folder(const std::string& path);

/// The name of the file of a rank, "shard-00001-model-00001-of-00001.safetensors" for rank 0: as PyTorch names them.
std::string shard_file_name(int rank);
/// Whether `name` can be such a name: no path, nothing but letters, digits, '-' and '.'.
bool is_shard_file_name(const std::string& name);

}  // namespace mgp

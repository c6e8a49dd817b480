// A regular file that is read at given places, every place checked against the file's size first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mgp {

/// An open file whose content is not trusted. All complaints are a UsageError of one line that begins with
/// "FLAG PATH: ", so that a reader of a format only says what is wrong.
class InputFile {
 public:
  /// Throws UsageError with errno text; folders, devices and pipes are refused.
  InputFile(const std::string& path, const std::string& flag);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t size() const { return size_; }

  /// Reads exactly `bytes` bytes from `offset` into `to`. `what` names them should the file end too early.
  void read_at(uint64_t offset, void* to, size_t bytes, const std::string& what) const;

  [[noreturn]] void fail(const std::string& text) const;  ///< throws "FLAG PATH: text"
  [[noreturn]] void damaged(const std::string& text) const { fail("damaged: " + text); }

 private:
  std::string where_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

/// Text from an untrusted file for a message of one line: control characters escaped, long texts cut.
std::string printable(const std::string& text);

}  // namespace mgp

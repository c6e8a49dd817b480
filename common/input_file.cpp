#include "common/input_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.hpp"

namespace mgp {

InputFile::InputFile(const std::string& path, const std::string& flag) : where_(flag + " " + path + ": ") {
  if (path.empty()) throw UsageError(flag + ": the file name is empty");
  do {  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever
    descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail(std::strerror(errno));
  struct stat status {};
  const bool known = fstat(descriptor_, &status) == 0;
  const int reason = errno;
  if (!known || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    if (!known) fail(std::strerror(reason));
    fail(S_ISDIR(status.st_mode) ? "is a folder, not a file" : "is not a regular file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

InputFile::~InputFile() { close(descriptor_); }

void InputFile::fail(const std::string& text) const { throw UsageError(where_ + text); }

void InputFile::read_at(uint64_t offset, void* to, size_t bytes, const std::string& what) const {
  if (offset > size_ || bytes > size_ - offset) damaged(what + " ends after the end of the file");
  char* destination = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, destination, std::min(bytes, size_t{1} << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("cannot read " + what + ": " + std::strerror(errno));
    if (got == 0) damaged(what + " ends after the end of the file, which became shorter while it was read");
    destination += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

std::string printable(const std::string& text) {
  static const char kHex[] = "0123456789abcdef";
  constexpr size_t kLongest = 80;
  std::string out;
  for (const char c : text) {
    if (out.size() >= kLongest) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return out;
}

}  // namespace mgp

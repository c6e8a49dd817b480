// What the tests of file formats share: whole files, names in a folder, and the text of an error.
// System calls, not std::filesystem: LibTorch exports a copy of it that can crash (helpers.hpp).
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {

inline std::string operator/(const ScratchFolder& folder, const std::string& name) { return folder.file(name); }

inline std::vector<std::string> names_in(const ScratchFolder& folder) {
  std::vector<std::string> names;
  DIR* directory = opendir(folder.path().c_str());
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(directory);
  return names;
}

inline uint64_t size_of_file(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return static_cast<uint64_t>(status.st_size);
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::remove(path.c_str());  // cutting an old file short makes some file systems write to disk at once
  std::ofstream(path, std::ios::binary) << bytes;
}

/// The text of the `Error` that `call` throws, "" if it throws nothing. Other exceptions pass through and fail the
/// test.
template <typename Error, typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "not one line: " << error.what();
    return error.what();
  }
  return "";
}

inline testing::AssertionResult says(const std::string& message, const std::string& part) {
  if (message.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" is missing in: " << message;
}

/// MGP_... from the environment, "" if it is not set: tests/pytorch drives some cases of this binary that way.
inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace mgp

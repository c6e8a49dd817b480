// What several unit tests need.
#pragma once

#include <ftw.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace mgp {

/// Whether all `parts` are in `text`; says which is missing.
inline ::testing::AssertionResult contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "'" << part << "' is missing in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

/// A new folder that is removed at the end with all that is in it.
class ScratchFolder {
 public:
  ScratchFolder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base == nullptr ? "/tmp" : base) + "/mgp_test_XXXXXX";
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~ScratchFolder() {
    // Not std::filesystem::remove_all: LibTorch exports a copy of it that crashes.
    const auto remove_one = [](const char* path, const struct stat*, int, struct FTW*) { return std::remove(path); };
    nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace mgp

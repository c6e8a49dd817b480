// Files are there whole or not at all, whatever happens while they are written.
#include "common/atomic_file.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "tests/unit/files.hpp"

namespace mgp {
namespace {

void write_whole(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

/// Runs `body` in a child process; its return value is the exit code.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(AtomicFile, ReplacesOnlyOnCommit) {
  const ScratchFolder folder;
  const std::string path = folder / "model.pt";
  write_whole(path, "old");
  {
    AtomicFile file(path);
    file.write("new", 3);
    EXPECT_EQ(read_file(path), "old");
    EXPECT_EQ(names_in(folder).size(), 2u);
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names_in(folder).size(), 1u);
  write_whole(path, "new");
  EXPECT_EQ(read_file(path), "new");
  EXPECT_EQ(names_in(folder).size(), 1u);
}

TEST(AtomicFile, FollowsTheProcessUmask) {
  const ScratchFolder folder;
  const mode_t before = umask(027);
  write_whole(folder / "a", "x");
  umask(before);
  struct stat status {};
  ASSERT_EQ(stat((folder / "a").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0640u);
}

TEST(AtomicFile, RelativeNames) {
  const ScratchFolder folder;
  EXPECT_EQ(in_child([&] {
              if (chdir(folder.path().c_str()) != 0) return 1;
              write_whole("plain.pt", "x");
              return 0;
            }),
            0);
  EXPECT_EQ(read_file(folder / "plain.pt"), "x");
}

TEST(AtomicFile, LinksStayLinks) {
  const ScratchFolder folder;
  ASSERT_EQ(mkdir((folder / "disk").c_str(), 0700), 0);
  write_whole(folder / "disk/real.pt", "old");
  ASSERT_EQ(symlink("disk/real.pt", (folder / "latest.pt").c_str()), 0);
  write_whole(folder / "latest.pt", "new");
  struct stat status {};
  ASSERT_EQ(lstat((folder / "latest.pt").c_str(), &status), 0);
  EXPECT_TRUE(S_ISLNK(status.st_mode));
  EXPECT_EQ(read_file(folder / "disk/real.pt"), "new");
}

TEST(AtomicFile, RemovesWhatAKilledRunLeft) {
  const ScratchFolder folder;
  const std::string path = folder / "model.pt";
  ASSERT_EQ(in_child([&] {
              AtomicFile file(path);
              file.write("half", 4);
              return raise(SIGKILL);
            }),
            -SIGKILL);
  EXPECT_EQ(names_in(folder).size(), 1u);
  // A container often gives the next run the same process id.
  write_file(folder / (".model.pt.tmp-" + std::to_string(getpid())), "half");
  write_file(folder / ".other.pt.tmp-1", "of another file");
  write_file(folder / ".model.pt.tmp-notes", "not ours");
  write_whole(path, "whole");
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(names_in(folder).size(), 3u);
}

TEST(AtomicFile, LeavesAWriterThatLivesAlone) {
  const ScratchFolder folder;
  const std::string path = folder / "model.pt";
  AtomicFile file(path);
  EXPECT_TRUE(says(error_of<RunError>([&] { AtomicFile second(path); }), "is being written already"));
  EXPECT_EQ(in_child([&] {
              write_whole(path, "theirs");
              return 0;
            }),
            0);
  EXPECT_EQ(read_file(path), "theirs");
  file.write("mine", 4);
  file.commit();
  EXPECT_EQ(read_file(path), "mine");
}

// Trial B34: the error names path and reason, and the last good file is still there.
void expect_kept_when(const std::string& path, const char* reason) {
  const std::string much(1 << 20, 'x');
  const std::string text = error_of<RunError>([&] { write_whole(path, much); });
  EXPECT_TRUE(says(text, path) && says(text, reason)) << text;
  EXPECT_EQ(read_file(path), "old");
}

TEST(AtomicFile, AFileSizeLimitKeepsTheOldFile) {
  const ScratchFolder folder;
  const std::string path = folder / "model.pt";
  write_whole(path, "old");
  EXPECT_EQ(in_child([&] {
              signal(SIGXFSZ, SIG_IGN);
              const rlimit limit{256 << 10, 256 << 10};
              setrlimit(RLIMIT_FSIZE, &limit);
              expect_kept_when(path, "File too large");
              return testing::Test::HasFailure() ? 1 : 0;
            }),
            0);
  EXPECT_EQ(names_in(folder).size(), 1u);
}

TEST(AtomicFile, AFullDiskKeepsTheOldFile) {
  const ScratchFolder folder;
  constexpr int kNoRights = 77;
  const int code = in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=256k") != 0) {
      return kNoRights;
    }
    const std::string path = folder / "model.pt";
    write_whole(path, "old");
    expect_kept_when(path, "No space left on device");
    EXPECT_EQ(names_in(folder).size(), 1u);
    return testing::Test::HasFailure() ? 1 : 0;
  });
  if (code == kNoRights) GTEST_SKIP() << "mounting a small file system is not allowed here";
  EXPECT_EQ(code, 0);
}

TEST(AtomicFile, CheckWritableSaysWhy) {
  const ScratchFolder folder;
  const auto check = [](const std::string& path) {
    return error_of<UsageError>([&] { check_writable(path, "--save"); });
  };
  EXPECT_EQ(check(folder / "good.pt"), "");
  EXPECT_TRUE(names_in(folder).empty());
  EXPECT_TRUE(says(check(folder / "none/x.pt"), "No such file or directory"));
  EXPECT_TRUE(says(check(folder / "none/x.pt"), "--save"));
  EXPECT_TRUE(says(check(folder / "none/x.pt"), folder / "none/x.pt"));
  EXPECT_TRUE(says(check(folder.path()), "Is a directory"));
  EXPECT_TRUE(says(check(folder.path() + "/"), "Is a directory"));
  EXPECT_TRUE(says(check(""), "without a name"));
  EXPECT_TRUE(says(check("/dev/null"), "not a regular file"));
  EXPECT_TRUE(says(check("/proc/x.pt"), "/proc/x.pt"));
  EXPECT_TRUE(says(check(folder / std::string(300, 'x')), "name too long"));
  ASSERT_EQ(symlink("nowhere", (folder / "dangling").c_str()), 0);
  EXPECT_TRUE(says(check(folder / "dangling"), "No such file or directory"));
  write_file(folder / "file", "");
  EXPECT_TRUE(says(check(folder / "file/x.pt"), "Not a directory"));
  if (geteuid() != 0) {
    ASSERT_EQ(mkdir((folder / "locked").c_str(), 0500), 0);
    EXPECT_TRUE(says(check(folder / "locked/x.pt"), "Permission denied"));
  }
}

}  // namespace
}  // namespace mgp

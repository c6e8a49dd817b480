// A folder is replaced whole, whenever its writer is killed, and nothing that is not a checkpoint's is ever removed.
#include "common/published_folder.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "tests/unit/files.hpp"
#include "tests/unit/shard_folder.hpp"

namespace mgp {
namespace {

void write_marker(const std::string& folder, const std::string& text) {
  mkdir(folder.c_str(), 0777);
  write_file(folder + "/" + kIndexName, text);
}

TEST(PublishedFolder, ReplacesWhole) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "ckpt";
  for (const char* text : {"first", "second", "third"}) {
    PublishedFolder place(folder + "//", 7);
    EXPECT_EQ(place.temporary(), folder + ".tmp-7");
    place.prepare();
    write_file(place.file(kIndexName), text);
    place.publish();
    EXPECT_EQ(read_file(folder + "/" + kIndexName), text);
    EXPECT_EQ(names_in(scratch).size(), 1u);
  }
  PublishedFolder given_up(folder, 8);
  given_up.prepare();
  write_file(given_up.file(shard_file_name(0)), "half");
  given_up.discard();
  EXPECT_EQ(read_file(folder + "/" + kIndexName), "third");
  EXPECT_EQ(names_in(scratch).size(), 1u);
  given_up.discard();  // nothing there: nothing happens
}

TEST(PublishedFolder, AKillAtAnyMomentLeavesACheckpoint) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "ckpt", old = folder + ".old";
  // Killed while the files were written: the temporary folder has no index and is not looked at.
  write_to(folder, good_folder());
  mkdir((folder + ".tmp-9").c_str(), 0777);
  write_file(folder + ".tmp-9/" + shard_file_name(0), "half");
  write_file(folder + ".tmp-9/." + shard_file_name(1) + ".tmp-4711", "half");
  expect_good(load_sharded(folder));
  EXPECT_TRUE(says(load_error(folder + ".tmp-9"), "has no index.json"));
  // Killed between the two renames: the one before is found.
  EXPECT_EQ(std::rename(folder.c_str(), old.c_str()), 0);
  EXPECT_TRUE(is_sharded_checkpoint(folder));
  expect_good(load_sharded(folder));
  // The next save removes what both have left.
  PublishedFolder place(folder, 10);
  place.prepare();
  write_marker(place.temporary(), "new");
  expect_good(load_sharded(folder));
  place.publish();
  EXPECT_EQ(names_in(scratch), std::vector<std::string>{"ckpt"});
  EXPECT_EQ(read_file(folder + "/" + kIndexName), "new");
  // Killed before the old one was removed: the new one counts.
  write_marker(old, "old");
  EXPECT_EQ(folder_to_load(folder), folder);
  PublishedFolder again(folder, 11);
  again.prepare();
  write_marker(again.temporary(), "newer");
  again.publish();
  EXPECT_EQ(names_in(scratch), std::vector<std::string>{"ckpt"});
  EXPECT_EQ(read_file(folder + "/" + kIndexName), "newer");
}

// Real kills: a child saves again and again and is killed at some moment, then the next child goes on from what it
// left.
TEST(PublishedFolder, KilledSavesLeaveOneThatLoads) {
  const ScratchFolder scratch;
  const std::string folder = scratch / "ckpt";
  write_to(folder, good_folder());
  int from_old = 0;
  for (int kill_number = 0; kill_number < 60; ++kill_number) {
    const pid_t child = fork();
    if (child == 0) {
      // Bytes alone: after a fork LibTorch's threads are gone.
      const std::string from = folder_to_load(folder);
      std::map<std::string, std::string> files;
      for (const std::string& name : {shard_file_name(0), shard_file_name(1), std::string(kIndexName)}) {
        files[name] = read_file(from + "/" + name);
      }
      for (int step = 1;; ++step) {
        PublishedFolder place(folder, step);
        place.prepare();
        for (const std::string& name : {shard_file_name(0), shard_file_name(1), std::string(kIndexName)}) {
          write_file(place.file(name), files[name]);
        }
        place.publish();
      }
    }
    usleep(static_cast<useconds_t>(3000 + 137 * kill_number));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);  // else the child met an error
    from_old += folder_to_load(folder) != folder ? 1 : 0;
    expect_good(load_sharded(folder));
  }
  std::printf("%d of 60 kills fell between the two renames\n", from_old);
  PublishedFolder last(folder, 1);
  last.prepare();
  write_marker(last.temporary(), "last");
  last.publish();
  EXPECT_EQ(names_in(scratch), std::vector<std::string>{"ckpt"});
}

TEST(PublishedFolder, NothingForeignIsRemoved) {
  const ScratchFolder scratch;
  const auto complaint = [&](const std::string& name) {
    return error_of<RunError>([&] { PublishedFolder(scratch / name, 1).prepare(); });
  };
  write_marker(scratch / "mixed", "index");
  write_file(scratch / "mixed/notes.txt", "mine");
  EXPECT_TRUE(says(complaint("mixed"), "notes.txt in it is no file of a checkpoint"));
  EXPECT_EQ(read_file(scratch / "mixed/notes.txt"), "mine");
  EXPECT_EQ(read_file(scratch / "mixed/index.json"), "index");
  write_file(scratch / "file", "mine");
  EXPECT_TRUE(says(complaint("file"), "it exists and is not a folder"));
  EXPECT_EQ(symlink((scratch / "mixed").c_str(), (scratch / "link").c_str()), 0);
  EXPECT_TRUE(says(complaint("link"), "it exists and is a link"));
  mkdir((scratch / "left.tmp-3").c_str(), 0777);
  write_file(scratch / "left.tmp-3/notes.txt", "mine");
  EXPECT_TRUE(says(complaint("left"), "cannot remove " + scratch.path() + "/left.tmp-3: Directory not empty"));
  EXPECT_EQ(read_file(scratch / "left.tmp-3/notes.txt"), "mine");
  EXPECT_TRUE(says(complaint("none/ckpt"), "none: No such file or directory"));
  for (const char* path : {"", "/", "..", "a/..", "a/."}) {
    EXPECT_TRUE(says(error_of<RunError>([&] { PublishedFolder(path, 1); }), "name a folder that can be renamed"));
  }
  mkdir((scratch / "empty").c_str(), 0777);  // somebody made it beforehand
  PublishedFolder place(scratch / "empty", 1);
  place.prepare();
  write_marker(place.temporary(), "new");
  place.publish();
  EXPECT_EQ(read_file(scratch / "empty/index.json"), "new");
}

}  // namespace
}  // namespace mgp

// Meeting over the store: several ranks as threads of this process, each with a connection of its own (trials B62,
// B72).
#include "common/rendezvous.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <thread>

#include "common/error.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

using namespace std::chrono_literals;

/// A socket that listens on loopback and never says a word.
class SilentListener {
 public:
  SilentListener() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, 8), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  ~SilentListener() { close(fd_); }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

Launch local_launch(int rank, int size, const std::string& file = "") {
  Launch launch;
  launch.rank = launch.local_rank = rank;
  launch.world_size = launch.local_size = size;
  launch.host = "testhost";
  launch.master_addr = "127.0.0.1";
  launch.rendezvous_file = file;
  return launch;
}

/// Runs `body` for each of `ranks` in a thread of its own; returns what each threw, "" if nothing.
std::vector<std::string> run_ranks(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  std::vector<std::future<std::string>> results;
  for (const int rank : ranks) {
    results.push_back(std::async(std::launch::async, [rank, &body]() -> std::string {
      try {
        body(rank);
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    }));
  }
  std::vector<std::string> errors;
  for (auto& result : results) errors.push_back(result.get());
  return errors;
}

TEST(Rendezvous, ThreeRanksOverAFile) {
  const ScratchFolder folder;
  std::vector<std::vector<std::string>> seen(3);
  std::vector<int64_t> counts(3);
  const auto errors = run_ranks({0, 1, 2}, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(100ms);  // the others poll a file that is not there yet
    const auto meeting = Rendezvous::meet(local_launch(rank, 3, folder.file("address")), 20s);
    EXPECT_EQ(meeting->rank(), rank);
    EXPECT_EQ(meeting->size(), 3);
    EXPECT_TRUE(contains(meeting->address(), {"127.0.0.1:"}));
    seen[static_cast<size_t>(rank)] = meeting->exchange("names", "rank " + std::to_string(rank), 10s);
    counts[static_cast<size_t>(rank)] = meeting->add("counter", rank + 1);

    if (rank == 1) meeting->set("note", std::string("two\0parts", 9));
    EXPECT_EQ(meeting->get("note", 10s), std::string("two\0parts", 9)) << "values are bytes";
    EXPECT_FALSE(meeting->peek("nobody sets this"));
    EXPECT_EQ(meeting->peek("note").value_or("").size(), 9U);

    const auto watcher = meeting->second_client();
    EXPECT_EQ(watcher->get("note", 10s).size(), 9U);
    meeting->exchange("before the erase", "", 10s);
    if (rank == 2) watcher->erase("note");
    meeting->exchange("after the erase", "", 10s);
    EXPECT_FALSE(watcher->peek("note"));
    meeting->goodbye();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", "", ""}));
  for (const auto& names : seen) EXPECT_EQ(names, (std::vector<std::string>{"rank 0", "rank 1", "rank 2"}));
  EXPECT_EQ(*std::max_element(counts.begin(), counts.end()), 6);
  std::ifstream file(folder.file("address"));
  std::string line;
  std::getline(file, line);
  EXPECT_TRUE(contains(line, {"127.0.0.1:"}));
}

TEST(Rendezvous, TwoAtOnceWithoutAPortDoNotMeet) {
  const ScratchFolder folder;
  std::vector<std::string> answers(4);
  const auto errors = run_ranks({0, 1, 2, 3}, [&](int i) {
    const std::string run = i < 2 ? "first" : "second";
    const auto meeting = Rendezvous::meet(local_launch(i % 2, 2, folder.file(run)), 20s);
    answers[static_cast<size_t>(i)] = meeting->exchange("run", run, 10s)[static_cast<size_t>(1 - i % 2)];
    meeting->goodbye();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", "", "", ""}));
  EXPECT_EQ(answers, (std::vector<std::string>{"first", "first", "second", "second"}));
}

TEST(Rendezvous, AddressToldByAnotherWay) {
  std::promise<std::string> promise;  // stands for MPI_Bcast
  auto address = promise.get_future().share();
  const auto errors = run_ranks({0, 1}, [&](int rank) {
    const auto tell_all = [&](const std::string& mine) {
      if (rank == 0) promise.set_value(mine);
      return address.get();
    };
    const auto meeting = Rendezvous::meet(local_launch(rank, 2), 20s, tell_all);
    EXPECT_EQ(meeting->address(), address.get());
    meeting->goodbye();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(Rendezvous, SeveralHostsBindAllInterfaces) {
  const ScratchFolder folder;
  const auto errors = run_ranks({0, 1}, [&](int rank) {
    Launch launch = local_launch(rank, 2, folder.file("address"));
    launch.local_size = 1;
    launch.master_addr = "localhost";
    const auto meeting = Rendezvous::meet(launch, 20s);
    EXPECT_TRUE(contains(meeting->address(), {"localhost:"}));
    meeting->goodbye();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(Rendezvous, TakenPortIsOneClearLine) {
  const SilentListener taken;
  const ScratchFolder folder;
  const auto start = std::chrono::steady_clock::now();
  bool rank_0_tells = false;
  const auto errors = run_ranks({0, 1}, [&](int rank) {
    Launch launch = local_launch(rank, 2, folder.file("address"));
    launch.master_port = taken.port();
    try {
      Rendezvous::meet(launch, 20s);
    } catch (const UsageError& error) {
      if (rank == 0) rank_0_tells = error.every_rank();
      throw;
    }
  });
  const std::string where = "127.0.0.1:" + std::to_string(taken.port());
  for (const std::string& line : errors) {
    EXPECT_TRUE(contains(line, {where + " is taken", "--master-port", "MASTER_PORT"}));
  }
  EXPECT_TRUE(rank_0_tells);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
}

TEST(Rendezvous, NoWayToMeet) {
  const auto line = [](const Launch& launch) { return run_ranks({0}, [&](int) { Rendezvous::meet(launch, 1s); })[0]; };
  EXPECT_TRUE(contains(line(local_launch(0, 2)), {"MASTER_PORT is not set"}));
  EXPECT_TRUE(contains(line(local_launch(1, 2)), {"MASTER_PORT is not set"}));
  Launch far = local_launch(1, 4);
  far.local_size = 2;
  far.master_addr = "";
  far.master_port = 29500;
  EXPECT_TRUE(contains(line(far), {"MASTER_ADDR is not set", "4 ranks"}));
  far.master_addr = "no-such-host.invalid";
  EXPECT_TRUE(contains(line(far), {"rank 1", "no-such-host.invalid:29500"}));
  EXPECT_TRUE(contains(line(local_launch(0, 2, "/no/such/folder/address")), {"/no/such/folder/address"}));
}

TEST(Rendezvous, LateRankIsNamedOnAllRanks) {
  const ScratchFolder folder;
  const auto errors =
      run_ranks({0, 2}, [&](int rank) { Rendezvous::meet(local_launch(rank, 4, folder.file("a")), 1s); });
  for (const std::string& line : errors) EXPECT_TRUE(contains(line, {"4 ranks: came 0, 2; missing 1, 3"}));
}

TEST(Rendezvous, NobodyAtTheAddress) {
  int port = 0;
  {
    const SilentListener gone;
    port = gone.port();
  }
  Launch launch = local_launch(1, 2);
  launch.master_port = port;
  const auto errors = run_ranks({1}, [&](int) { Rendezvous::meet(launch, 1s); });
  EXPECT_TRUE(contains(errors[0], {"rank 1 (testhost) found no rank 0", std::to_string(port), "Connection refused"}));
}

TEST(Rendezvous, AnotherProgramAtTheAddress) {
  const SilentListener other;
  Launch launch = local_launch(1, 2);
  launch.master_port = other.port();
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks({1}, [&](int) { Rendezvous::meet(launch, 2s); });
  EXPECT_TRUE(contains(errors[0], {"not as the store of this run"}));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST(Rendezvous, TheSameRankTwice) {
  const ScratchFolder folder;
  const auto errors = run_ranks({0, 1, 1}, [&](int rank) {
    const auto meeting = Rendezvous::meet(local_launch(rank, 2, folder.file("a")), 5s);
    meeting->goodbye();
  });
  EXPECT_TRUE(contains(errors[1] + errors[2], {"two processes came to"}));
}

TEST(Rendezvous, WaitsAreBoundedAndNameWhatIsMissing) {
  const ScratchFolder folder;
  std::vector<std::string> lines(3);
  const auto errors = run_ranks({0, 1, 2}, [&](int rank) {
    const auto meeting = Rendezvous::meet(local_launch(rank, 3, folder.file("a")), 20s);
    if (rank == 0) {
      EXPECT_THROW(meeting->get("never", 100ms), RunError);
      try {
        meeting->exchange("half", "x", 300ms);
      } catch (const RunError& error) {
        lines[0] = error.what();
      }
    }
    if (rank == 2) meeting->exchange("other", "x", 1ms);
  });
  EXPECT_TRUE(contains(lines[0], {"'half'", "nothing from rank 1, 2"}));
  EXPECT_TRUE(contains(errors[2], {"'other'"}));
}

TEST(Rendezvous, LostStoreIsOneLine) {
  const ScratchFolder folder;
  std::promise<void> left;
  const auto errors = run_ranks({0, 1}, [&](int rank) {
    auto meeting = Rendezvous::meet(local_launch(rank, 2, folder.file("a")), 20s);
    meeting->exchange("both here", "", 10s);
    if (rank == 0) {
      meeting.reset();
      left.set_value();
    } else {
      left.get_future().wait();
      meeting->goodbye();  // never throws
      meeting->get("anything", 5s);
    }
  });
  EXPECT_TRUE(contains(errors[1], {"lost the store at 127.0.0.1:", "has rank 0 ended?"}));
  EXPECT_EQ(errors[1].find('\n'), std::string::npos);
}

TEST(Rendezvous, AgentStoreMakesEveryRankAClient) {
  // A world of one plays torchrun's agent: it serves, and knows nothing of the ranks.
  const ScratchFolder folder;
  const auto agent = Rendezvous::meet(local_launch(0, 1, folder.file("agent")), 10s);
  const int port = std::stoi(agent->address().substr(agent->address().rfind(':') + 1));
  for (const char* attempt : {"job/0", "job/1"}) {  // the second does not see the keys of the first
    std::vector<std::string> stale(2);
    const auto errors = run_ranks({0, 1}, [&](int rank) {
      Launch launch = local_launch(rank, 2);
      launch.agent_store = true;
      launch.master_addr = "no-such-host.invalid";  // containers often cannot resolve their own name
      launch.master_port = port;
      launch.store_prefix = attempt;
      const auto meeting = Rendezvous::meet(launch, 20s);
      stale[static_cast<size_t>(rank)] = meeting->peek("id").value_or("none");
      meeting->exchange("looked", "", 10s);
      meeting->set("id", attempt);
      meeting->goodbye();
    });
    EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
    EXPECT_EQ(stale, (std::vector<std::string>{"none", "none"}));
  }
}

}  // namespace
}  // namespace mgp

// Calls as an observer sees them, and the arrows between ranks in a trace.
#include <nlohmann/json.hpp>

#include "common/trace.hpp"
#include "tests/multi_rank/world.hpp"

namespace {

using mgp::ReduceOp;
using namespace mgp_test;

TEST(Trace, EveryCallIsShownAndEveryMessageHasAnArrow) {
  const int rank = world().rank();
  const int size = world().size();
  mgp::Trace trace(rank, world().device());
  std::vector<std::string> seen;
  world().observe([&](const mgp::PastCall& call) {
    seen.push_back(call.description);
    trace.communication(call);
  });
  const auto options = at::TensorOptions().dtype(at::kFloat).device(world().device());
  const at::Tensor x = at::ones({1000}, options);
  world().all_reduce(x, ReduceOp::sum, {"x"}).wait();
  constexpr int kRounds = 3;
  for (int round = 0; round < kRounds; ++round) {  // a ring: with two ranks both ways go between the same pair
    const at::Tensor in = at::empty({500}, options);
    mgp::CommGroup group(world());
    const mgp::Work sent = world().send(x.narrow(0, 0, 500), (rank + 1) % size, {"to the next"});
    const mgp::Work received = world().recv(in, (rank + size - 1) % size, {"from the one before"});
    group.finish().wait();
  }
  world().barrier("all have come");  // every earlier call is finished here, and shown
  world().observe(nullptr);
  ASSERT_GE(seen.size(), 1U + kRounds);
  EXPECT_NE(seen[0].find("all_reduce 'x'"), std::string::npos) << seen[0];

  const std::vector<int64_t> offsets = mgp::clock_offsets(world());
  EXPECT_EQ(offsets, std::vector<int64_t>(static_cast<size_t>(size), 0));  // one host
  const std::vector<std::string> ranks = world().gather_text("trace", trace.serialize());
  if (rank != 0) return;
  const std::string file =
      mgp::trace_file(ranks, std::vector<std::string>(static_cast<size_t>(size), "a rank"), offsets);
  const nlohmann::json whole = nlohmann::json::parse(file);
  std::map<std::string, double> sends;
  std::map<std::string, double> receives;
  for (const nlohmann::json& event : whole.at("traceEvents")) {
    if (event.at("ph") == "s") sends[event.at("id")] = event.at("ts");
    if (event.at("ph") == "f") receives[event.at("id")] = event.at("ts");
  }
  EXPECT_EQ(sends.size(), static_cast<size_t>(kRounds * size));
  ASSERT_EQ(receives.size(), sends.size());
  for (const auto& [id, sent_at] : sends) EXPECT_GE(receives.at(id), sent_at) << id;
}

}  // namespace

// The trace on the host's clock: times, rows, arrows, the limit, several ranks in one file.
#include "common/trace.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "common/error.hpp"

namespace mgp {
namespace {

using nlohmann::json;

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
/// A mark that is later than the one before.
Moment now() {
  pause_ms(1);
  return Moment::record(at::kCPU);
}

/// The events of a kind.
std::vector<json> events(const std::string& file, const std::string& kind) {
  std::vector<json> found;
  const json whole = json::parse(file);
  for (const json& event : whole.at("traceEvents")) {
    if (event.at("ph") == kind) found.push_back(event);
  }
  return found;
}

PastCall message(int from, int to, int64_t number, bool sent, const Moment& began, const Moment& ended) {
  PastCall call;
  call.group = "pp";
  call.description = sent ? "pp send 'x'" : "pp recv 'x'";
  call.bytes = 12;
  call.messages = {{"world/pp.0", from, to, number, sent}};
  call.began = began;
  call.ended = ended;
  return call;
}

TEST(Trace, TimesAreThoseOfTheMonotonicClock) {
  Trace trace(0, at::kCPU);
  const Moment a = now();
  pause_ms(20);
  const Moment b = now();
  trace.span("step", "step 1", a, b);
  trace.resolve();  // measured from another base mark from here on
  pause_ms(10);
  const Moment c = now();
  trace.span("step", "step \"2\" \xC3\xA9", b, c);
  trace.counter("memory", b, 5e9);
  const std::string file = trace_file({trace.serialize()}, {"rank 0"}, {0});
  const std::vector<json> spans = events(file, "X");
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].at("ts"), 0.0);
  EXPECT_NEAR(spans[0].at("dur").get<double>(), 1000.0 * Moment::milliseconds(a, b), 0.3);
  EXPECT_NEAR(spans[1].at("ts").get<double>(), spans[0].at("dur").get<double>(), 0.3);
  EXPECT_NEAR(spans[1].at("dur").get<double>(), 1000.0 * Moment::milliseconds(b, c), 0.3);
  EXPECT_EQ(spans[1].at("name"), "step \"2\" \xC3\xA9");
  EXPECT_EQ(spans[0].at("tid"), spans[1].at("tid"));
  ASSERT_EQ(events(file, "C").size(), 1U);
  EXPECT_EQ(events(file, "C")[0].at("args").at("value"), 5e9);
}

TEST(Trace, RowsThatOverlapAreTakenApart) {
  Trace trace(0, at::kCPU);
  const Moment a = now(), b = now(), c = now(), d = now();
  trace.span("communication world", "first", a, c);
  trace.span("communication world", "second", b, d);
  trace.span("communication world", "third", c, d);
  trace.span("compute", "forward", a, b);
  const std::string file = trace_file({trace.serialize()}, {"rank 0"}, {0});
  std::vector<std::string> rows;
  for (const json& event : events(file, "M")) {
    if (event.at("name") == "thread_name") rows.push_back(event.at("args").at("name"));
  }
  EXPECT_EQ(rows, (std::vector<std::string>{"compute", "communication world", "communication world (2)"}));
  for (const json& span : events(file, "X")) {
    const std::map<std::string, int> thread = {{"forward", 0}, {"first", 1}, {"second", 2}, {"third", 1}};
    EXPECT_EQ(span.at("tid"), thread.at(span.at("name"))) << span;
  }
}

TEST(Trace, ArrowsFindTheirEndsOnAnotherRank) {
  Trace zero(0, at::kCPU);
  Trace one(1, at::kCPU);
  const Moment a = now(), b = now(), c = now(), d = now();
  zero.communication(message(0, 1, 0, true, a, b));
  zero.communication(message(0, 1, 1, true, b, c));
  zero.communication(message(1, 0, 0, false, c, d));
  one.communication(message(0, 1, 1, false, c, d));  // finished in another order
  one.communication(message(0, 1, 0, false, b, c));
  const std::string file = trace_file({zero.serialize(), one.serialize()}, {"rank 0", "rank 1"}, {0, 0});
  // The message from 1 to 0 has one end alone: no arrow.
  ASSERT_EQ(events(file, "s").size(), 2U);
  ASSERT_EQ(events(file, "f").size(), 2U);
  for (const json& end : events(file, "f")) {
    EXPECT_EQ(end.at("pid"), 1);
    EXPECT_EQ(end.at("bp"), "e");
  }
  EXPECT_EQ(events(file, "s")[0].at("id"), "world/pp.0 0>1 0");
  EXPECT_LT(events(file, "f")[0].at("ts").get<double>(), events(file, "f")[1].at("ts").get<double>());
  EXPECT_EQ(events(file, "X")[0].at("args").at("bytes"), 12);
}

TEST(Trace, ClocksOfOtherHostsAreMovedBack) {
  const std::string zero =
      R"({"rank":0,"words":["step","a"],"spans":[[0,1,1000,2000,0]],"values":[],"messages":[],"dropped":0})";
  const std::string one =
      R"({"rank":1,"words":["step","b"],"spans":[[0,1,501500,502500,0]],"values":[[0,501600,7]],"messages":[],"dropped":3})";
  const std::string file = trace_file({zero, one}, {"x", "y"}, {0, 500000});
  const std::vector<json> spans = events(file, "X");
  EXPECT_EQ(spans[1].at("ts"), 0.5);
  EXPECT_EQ(spans[1].at("dur"), 1.0);
  EXPECT_EQ(events(file, "C")[0].at("ts"), 0.5);  // 600 ns, in eighths of a microsecond
  EXPECT_EQ(json::parse(file).at("otherData").at("spans beyond the limit, by rank").at("1"), 3);
}

TEST(Trace, ALongRunKeepsTheFirstSpansAndCountsTheRest) {
  Trace trace(0, at::kCPU);
  const Moment a = now(), b = now();
  for (int64_t i = 0; i < Trace::kSpanLimit + 7; ++i) {
    trace.span("compute", i % 3 == 0 ? "forward" : "a phase with a long name", a, b);
    trace.counter("memory allocated, bytes", a, 1e11 + static_cast<double>(i));
  }
  const std::string text = trace.serialize();
  EXPECT_LT(text.size(), 2U << 20);
  const json object = json::parse(text);
  EXPECT_EQ(object.at("spans").size(), static_cast<size_t>(Trace::kSpanLimit));
  EXPECT_EQ(object.at("dropped"), 7);
}

TEST(Trace, NothingAndNonsense) {
  Trace trace(0, at::kCPU);
  EXPECT_TRUE(events(trace_file({trace.serialize()}, {"rank 0"}, {0}), "X").empty());
  EXPECT_THROW(trace_file({"{}"}, {"rank 0"}, {0}), RunError);
  EXPECT_THROW(trace_file({"no json"}, {"rank 0"}, {0}), RunError);
}

}  // namespace
}  // namespace mgp

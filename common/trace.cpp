#include "common/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "common/error.hpp"

namespace mgp {
namespace {

using nlohmann::json;

double monotonic_ns() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// ── one rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Trace::Trace(int rank, at::Device device) : rank_(rank), device_(device) { base_of(device); }

size_t Trace::base_of(at::Device device) {
  for (size_t i = 0; i < bases_.size(); ++i) {
    if (bases_[i].device == device) return i;
  }
  const Moment mark = Moment::record(device);
  mark.synchronize();
  bases_.push_back({device, mark, monotonic_ns()});
  return bases_.size() - 1;
}

int64_t Trace::word(const std::string& text) {
  const auto [entry, fresh] = index_of_.emplace(text, static_cast<int64_t>(words_.size()));
  if (fresh) words_.push_back(text);
  return entry->second;
}

void Trace::add(const std::string& row, const std::string& name, const Moment& began, const Moment& ended,
                int64_t bytes, std::vector<PastCall::Message> messages, at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<int64_t>(spans_.size()) >= kSpanLimit) {
    ++dropped_;
    return;
  }
  spans_.push_back({word(row), word(name), base_of(device), began, ended, 0, 0, bytes, std::move(messages)});
}

void Trace::span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended) {
  add(row, name, began, ended, 0, {}, device_);
}

void Trace::span(const std::string& row, const std::string& name, const Moment& began, const Moment& ended,
                 at::Device device) {
  add(row, name, began, ended, 0, {}, device);
}

void Trace::communication(const PastCall& call) {
  add("communication " + call.group, call.description, call.began, call.ended, call.bytes, call.messages, device_);
}

void Trace::counter(const std::string& track, const Moment& at, double value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A number for each phase, and phases are limited as spans are.
  if (static_cast<int64_t>(values_.size()) < kSpanLimit) values_.push_back({word(track), at, 0, value});
}

int64_t Trace::nanoseconds(const Base& base, const Moment& mark) {
  return std::llround(base.ns + 1e6 * Moment::milliseconds(base.mark, mark));
}

void Trace::resolve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  resolve_locked();
}

void Trace::resolve_locked() {
  for (; resolved_ < spans_.size(); ++resolved_) {
    Span& span = spans_[resolved_];
    span.began_ns = nanoseconds(bases_[span.base], span.began);
    // Two streams: the host may have queued the end before the begin was reached. No span ends before it begins.
    span.ended_ns = std::max(span.began_ns, nanoseconds(bases_[span.base], span.ended));
    span.began = span.ended = Moment();  // a CUDA event each
  }
  for (; resolved_values_ < values_.size(); ++resolved_values_) {
    Value& value = values_[resolved_values_];
    value.at_ns = nanoseconds(bases_.front(), value.at);
    value.at = Moment();
  }
  // CUDA tells differences as fp32 milliseconds: after 100 s their last bit is 8 us. So they are taken from near by.
  for (Base& base : bases_) {
    const Moment now = Moment::record(base.device);
    base.ns += 1e6 * Moment::milliseconds(base.mark, now);
    base.mark = now;
  }
}

std::string Trace::serialize() {
  const std::lock_guard<std::mutex> lock(mutex_);
  resolve_locked();
  json spans = json::array();
  json messages = json::array();
  for (const Span& span : spans_) {
    for (const PastCall::Message& m : span.messages) {
      messages.push_back({spans.size(), m.group_id, m.from, m.to, m.number, m.sent});
    }
    spans.push_back({span.row, span.name, span.began_ns, span.ended_ns, span.bytes});
  }
  json values = json::array();
  for (const Value& value : values_) values.push_back({value.track, value.at_ns, value.value});
  const json object = {{"rank", rank_},
                       {"words", words_},
                       {"spans", std::move(spans)},
                       {"values", std::move(values)},
                       {"messages", std::move(messages)},
                       {"dropped", dropped_}};
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::vector<int64_t> clock_offsets(Communicator& world) {
  world.barrier("clocks");
  const auto mine = static_cast<int64_t>(monotonic_ns());
  std::vector<int64_t> offsets;
  int64_t first = 0;
  for (const std::string& text : world.gather_text("clocks", std::to_string(mine))) {
    const size_t rank = offsets.size();
    const int64_t clock = std::stoll(text);
    if (rank == 0) first = clock;
    offsets.push_back(world.devices()[rank].host == world.devices()[0].host ? 0 : clock - first);
  }
  return offsets;
}

// ── the file of all ranks ─────────────────────────────────────────────────────────────────────────────────────────────

namespace {

/// One span of the file.
struct Placed {
  size_t rank = 0, index = 0;  ///< index into the rank's "spans"
  std::string row, name;
  int64_t began_ns = 0, ended_ns = 0, bytes = 0;
  int64_t thread = 0;
};

/// Nanoseconds since the earliest event as microseconds, in eighths: exact in binary. Perfetto multiplies by 1000 and cuts
/// off; of 1.001 it makes 1000 ns, and a span that ends with its parent would stick out of it and be dropped.
double microseconds(int64_t ns) { return static_cast<double>(ns / 125) / 8.0; }

/// The order of the rows of a rank.
int row_order(const std::string& row) { return row == "step" ? 0 : row == "compute" ? 1 : 2; }

/// Gives each span of one rank a thread: the row's own, or another one of the row while that is taken. Returns the names of
/// the threads.
std::vector<std::string> assign_threads(std::vector<Placed*> spans) {
  std::sort(spans.begin(), spans.end(), [](const Placed* a, const Placed* b) {
    return std::tuple(row_order(a->row), a->row, a->began_ns, a->index) <
           std::tuple(row_order(b->row), b->row, b->began_ns, b->index);
  });
  std::vector<std::string> names;
  std::vector<int64_t> free_from;  // of each thread
  size_t first = 0;                // thread of the current row
  for (size_t i = 0; i < spans.size(); ++i) {
    Placed& span = *spans[i];
    if (i == 0 || span.row != spans[i - 1]->row) first = names.size();
    size_t thread = first;
    while (thread < names.size() && free_from[thread] > span.began_ns) ++thread;
    if (thread == names.size()) {
      names.push_back(thread == first ? span.row : fmt::format("{} ({})", span.row, thread - first + 1));
      free_from.push_back(0);
    }
    free_from[thread] = span.ended_ns;
    span.thread = static_cast<int64_t>(thread);
  }
  return names;
}

/// Both ends of one message.
struct Arrow {
  const Placed* send = nullptr;
  const Placed* receive = nullptr;
};

}  // namespace

std::string trace_file(const std::vector<std::string>& ranks, const std::vector<std::string>& process_names,
                       const std::vector<int64_t>& offsets_ns) {
  std::vector<json> parts;
  std::vector<std::vector<Placed>> spans(ranks.size());
  json events = json::array();
  json dropped = json::object();
  int64_t earliest = std::numeric_limits<int64_t>::max();
  try {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      parts.push_back(json::parse(ranks[rank]));
      const json& words = parts.back().at("words");
      for (const json& s : parts.back().at("spans")) {
        spans[rank].push_back({rank, spans[rank].size(), words.at(s.at(0).get<size_t>()),
                               words.at(s.at(1).get<size_t>()), s.at(2).get<int64_t>() - offsets_ns.at(rank),
                               s.at(3).get<int64_t>() - offsets_ns.at(rank), s.at(4).get<int64_t>()});
        earliest = std::min(earliest, spans[rank].back().began_ns);
      }
      for (const json& v : parts.back().at("values")) {
        earliest = std::min(earliest, v.at(1).get<int64_t>() - offsets_ns.at(rank));
      }
    }

    std::map<std::string, Arrow> arrows;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const json pid = rank;
      events.push_back(
          {{"ph", "M"}, {"pid", pid}, {"name", "process_name"}, {"args", {{"name", process_names.at(rank)}}}});
      events.push_back({{"ph", "M"}, {"pid", pid}, {"name", "process_sort_index"}, {"args", {{"sort_index", rank}}}});
      std::vector<Placed*> mine;
      for (Placed& span : spans[rank]) mine.push_back(&span);
      const std::vector<std::string> threads = assign_threads(mine);
      for (size_t tid = 0; tid < threads.size(); ++tid) {
        events.push_back(
            {{"ph", "M"}, {"pid", pid}, {"tid", tid}, {"name", "thread_name"}, {"args", {{"name", threads[tid]}}}});
        events.push_back(
            {{"ph", "M"}, {"pid", pid}, {"tid", tid}, {"name", "thread_sort_index"}, {"args", {{"sort_index", tid}}}});
      }
      for (const Placed& span : spans[rank]) {
        json event = {{"ph", "X"},
                      {"pid", pid},
                      {"tid", span.thread},
                      {"name", span.name},
                      {"ts", microseconds(span.began_ns - earliest)},
                      {"dur", microseconds(span.ended_ns - earliest) - microseconds(span.began_ns - earliest)}};
        if (span.bytes > 0) event["args"]["bytes"] = span.bytes;
        events.push_back(std::move(event));
      }
      const json& words = parts[rank].at("words");
      for (const json& v : parts[rank].at("values")) {
        events.push_back({{"ph", "C"},
                          {"pid", pid},
                          {"name", words.at(v.at(0).get<size_t>())},
                          {"ts", microseconds(v.at(1).get<int64_t>() - offsets_ns.at(rank) - earliest)},
                          {"args", {{"value", v.at(2)}}}});
      }
      for (const json& m : parts[rank].at("messages")) {
        const std::string id = fmt::format("{} {}>{} {}", m.at(1).get<std::string>(), m.at(2).get<int>(),
                                           m.at(3).get<int>(), m.at(4).get<int64_t>());
        Arrow& arrow = arrows[id];
        (m.at(5).get<bool>() ? arrow.send : arrow.receive) = &spans[rank].at(m.at(0).get<size_t>());
      }
      if (parts[rank].at("dropped").get<int64_t>() > 0) dropped[std::to_string(rank)] = parts[rank].at("dropped");
    }

    for (const auto& [id, arrow] : arrows) {
      if (arrow.send == nullptr || arrow.receive == nullptr) continue;  // one end lies beyond the limit
      // The arrow leaves where the send begins and comes to the receive's end, inside of it: there the viewers bind it.
      const int64_t arrives = std::max(arrow.receive->began_ns, arrow.receive->ended_ns - 125);
      json event = {{"cat", "message"}, {"name", "message"}, {"id", id}};
      event.update({{"ph", "s"},
                    {"pid", arrow.send->rank},
                    {"tid", arrow.send->thread},
                    {"ts", microseconds(arrow.send->began_ns - earliest)}});
      events.push_back(event);
      event.update({{"ph", "f"},
                    {"bp", "e"},
                    {"pid", arrow.receive->rank},
                    {"tid", arrow.receive->thread},
                    {"ts", microseconds(arrives - earliest)}});
      events.push_back(event);
    }
  } catch (const json::exception& error) {
    throw RunError(fmt::format("the events of a rank cannot be read: {}", error.what()));
  }
  json file = {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
  if (!dropped.empty()) file["otherData"]["spans beyond the limit, by rank"] = std::move(dropped);
  return file.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace mgp

#include "common/ledger.hpp"

namespace mgp {

namespace {

// The map's order is the order of rows(): group, call, purpose.
std::string key_of(const std::string& group, const std::string& call, Purpose purpose) {
  return group + '\x1f' + call + '\x1f' + (purpose == Purpose::training ? '0' : '1');
}

LedgerRow& row_of(std::map<std::string, LedgerRow>& rows, const std::string& group, const std::string& call,
                  Purpose purpose) {
  LedgerRow& row = rows[key_of(group, call, purpose)];
  if (row.call.empty()) {
    row.group = group;
    row.call = call;
    row.purpose = purpose;
  }
  return row;
}

}  // namespace

void Ledger::count(const std::string& group, const std::string& call, Purpose purpose, int64_t payload_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  LedgerRow& row = row_of(rows_, group, call, purpose);
  row.calls += 1;
  row.payload_bytes += payload_bytes;
}

void Ledger::count_again(const std::vector<LedgerRow>& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const LedgerRow& more : rows) {
    LedgerRow& row = row_of(rows_, more.group, more.call, more.purpose);
    row.calls += more.calls;
    row.payload_bytes += more.payload_bytes;
  }
}

void Ledger::add_time(const std::string& group, const std::string& call, Purpose purpose, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  row_of(rows_, group, call, purpose).seconds += seconds;
}

std::vector<LedgerRow> Ledger::rows() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LedgerRow> result;
  result.reserve(rows_.size());
  for (const auto& entry : rows_) result.push_back(entry.second);
  return result;
}

LedgerRow Ledger::total(const std::string& call, Purpose purpose) const {
  std::lock_guard<std::mutex> lock(mutex_);
  LedgerRow sum;
  sum.call = call;
  sum.purpose = purpose;
  for (const auto& entry : rows_) {
    const LedgerRow& row = entry.second;
    if (row.call != call || row.purpose != purpose) continue;
    sum.calls += row.calls;
    sum.payload_bytes += row.payload_bytes;
    sum.seconds += row.seconds;
  }
  return sum;
}

void Ledger::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  rows_.clear();
}

std::vector<LedgerRow> difference(const std::vector<LedgerRow>& now, const std::vector<LedgerRow>& before) {
  std::vector<LedgerRow> result;
  for (LedgerRow row : now) {
    for (const LedgerRow& old : before) {
      if (old.group != row.group || old.call != row.call || old.purpose != row.purpose) continue;
      row.calls -= old.calls;
      row.payload_bytes -= old.payload_bytes;
    }
    row.seconds = 0.0;
    if (row.calls != 0) result.push_back(row);
  }
  return result;
}

}  // namespace mgp

// The byte ledger: what crossed the wire, by call, purpose and group. The report prints the prediction beside it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace mgp {

/// Why a call was made. Only `training` calls are what a pattern costs; the loss on screen, hashes, barriers and the
/// start-up broadcast are counted apart.
enum class Purpose { training, bookkeeping };

struct LedgerRow {
  std::string group;  ///< name of the communicator: "world", "tp", "dp", ...
  std::string call;   ///< "all_reduce", "broadcast", ...
  Purpose purpose = Purpose::training;
  int64_t calls = 0;
  /// Payload: bytes of the whole tensor (all_gather: the output; reduce_scatter: the input), as nccl-tests counts.
  int64_t payload_bytes = 0;
  double seconds = 0.0;  ///< between begin and end on the communication stream, waiting for late peers included
};

class Ledger {
 public:
  void count(const std::string& group, const std::string& call, Purpose purpose, int64_t payload_bytes);
  /// Counts calls and bytes of these rows once more: a CUDA graph makes the calls that it captured in every replay. Their
  /// time is not known.
  void count_again(const std::vector<LedgerRow>& rows);
  void add_time(const std::string& group, const std::string& call, Purpose purpose, double seconds);
  /// All rows since the start, ordered by group, call, purpose.
  std::vector<LedgerRow> rows() const;
  /// Sums over groups: calls and bytes of one call name and purpose since the start.
  LedgerRow total(const std::string& call, Purpose purpose) const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, LedgerRow> rows_;
};

/// Calls and bytes that came between two readings of rows(); rows without a call are left out. Seconds are 0.
std::vector<LedgerRow> difference(const std::vector<LedgerRow>& now, const std::vector<LedgerRow>& before);

}  // namespace mgp

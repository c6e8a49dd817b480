// Small text helpers of the reports.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mgp {

std::string with_commas(int64_t number);    ///< 1234567 -> "1,234,567"
std::string human_bytes(double bytes);      ///< 1536 -> "1.50 KiB"
std::string human_seconds(double seconds);  ///< 75 -> "1m15s"
/// A file name of its own for a part: ("runs/m.jsonl", "bf16") -> "runs/m.bf16.jsonl". "" stays "".
std::string with_part(const std::string& path, const std::string& part);
size_t edit_distance(const std::string& a, const std::string& b);

/// Rows as an aligned table under a title, columns two spaces apart; the first row is the head if `head` is set. Columns
/// whose cells (below the head) are all numbers are aligned to the right.
std::string table(const std::string& title, const std::vector<std::vector<std::string>>& rows, bool head);

}  // namespace mgp

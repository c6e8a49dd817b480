// A reader for the zip files that torch.save writes: stored (not compressed) records, also in files of over 4 GB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "common/input_file.hpp"

namespace mgp {

/// Reads the list of records once and checks all of it: each record lies inside the file, none overlaps another, names
/// are short and differ. What read() hands out later has passed its checksum.
class ZipReader {
 public:
  struct Record {
    uint64_t offset = 0;  ///< of the data in the file
    uint64_t size = 0;
    uint32_t crc = 0;
    bool is_compressed = false;  ///< then read() refuses it; TorchScript archives have such records
  };

  /// Throws UsageError naming `flag`.
  ZipReader(const std::string& path, const std::string& flag);

  const std::map<std::string, Record>& records() const { return records_; }
  const Record* find(const std::string& name) const;

  /// Copies a whole record to `to`, which has room for record.size bytes, and checks the checksum.
  void read(const std::string& name, const Record& record, void* to) const;

  const InputFile& file() const { return file_; }

 private:
  struct Directory {
    uint64_t offset = 0, size = 0, entries = 0;
  };
  Directory find_directory() const;
  void read_directory(const Directory& directory);

  InputFile file_;
  std::map<std::string, Record> records_;
};

/// The checksum of zip files, continued from `crc` (0 at the start).
uint32_t crc32(uint32_t crc, const void* data, size_t bytes);

}  // namespace mgp

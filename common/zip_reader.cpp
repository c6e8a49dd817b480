#include "common/zip_reader.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace mgp {
namespace {

// Signatures and sizes of the fixed parts, from PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16.
constexpr uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50, kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50, kEnd64Locator = 0x07064b50;
constexpr size_t kLocalHeaderSize = 30, kDirectoryEntrySize = 46, kEndSize = 22, kEnd64Size = 56, kLocatorSize = 20;
constexpr uint16_t kZip64Field = 1, kFlagEncrypted = 1;

constexpr uint64_t kMostEntries = 1 << 20;
constexpr uint16_t kLongestName = 512;

template <typename T>
T little(const unsigned char* from) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(from[i]) << (8 * i));
  return value;
}
uint16_t u16(const unsigned char* from) { return little<uint16_t>(from); }
uint32_t u32(const unsigned char* from) { return little<uint32_t>(from); }
uint64_t u64(const unsigned char* from) { return little<uint64_t>(from); }

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
    }
  }
  return tables;
}

}  // namespace

// Eight bytes a turn ("slicing by 8"): one byte a turn would take longer than reading the file from disk.
uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  static const CrcTables tables = make_crc_tables();
  const auto* from = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, from += 8) {
    const uint32_t low = crc ^ u32(from);
    const uint32_t high = u32(from + 4);
    crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
          tables[3][high & 255] ^ tables[2][high >> 8 & 255] ^ tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
  }
  for (; bytes > 0; --bytes, ++from) crc = crc >> 8 ^ tables[0][(crc ^ *from) & 255];
  return ~crc;
}

ZipReader::ZipReader(const std::string& path, const std::string& flag) : file_(path, flag) {
  read_directory(find_directory());
}

const ZipReader::Record* ZipReader::find(const std::string& name) const {
  const auto found = records_.find(name);
  return found == records_.end() ? nullptr : &found->second;
}

void ZipReader::read(const std::string& name, const Record& record, void* to) const {
  if (record.is_compressed) file_.fail("record " + printable(name) + " is compressed, which torch.save never does");
  constexpr uint64_t kChunk = 1 << 20;  // so that the checksum finds the bytes in the cache
  uint32_t crc = 0;
  for (uint64_t done = 0; done < record.size; done += kChunk) {
    const size_t bytes = static_cast<size_t>(std::min(kChunk, record.size - done));
    char* destination = static_cast<char*>(to) + done;
    file_.read_at(record.offset + done, destination, bytes, "record " + printable(name));
    crc = crc32(crc, destination, bytes);
  }
  // 0: Python wrote the file after torch.serialization.set_crc32_options(False), which leaves the checksum out.
  if (record.crc != 0 && crc != record.crc) file_.damaged("record " + printable(name) + " has a wrong checksum");
}

/// Looks for the list of records from the end of the file, as the format demands.
ZipReader::Directory ZipReader::find_directory() const {
  unsigned char begin[4] = {};
  if (file_.size() >= 4) file_.read_at(0, begin, 4, "the first record");
  if (file_.size() < kEndSize || u32(begin) != kLocalHeader) {
    file_.fail(begin[0] == 0x80 && begin[1] == 2
                   ? "not a zip archive but a bare pickle (PyTorch before 1.6?), save it again with a newer one"
                   : "not a PyTorch file (no zip archive)");
  }
  // The end record is the last thing in the file but for a comment of up to 65535 bytes.
  const size_t tail_size = static_cast<size_t>(std::min<uint64_t>(file_.size(), kEndSize + 0xffff));
  const uint64_t tail_offset = file_.size() - tail_size;
  std::vector<unsigned char> tail(tail_size);
  file_.read_at(tail_offset, tail.data(), tail_size, "the end");
  size_t at = tail_size - kEndSize;
  while (u32(&tail[at]) != kEnd || u16(&tail[at + 20]) != tail_size - kEndSize - at) {
    if (at == 0) file_.damaged("the list of records at its end is missing (cut off while it was written or copied?)");
    --at;
  }
  const uint64_t end_offset = tail_offset + at;
  Directory directory{u32(&tail[at + 16]), u32(&tail[at + 12]), u16(&tail[at + 10])};
  uint64_t limit = end_offset;  // the list must end before this

  if (end_offset >= kLocatorSize) {
    unsigned char locator[kLocatorSize];
    file_.read_at(end_offset - kLocatorSize, locator, kLocatorSize, "the end");
    if (u32(locator) == kEnd64Locator) {
      const uint64_t offset = u64(locator + 8);
      unsigned char end64[kEnd64Size];
      if (offset > end_offset - kLocatorSize) file_.damaged("the 64-bit end record lies outside the file");
      file_.read_at(offset, end64, kEnd64Size, "the 64-bit end record");
      if (u32(end64) != kEnd64) file_.damaged("the 64-bit end record is not where it should be");
      directory = {u64(end64 + 48), u64(end64 + 40), u64(end64 + 32)};
      limit = offset;
    }
  }
  if (directory.offset > limit || directory.size > limit - directory.offset) {
    file_.damaged("the list of records lies outside the file");
  }
  if (directory.entries > kMostEntries || directory.entries > directory.size / kDirectoryEntrySize) {
    file_.damaged("the list of records cannot hold " + std::to_string(directory.entries) + " records");
  }
  return directory;
}

void ZipReader::read_directory(const Directory& directory) {
  std::vector<unsigned char> list(static_cast<size_t>(directory.size));
  file_.read_at(directory.offset, list.data(), list.size(), "the list of records");

  struct Span {
    uint64_t begin, end;
    std::string name;
  };
  std::vector<Span> spans;
  size_t at = 0;
  for (uint64_t entry = 0; entry < directory.entries; ++entry) {
    if (list.size() - at < kDirectoryEntrySize || u32(&list[at]) != kDirectoryEntry) {
      file_.damaged("entry " + std::to_string(entry) + " of the list of records is not one");
    }
    const unsigned char* fixed = &list[at];
    const uint16_t flags = u16(fixed + 8), method = u16(fixed + 10);
    const uint16_t name_size = u16(fixed + 28), extra_size = u16(fixed + 30), comment_size = u16(fixed + 32);
    uint64_t packed = u32(fixed + 20), size = u32(fixed + 24), offset = u32(fixed + 42);
    at += kDirectoryEntrySize;
    if (list.size() - at < size_t{name_size} + extra_size + comment_size) {
      file_.damaged("entry " + std::to_string(entry) + " of the list of records is cut off");
    }
    const std::string name(reinterpret_cast<const char*>(list.data()) + at, name_size);
    const std::string shown = "record " + printable(name);
    if (name_size > kLongestName) file_.damaged(shown + " has a name of " + std::to_string(name_size) + " bytes");
    at += name_size;

    // Numbers that do not fit 32 bits stand in an extra field, in this order, those that do fit left out.
    for (size_t end = at + extra_size; end - at >= 4;) {
      const uint16_t kind = u16(&list[at]), bytes = u16(&list[at + 2]);
      at += 4;
      if (bytes > end - at) file_.damaged(shown + " has an extra field that is cut off");
      size_t next = at;
      for (uint64_t* number : {&size, &packed, &offset}) {
        if (kind != kZip64Field || *number != 0xffffffffu) continue;
        if (at + bytes - next < 8) file_.damaged(shown + " has no 64-bit sizes");
        *number = u64(&list[next]);
        next += 8;
      }
      at += bytes;
    }
    at = static_cast<size_t>(fixed - list.data()) + kDirectoryEntrySize + name_size + extra_size + comment_size;

    if ((flags & kFlagEncrypted) != 0) file_.fail(shown + " is encrypted, which torch.save never does");
    const bool is_compressed = method != 0;
    if (is_compressed) {
      size = packed;  // what lies in the file
    } else if (packed != size) {
      file_.damaged(shown + " has two sizes, " + std::to_string(packed) + " and " + std::to_string(size));
    }

    // The data begins after a second header; its extra field (padding) has another length than the one in the list.
    unsigned char local[kLocalHeaderSize];
    if (offset > directory.offset) file_.damaged(shown + " ends after the end of the file");
    file_.read_at(offset, local, kLocalHeaderSize, shown);
    if (u32(local) != kLocalHeader || u16(local + 26) != name_size) {
      file_.damaged(shown + " is not where the list of records says");
    }
    std::string local_name(name_size, '\0');
    file_.read_at(offset + kLocalHeaderSize, local_name.data(), name_size, shown);
    if (local_name != name) file_.damaged(shown + " is called " + printable(local_name) + " where it lies");
    const uint64_t data = offset + kLocalHeaderSize + name_size + u16(local + 28);
    if (data > directory.offset || size > directory.offset - data)
      file_.damaged(shown + " ends after the end of the file");

    spans.push_back({offset, data + size, name});
    if (!records_.emplace(name, Record{data, size, u32(fixed + 16), is_compressed}).second)
      file_.damaged(shown + " is there twice");
  }

  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].begin < spans[i - 1].end) {
      file_.damaged("records " + printable(spans[i - 1].name) + " and " + printable(spans[i].name) + " overlap");
    }
  }
}

}  // namespace mgp

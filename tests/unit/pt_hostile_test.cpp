// .pt files that are damaged or made to do harm: each ends in one line, none in a crash or a large allocation.
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>

#include "common/pt_file.hpp"
#include "tests/unit/files.hpp"
#include "tests/unit/fuzz.hpp"

namespace mgp {
namespace {

using Dict = PtValue::Dict;
using List = PtValue::List;

std::string usage_error(const std::string& path) {
  return error_of<UsageError>([&] { read_pt(path, "--load"); });
}

using Records = std::vector<std::pair<std::string, std::string>>;

void write_zip(const std::string& path, const Records& records) {
  std::remove(path.c_str());
  std::ofstream file(path, std::ios::binary);
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    return bytes;
  });
  for (const auto& [name, bytes] : records) zip.writeRecord(name, bytes.data(), bytes.size());
  zip.writeEndOfFile();
}

// ── pickles by hand ──
std::string little(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}
std::string text(const std::string& value) { return "X" + little(value.size(), 4) + value; }
std::string integer(int64_t value) { return "\x8a\x08" + little(static_cast<uint64_t>(value), 8); }
std::string tuple(const std::vector<int64_t>& values) {
  std::string out = "(";
  for (const int64_t value : values) out += integer(value);
  return out + "t";
}
std::string tensor(int64_t numel, int64_t offset, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides, const std::string& type = "FloatStorage",
                   const std::string& key = "0") {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\n" + type + "\n" + text(key) +
         text("cpu") + integer(numel) + "tQ" + integer(offset) + tuple(sizes) + tuple(strides) +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}
std::string pickle(const std::string& body) { return "\x80\x02" + body + "."; }

/// Reads a file with this pickle and one record data/0 of six floats; the complaint, or "".
std::string complaint(const std::string& body, const std::string& whole_pickle = "") {
  const ScratchFolder folder;
  write_zip(folder / "a.pt", {{"data.pkl", whole_pickle.empty() ? pickle(body) : whole_pickle},
                              {"byteorder", "little"},
                              {"data/0", std::string(24, '\0')}});
  return usage_error(folder / "a.pt");
}

TEST(PtHostile, HandMadePicklesThatAreFine) {
  EXPECT_EQ(complaint(tensor(6, 0, {2, 3}, {3, 1})), "");
  EXPECT_EQ(complaint(tensor(6, 1, {2, 2}, {1, 2})), "");
  EXPECT_EQ(complaint(tensor(6, 0, {}, {})), "");
  EXPECT_EQ(complaint(tensor(6, 0, {0, 5}, {5, 1})), "");
  EXPECT_EQ(complaint("ctorch._utils\n_rebuild_parameter\n(" + tensor(6, 0, {6}, {1}) +
                      "\x88"
                      "ccollections\nOrderedDict\n)RtR"),
            "");
  EXPECT_EQ(complaint("ctorch\nSize\n(" + tuple({2, 3}) + "tR"), "");
  EXPECT_EQ(complaint("ccollections\nOrderedDict\n)R(" + text("a") + "K\x01u}" + text("_metadata") + "Nsb"), "");
}

TEST(PtHostile, Tensors) {
  EXPECT_TRUE(says(complaint(tensor(6, 0, {7}, {1})), "damaged: the file's value has more elements than its storage"));
  EXPECT_TRUE(says(complaint(tensor(6, 1, {6}, {1})), "reaches over the end of its storage"));
  EXPECT_TRUE(says(complaint(tensor(6, 6, {}, {})), "reaches over the end"));
  EXPECT_TRUE(says(complaint(tensor(6, -1, {2}, {1})), "has the offset -1"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {-2}, {1})), "has the size -2"));
  EXPECT_TRUE(says(complaint(tensor(6, 5, {2}, {-1})), "has the stride -1"));
  EXPECT_TRUE(says(complaint(tensor(6, INT64_MAX, {2}, {1})), "reaches over the end"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {2}, {INT64_MAX})), "reaches over the end"));
  EXPECT_TRUE(says(complaint(tensor(6, 1, {3}, {INT64_MAX / 2})), "reaches over the end"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {3}, {INT64_MAX})), "reaches over the end"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {1ll << 32, 1ll << 32}, {0, 0})), "more elements"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {0, 1ll << 62, 1ll << 62}, {0, 0, 0})), "more elements"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {2, 3}, {1})), "more sizes than strides"));
  EXPECT_TRUE(
      says(complaint(tensor(6, 0, std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1))), "no proper size"));
  EXPECT_TRUE(says(complaint(tensor(7, 0, {2}, {1})), "record data/0 has 24 bytes, not 7 elements of 4"));
  EXPECT_TRUE(says(complaint(tensor(1ll << 62, 0, {2}, {1})), "record data/0 has 24 bytes"));
  EXPECT_TRUE(says(complaint(tensor(-1, 0, {2}, {1})), "number of elements -1"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {2}, {1}, "FloatStorage", "1")), "record data/1, which is missing"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {2}, {1}, "FloatStorage", "../data/0")), "which is missing"));
  EXPECT_TRUE(says(complaint(tensor(6, 0, {2}, {1}, "QInt8Storage")), "asks for torch.QInt8Storage"));
  EXPECT_TRUE(says(complaint("](" + tensor(6, 0, {2}, {1}) + tensor(3, 0, {1}, {1}, "DoubleStorage") + "e"),
                   "another type or size"));
}

TEST(PtHostile, Pickles) {
  EXPECT_TRUE(says(complaint("cos\nsystem\n(" + text("rm -rf /") + "tR"),
                   ": asks for os.system, which this reader does not allow"));
  EXPECT_TRUE(says(complaint("",
                             "\x80\x04\x8c\x05"
                             "posix\x8c\x06system\x93."),
                   "asks for posix.system, which"));
  EXPECT_TRUE(says(complaint("cbuiltins\neval\n"), "asks for builtins.eval"));
  EXPECT_TRUE(says(complaint("c\x1b[31m\nx\n"), "asks for \\x1b[31m.x"));  // nothing reaches the terminal raw
  EXPECT_TRUE(says(complaint("X" + little(0xffffffff, 4) + "abc"), "wants 4294967295 bytes"));
  EXPECT_TRUE(says(complaint("\x8d" + little(UINT64_MAX, 8) + "abc"), "wants 18446744073709551615 bytes"));
  EXPECT_TRUE(says(complaint("\x8b" + little(0x7fffffff, 4) + "abc"), "bytes where fewer are left"));
  EXPECT_TRUE(says(complaint("\x8a\x09" + little(0, 8) + "\x01"), "an integer of 9 bytes"));
  EXPECT_TRUE(says(complaint("\x95" + little(1 << 20, 8) + "N"), "a frame that ends after"));
  EXPECT_TRUE(says(complaint("h\x05"), "memo 5 was never filled"));
  EXPECT_TRUE(says(complaint("Nr" + little(0xfffffff0, 4)), "memo 4294967280 is out of range"));
  EXPECT_TRUE(says(complaint("q\x01"), "uses a value where there is none"));
  EXPECT_TRUE(says(complaint("t"), "closes a bracket that was not opened"));
  EXPECT_TRUE(says(complaint("N(\x85"), "takes a value where there is none"));  // not from before the bracket
  EXPECT_TRUE(says(complaint("NN"), "leaves 2 values"));
  EXPECT_TRUE(says(complaint("(N"), "leaves"));
  EXPECT_TRUE(says(complaint("", "\x80\x02N"), "bytes where fewer are left"));
  EXPECT_TRUE(says(complaint("", std::string("\x80\x02N.N")), "goes on after its end"));
  EXPECT_TRUE(says(complaint("", "\x80\x01N."), "protocol 1"));
  EXPECT_TRUE(says(complaint("", "."), "leaves 0 values"));
  EXPECT_TRUE(says(complaint("N)R"), "a call of something that is not a function"));
  EXPECT_TRUE(says(complaint("ctorch\nSize\nNR"), "a call of something that is not a function"));
  EXPECT_TRUE(says(complaint("ctorch\nFloatStorage\n)R"), "calls torch.FloatStorage in an unknown way"));
  EXPECT_TRUE(says(complaint("ctorch\nFloatStorage\n"), "a bare torch.FloatStorage"));
  EXPECT_TRUE(says(complaint("NQ"), "a bare storage"));
  EXPECT_TRUE(says(complaint("NNs"), "uses a value where there is none"));
  EXPECT_TRUE(says(complaint("]NNs"), "adds items to something that takes none"));
  EXPECT_TRUE(says(complaint("}(Nu"), "a dictionary key without a value"));
  EXPECT_TRUE(says(complaint("}]Ns"), "neither text nor integer"));
  EXPECT_TRUE(says(complaint("}(" + text("a") + "N" + text("a") + "Nu"), "a is there twice"));
  EXPECT_EQ(complaint("}Nb"), "");
  EXPECT_TRUE(says(complaint("]Nb"), "attributes for something that takes none"));
  EXPECT_TRUE(says(complaint("\x8f"), "opcode 0x8f"));
  EXPECT_TRUE(says(complaint("(i"), "opcode 0x69"));
}

TEST(PtHostile, NestingAndRepetition) {
  std::string deep = "N";
  for (int i = 0; i < 5000; ++i) deep += "\x85";
  EXPECT_TRUE(says(complaint(deep), "nested more than 100 deep"));
  EXPECT_TRUE(says(complaint(std::string(5000, '(') + "N"), "open brackets"));
  EXPECT_TRUE(says(complaint(std::string("]q\x01h\x01"
                                         "a",
                                         6)),
                   "nested more than 100 deep"));  // a list within itself
  std::string doubling = "N";                      // each level holds the one below twice: 2^60 values from 300 bytes
  for (char i = 0; i < 60; ++i) doubling += std::string("q") + i + "h" + i + "\x86";
  EXPECT_TRUE(says(complaint(doubling), "one value too many"));
  std::string repeat = "](" + text(std::string(1 << 16, 'x')) + "q\x01";
  for (int i = 0; i < 10'000; ++i) repeat += "h\x01";
  EXPECT_TRUE(says(complaint(repeat + "e"), "repeats more text"));
  std::string parameters = tensor(6, 0, {6}, {1});
  for (int i = 0; i < 200; ++i) parameters = "ctorch._utils\n_rebuild_parameter\n(" + parameters + "tR";
  EXPECT_TRUE(says(complaint(parameters), "nested more than 100 deep"));
  EXPECT_TRUE(says(complaint("](" + std::string(3 << 20, ']') + "e"), "more than 2097152 values"));
}

TEST(PtHostile, Archives) {
  const ScratchFolder folder;
  const std::string path = folder / "a.pt";
  const auto with = [&](const Records& records) {
    write_zip(path, records);
    return usage_error(path);
  };
  EXPECT_TRUE(says(with({{"x", "y"}}), "not a PyTorch file (a zip archive without data.pkl)"));
  EXPECT_TRUE(says(with({{"data.pkl", pickle("N")}, {"constants.pkl", "x"}}), "is a TorchScript archive"));
  EXPECT_TRUE(says(with({{"data.pkl", pickle("N")}, {"byteorder", "big"}}), "little-endian"));
  EXPECT_EQ(with({{"data.pkl", pickle("N")}}), "");

  // One value of the archive's own bookkeeping after another is bent.
  const Records good = {{"data.pkl", pickle(tensor(6, 0, {6}, {1}))}, {"data/0", std::string(24, 'a')}};
  ASSERT_EQ(with(good), "");
  const std::string bytes = read_file(path);
  const size_t entry = bytes.find("archive/data/0", bytes.find("PK\x01\x02")) - 46;  // in the list of records
  ASSERT_EQ(bytes.substr(entry, 4), "PK\x01\x02");
  const auto bent = [&](size_t at, const std::string& change) {
    std::string copy = bytes;
    copy.replace(at, change.size(), change);
    write_file(path, copy);
    return usage_error(path);
  };
  EXPECT_TRUE(says(bent(entry + 8, "\x01"), "is encrypted"));
  EXPECT_TRUE(says(bent(entry + 10, "\x08"), "is compressed"));
  EXPECT_TRUE(says(bent(entry + 16, "\x01"), "record data/0 has a wrong checksum"));
  EXPECT_TRUE(says(bent(entry + 20, little(100'000, 4) + little(100'000, 4)),
                   "damaged: record archive/data/0 ends after the end of the file"));
  EXPECT_TRUE(says(bent(entry + 42, little(0, 4)), "is called archive/data.pkl where it lies") ||
              says(bent(entry + 42, little(0, 4)), "is not where the list of records says"));
  EXPECT_TRUE(says(bent(entry + 42, little(0x7fffffff, 4)), "ends after the end"));
  EXPECT_TRUE(says(bent(entry + 46 + 8, "X"), "is called"));
  EXPECT_TRUE(says(bent(entry, "XX"), "of the list of records is not one"));
  const size_t end64 = bytes.find("PK\x06\x06");
  ASSERT_NE(end64, std::string::npos);
  EXPECT_TRUE(says(bent(end64 + 32, little(UINT64_MAX, 8)), "cannot hold 18446744073709551615 records"));
  EXPECT_TRUE(says(bent(end64 + 40, little(UINT64_MAX, 8)), "lies outside the file"));
  EXPECT_TRUE(says(bent(end64 + 48, little(UINT64_MAX, 8)), "lies outside the file"));
  const size_t locator = bytes.find("PK\x06\x07");
  EXPECT_TRUE(says(bent(locator + 8, little(UINT64_MAX, 8)), "64-bit end record lies outside"));
  EXPECT_TRUE(says(bent(locator + 8, little(1, 8)), "64-bit end record is not where"));
  write_file(path, bytes.substr(0, bytes.size() / 2));
  EXPECT_TRUE(says(usage_error(path), "damaged: the list of records at its end is missing"));

  // The first record made so long that it covers the second one.
  const size_t first = bytes.find("PK\x01\x02");
  EXPECT_TRUE(says(bent(first + 20, little(400, 4) + little(400, 4)), "overlap"));
}

std::string good_file(const std::string& path) {
  const at::Tensor tied = at::arange(12, at::kFloat).view({3, 4});
  write_pt(path, {Dict{{"model", {Dict{{"a.weight", {tied}}, {"b.weight", {tied}}, {"c", {at::ones({2}, at::kBool)}}}}},
                       {"list", {List{{int64_t{1}}, {1.5}, {true}, {}, {std::string("text")}}}},
                       {"empty", {at::empty({0, 3})}}}});
  return read_file(path);
}

TEST(PtHostile, FuzzedFiles) {
  const ScratchFolder folder;
  const std::string bytes = good_file(folder / "good.pt");
  const AddressSpaceLimit limit;
  const int readable = fuzz(bytes, 4000, [&](const std::string& damaged) {
    write_file(folder / "a.pt", damaged);
    read_pt(folder / "a.pt", "--load");
  });
  EXPECT_GT(readable, 100);  // damage in padding and dates does no harm
  EXPECT_LT(readable, 3000);
}

// The same with right checksums, so that the damage reaches the pickle.
TEST(PtHostile, FuzzedPickles) {
  const ScratchFolder folder;
  const std::string bytes = good_file(folder / "good.pt");
  const size_t begin = bytes.find("\x80\x02}");
  const std::string body = bytes.substr(begin, bytes.find(".PK", begin) + 1 - begin);
  const auto read = [&](const std::string& pickle_bytes) {
    write_zip(folder / "a.pt", {{"data.pkl", pickle_bytes},
                                {"data/0", std::string(48, '\1')},
                                {"data/1", std::string(2, '\1')},
                                {"data/2", ""}});
    read_pt(folder / "a.pt", "--load");
  };
  EXPECT_NO_THROW(read(body));
  const AddressSpaceLimit limit;
  EXPECT_GT(fuzz(body, 4000, read), 100);
}

}  // namespace
}  // namespace mgp

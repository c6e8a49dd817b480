// The safetensors format: bytes as other readers expect them, and nothing believed that the file's size denies.
#include "common/safetensors.hpp"

#include <gtest/gtest.h>

#include "tests/unit/files.hpp"
#include "tests/unit/fuzz.hpp"

namespace mgp {
namespace {

std::string usage_error(const std::string& path) {
  return error_of<UsageError>([&] { read_safetensors(path, "--load"); });
}

std::string with_header(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes + header + data;
}

TEST(Safetensors, RoundTrip) {
  const ScratchFolder folder;
  NamedTensors tensors;
  for (const at::ScalarType type : {at::kByte, at::kBool, at::kHalf, at::kBFloat16, at::kInt, at::kFloat, at::kDouble,
                                    at::kLong, at::kShort, at::kChar}) {
    tensors.emplace_back(std::string("of ") + at::toString(type), at::arange(6, at::kFloat).to(type).view({2, 3}));
    tensors.emplace_back(std::string("single ") + at::toString(type), at::ones({}, type));
  }
  tensors.emplace_back("empty", at::empty({0, 5}));
  tensors.emplace_back("turned", at::arange(6, at::kFloat).view({2, 3}).t());
  const std::map<std::string, std::string> metadata = {{"step", "7"}, {"json", "{\"a\": [\"\\\"\"]}\n"}};
  write_safetensors(folder / "a.safetensors", tensors, metadata);

  std::map<std::string, std::string> read_metadata;
  const NamedTensors back = read_safetensors(folder / "a.safetensors", "--load", &read_metadata);
  EXPECT_EQ(read_metadata, metadata);
  ASSERT_EQ(back.size(), tensors.size());
  const std::map<std::string, at::Tensor> by_name(back.begin(), back.end());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_EQ(by_name.count(name), 1u) << name;
    EXPECT_EQ(by_name.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(by_name.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(by_name.at(name), tensor)) << name;
  }
  EXPECT_EQ(names_in(folder).size(), 1u);
}

TEST(Safetensors, KnownBytes) {
  const ScratchFolder folder;
  write_safetensors(folder / "a", {{"b", at::tensor({1.f, 2.f})}, {"a", at::tensor({3}, at::kByte)}}, {{"k", "v"}});
  std::string header = R"({"__metadata__":{"k":"v"},"a":{"data_offsets":[8,9],"dtype":"U8","shape":[1]},)"
                       R"("b":{"data_offsets":[0,8],"dtype":"F32","shape":[2]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_file(folder / "a"), with_header(header, std::string("\0\0\x80\x3f\0\0\0\x40\x03", 9)));
}

TEST(Safetensors, OrderIsThatOfTheFile) {
  const ScratchFolder folder;
  NamedTensors tensors;
  for (const char* name : {"z", "a", "m", "b"}) tensors.emplace_back(name, at::rand({3}));
  write_safetensors(folder / "a", tensors, {});
  const NamedTensors back = read_safetensors(folder / "a", "--load");
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(back[i].first, tensors[i].first);
}

TEST(Safetensors, WhatHasNoPlaceIsNotWritten) {
  const ScratchFolder folder;
  const auto error = [&](const NamedTensors& tensors) {
    return error_of<RunError>([&] { write_safetensors(folder / "a", tensors, {}); });
  };
  EXPECT_TRUE(says(error({{"x", at::ones({1})}, {"x", at::ones({1})}}), "two tensors of the name x"));
  EXPECT_TRUE(says(error({{"__metadata__", at::ones({1})}}), "__metadata__"));
  EXPECT_TRUE(says(error({{"x", at::ones({1}, at::kComplexFloat)}}), "no safetensors type"));
  EXPECT_TRUE(says(error({{"x", at::Tensor()}}), "x: not a dense tensor"));
  EXPECT_TRUE(says(error({{"\xff", at::ones({1})}}), "not valid UTF-8"));
  EXPECT_TRUE(names_in(folder).empty());
}

TEST(Safetensors, HostileFiles) {
  const ScratchFolder folder;
  const std::string path = folder / "a";
  const auto complaint = [&](const std::string& bytes) {
    write_file(path, bytes);
    return usage_error(path);
  };
  const auto entry = [&](const std::string& dtype, const std::string& shape, const std::string& offsets,
                         size_t data = 8) {
    return complaint(
        with_header("{\"x\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}",
                    std::string(data, '\0')));
  };
  EXPECT_EQ(entry("F32", "[2]", "[0,8]"), "");
  EXPECT_EQ(entry("F32", "[0,4611686018427387904]", "[0,0]", 0),
            "--load " + path + ": damaged: x has more elements than the file");
  EXPECT_TRUE(says(entry("F32", "[4294967296,4294967296]", "[0,8]"), "more elements than the file"));
  EXPECT_TRUE(says(entry("F32", "[1000000]", "[0,8]"), "x has 8 bytes, its shape needs 4000000"));
  EXPECT_TRUE(says(entry("F32", "[1000000]", "[0,4000000]"), "x ends after the end of the file"));
  EXPECT_TRUE(says(entry("F32", "[2]", "[8,0]"), "x ends after the end of the file"));
  EXPECT_TRUE(says(entry("F32", "[2]", "[18446744073709551608,18446744073709551615]"), "x ends after the end"));
  EXPECT_TRUE(says(entry("F32", "[2]", "[0,8,9]"), "does not describe x"));
  EXPECT_TRUE(says(entry("F32", "[2]", "[-8,0]"), "not a whole number"));
  EXPECT_TRUE(says(entry("F32", "[-2]", "[0,8]"), "not a whole number"));
  EXPECT_TRUE(says(entry("F32", "[2.0]", "[0,8]"), "not a whole number"));
  EXPECT_TRUE(says(entry("F32", "2", "[0,8]"), "does not describe x"));
  EXPECT_TRUE(says(entry("F4", "[2]", "[0,8]"), "of type F4, which this reader does not know"));
  EXPECT_TRUE(says(entry("F32", "[1]", "[4,8]"), "overlaps another tensor, or there is a gap"));
  EXPECT_TRUE(says(entry("F32", "[1]", "[0,4]"), "4 bytes after the last tensor"));
  EXPECT_TRUE(says(complaint(with_header(R"({"x":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", "\x07")),
                   "other than 0 and 1"));
  const std::string one = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_TRUE(says(complaint(with_header("{\"x\":" + one + ",\"x\":" + one + "}", "a")), "names x twice"));
  EXPECT_TRUE(says(complaint(with_header("{\"x\":" + one + ",\"y\":" + one + "}", "a")), "overlaps"));
  EXPECT_TRUE(says(complaint(with_header("{\"__metadata__\":{\"a\":1}}", "")), "its metadata a is not a text"));
  EXPECT_TRUE(says(complaint(with_header("{\"__metadata__\":3}", "")), "its metadata is not a JSON object"));
  EXPECT_TRUE(says(complaint(with_header("{\"x\":" + std::string(100'000, '['), "")), "nested too deeply"));
  EXPECT_TRUE(says(complaint(with_header("{\"x\":", "")), "its header is not JSON"));
  EXPECT_TRUE(says(complaint(with_header("[]", "")), "not a safetensors file (no JSON header)"));
  EXPECT_TRUE(says(complaint("abc"), "not a safetensors file"));
  EXPECT_TRUE(says(complaint(std::string(100, 'x')), "not a safetensors file"));
  EXPECT_TRUE(says(complaint(with_header("{}", "").substr(0, 9)), "header ends after the end of the file"));
  EXPECT_EQ(complaint(with_header("{}", "")), "");
  EXPECT_EQ(usage_error(folder.path()), "--load " + folder.path() + ": is a folder, not a file");
}

TEST(Safetensors, FuzzedFiles) {
  const ScratchFolder folder;
  const std::string path = folder / "a";
  write_safetensors(path,
                    {{"a.weight", at::rand({3, 4})}, {"b", at::ones({2}, at::kBool)}, {"c", at::ones({3}, at::kLong)}},
                    {{"step", "7"}});
  const std::string bytes = read_file(path);
  const AddressSpaceLimit limit;
  const int readable = fuzz(bytes, 3000, [&](const std::string& damaged) {
    write_file(path, damaged);
    read_safetensors(path, "--load");
  });
  EXPECT_GT(readable, 100);
  EXPECT_LT(readable, 2500);
}

// For tests/pytorch/test_files.py, see pt_file_test.cpp.
TEST(Safetensors, ConvertsForPython) {
  const std::string in = environment("MGP_SAFETENSORS_IN"), out = environment("MGP_SAFETENSORS_OUT");
  if (in.empty() || out.empty()) GTEST_SKIP() << "for tests/pytorch/test_files.py";
  std::map<std::string, std::string> metadata;
  const NamedTensors tensors = read_safetensors(in, "--load", &metadata);
  write_safetensors(out, tensors, metadata);
}

}  // namespace
}  // namespace mgp

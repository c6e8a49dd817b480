// The .pt format: what is written is read again, and whatever else a file holds ends in one clear line.
#include "common/pt_file.hpp"

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "common/zip_reader.hpp"
#include "tests/unit/files.hpp"

namespace mgp {
namespace {

using Dict = PtValue::Dict;
using List = PtValue::List;

bool equal(const PtValue& a, const PtValue& b) {
  if (a.value.index() != b.value.index()) return false;
  if (const at::Tensor* x = std::get_if<at::Tensor>(&a.value)) {
    const at::Tensor& y = std::get<at::Tensor>(b.value);
    return x->scalar_type() == y.scalar_type() && x->sizes() == y.sizes() && at::equal(*x, y);
  }
  if (const List* x = std::get_if<List>(&a.value)) {
    const List& y = std::get<List>(b.value);
    return std::equal(x->begin(), x->end(), y.begin(), y.end(), equal);
  }
  if (const Dict* x = std::get_if<Dict>(&a.value)) {
    const Dict& y = std::get<Dict>(b.value);
    return std::equal(x->begin(), x->end(), y.begin(), y.end(),
                      [](const auto& p, const auto& q) { return p.first == q.first && equal(p.second, q.second); });
  }
  if (const double* x = std::get_if<double>(&a.value)) {
    const double y = std::get<double>(b.value);
    return *x == y || (std::isnan(*x) && std::isnan(y));
  }
  if (a.is_none()) return true;
  if (const bool* x = std::get_if<bool>(&a.value)) return *x == std::get<bool>(b.value);
  if (const int64_t* x = std::get_if<int64_t>(&a.value)) return *x == std::get<int64_t>(b.value);
  return std::get<std::string>(a.value) == std::get<std::string>(b.value);
}

PtValue every_kind() {
  Dict tensors;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                                    at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(at::toString(type), PtValue{at::arange(6, at::kFloat).sub(2).abs().to(type).view({2, 3})});
    tensors.emplace_back(std::string("single ") + at::toString(type), PtValue{at::ones({}, type)});
  }
  tensors.emplace_back("empty", PtValue{at::empty({0})});
  tensors.emplace_back("empty rows", PtValue{at::empty({0, 768}, at::kBFloat16)});
  List integers;
  for (const int64_t n :
       {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{65535}, int64_t{65536}, int64_t{-1}, int64_t{-129},
        int64_t{INT32_MAX}, int64_t{INT32_MAX} + 1, int64_t{INT32_MIN}, int64_t{INT32_MIN} - 1, INT64_MAX, INT64_MIN}) {
    integers.push_back({n});
  }
  const double infinity = std::numeric_limits<double>::infinity();
  return {Dict{{"tensors", {tensors}},
               {"integers", {integers}},
               {"numbers", {List{{0.1}, {-0.0}, {1e300}, {5e-324}, {infinity}, {std::nan("")}}}},
               {"text", {std::string("h\xc3\xa9llo \xe2\x88\x91\nline")}},
               {"", {std::string()}},
               {"bools", {List{{true}, {false}}}},
               {"none", {}},
               {"nested", {List{{List{}}, {Dict{}}, {List{{Dict{{"deep", {int64_t{1}}}}}}}}}}}};
}

std::string usage_error(const std::string& path) {
  return error_of<UsageError>([&] { read_pt(path, "--load"); });
}

TEST(PtFile, RoundTrip) {
  const ScratchFolder folder;
  const PtValue value = every_kind();
  write_pt(folder / "a.pt", value);
  EXPECT_TRUE(equal(read_pt(folder / "a.pt", "--load"), value));
  EXPECT_EQ(names_in(folder).size(), 1u);
  // The same values give the same bytes, so that saved files can be compared.
  write_pt(folder / "b.pt", value);
  EXPECT_EQ(read_file(folder / "a.pt"), read_file(folder / "b.pt"));
}

TEST(PtFile, NestingHasOneLimitForBothWays) {
  const ScratchFolder folder;
  PtValue value{int64_t{1}};
  for (int i = 0; i < 100; ++i) value = PtValue{List{value}};
  write_pt(folder / "a.pt", value);
  EXPECT_TRUE(equal(read_pt(folder / "a.pt", "--load"), value));
  EXPECT_TRUE(says(error_of<RunError>([&] { write_pt(folder / "a.pt", {List{value}}); }), "too deeply"));
}

TEST(PtFile, ViewsAreWrittenAlone) {
  const ScratchFolder folder;
  const at::Tensor big = at::arange(100'000, at::kFloat).view({100, 1000});
  write_pt(folder / "a.pt", {Dict{{"slice", {big[3].slice(0, 10, 12)}},
                                  {"turned", {big.slice(1, 0, 2).t()}},
                                  {"spread", {at::full({1}, 7.0).expand({4})}}}});
  EXPECT_LT(size_of_file(folder / "a.pt"), 4000u);
  const PtValue back = read_pt(folder / "a.pt", "--load");
  EXPECT_TRUE(at::equal(back.find("slice")->tensor(""), at::tensor({3010.f, 3011.f})));
  EXPECT_TRUE(at::equal(back.find("turned")->tensor(""), big.slice(1, 0, 2).t()));
  EXPECT_TRUE(at::equal(back.find("spread")->tensor(""), at::full({4}, 7.0)));
}

// Trial B11: one matrix smaller than untied, and one tensor again after reading.
TEST(PtFile, TiedWeightsStayTied) {
  const ScratchFolder folder;
  const at::Tensor weight = at::rand({64, 64});
  write_pt(folder / "tied.pt", {Dict{{"embedding", {weight}}, {"head", {weight.detach()}}}});
  write_pt(folder / "untied.pt", {Dict{{"embedding", {weight}}, {"head", {weight.clone()}}}});
  const auto size = [&](const char* name) { return size_of_file(folder / name); };
  EXPECT_GE(size("untied.pt") - size("tied.pt"), weight.nbytes());
  const PtValue tied = read_pt(folder / "tied.pt", "--load");
  EXPECT_EQ(tied.find("embedding")->tensor("").data_ptr(), tied.find("head")->tensor("").data_ptr());
  EXPECT_TRUE(at::equal(tied.find("head")->tensor(""), weight));
  const PtValue untied = read_pt(folder / "untied.pt", "--load");
  EXPECT_NE(untied.find("embedding")->tensor("").data_ptr(), untied.find("head")->tensor("").data_ptr());
}

TEST(PtFile, PlaceholdersAreFilledOneByOne) {
  const ScratchFolder folder;
  const auto meta = [](at::IntArrayRef shape) { return at::empty(shape, at::TensorOptions().device(at::kMeta)); };
  const at::Tensor shared = meta({2, 2});
  const PtValue value{
      Dict{{"a", {shared}}, {"plain", {at::ones({1})}}, {"inner", {Dict{{"b", {meta({3})}}, {"a", {shared}}}}}}};
  std::vector<std::string> asked;
  write_pt(folder / "a.pt", value, [&](const std::string& where, const at::Tensor& placeholder) {
    asked.push_back(where);
    return at::full(placeholder.sizes(), static_cast<double>(asked.size()));
  });
  EXPECT_EQ(asked, (std::vector<std::string>{"a", "inner/b"}));
  const PtValue back = read_pt(folder / "a.pt", "--load");
  EXPECT_TRUE(at::equal(back.find("inner")->find("a")->tensor(""), at::full({2, 2}, 1.0)));
  EXPECT_TRUE(at::equal(back.find("inner")->find("b")->tensor(""), at::full({3}, 2.0)));

  // Whatever goes wrong in between, the good file stays.
  const std::string before = read_file(folder / "a.pt");
  EXPECT_TRUE(says(error_of<RunError>([&] { write_pt(folder / "a.pt", value); }), "a: it has no values"));
  const auto wrong = [](const std::string&, const at::Tensor&) { return at::ones({5}); };
  EXPECT_TRUE(says(error_of<RunError>([&] { write_pt(folder / "a.pt", value, wrong); }), "differ in shape"));
  const auto broken = [](const std::string&, const at::Tensor&) -> at::Tensor { throw RunError("rank 3 is gone"); };
  EXPECT_EQ(error_of<RunError>([&] { write_pt(folder / "a.pt", value, broken); }), "rank 3 is gone");
  EXPECT_EQ(read_file(folder / "a.pt"), before);
  EXPECT_EQ(names_in(folder).size(), 1u);
}

TEST(PtFile, WhatHasNoPlaceIsNotWritten) {
  const ScratchFolder folder;
  const auto error = [&](const at::Tensor& tensor) {
    return error_of<RunError>([&] { write_pt(folder / "a.pt", {Dict{{"x", {tensor}}}}); });
  };
  EXPECT_TRUE(says(error(at::Tensor()), "x: an undefined tensor"));
  EXPECT_TRUE(says(error(at::ones({2}, at::kComplexFloat)), "x: no storage type"));
  EXPECT_TRUE(says(error(at::eye(2).to_sparse()), "x: not a dense tensor"));
  EXPECT_TRUE(names_in(folder).empty());
}

TEST(PtFile, AFullDiskNamesThePath) {
  const ScratchFolder folder;
  write_pt(folder / "a.pt", {std::string("old")});
  const PtValue much{at::zeros({1 << 18})};
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 16, 1 << 16};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string text = error_of<RunError>([&] { write_pt(folder / "a.pt", much); });
    _exit(says(text, folder / "a.pt") && says(text, "File too large") ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_pt(folder / "a.pt", "--load").text(""), "old");
  EXPECT_EQ(names_in(folder).size(), 1u);
}

// Trial B33: killed at any moment of writing, the file is the last one or the one before, never half of one.
TEST(PtFile, KilledWhileWriting) {
  const ScratchFolder folder;
  const std::string path = folder / "model.pt";
  const at::Tensor values = at::arange(1 << 18, at::kInt);
  const auto write = [&](int64_t round) {
    write_pt(path, {Dict{{"round", {round}}, {"values", {values}}, {"again", {round}}}});
  };
  write(0);
  int64_t last = 0;
  int progress = 0;
  for (unsigned kill_number = 0; kill_number < 50; ++kill_number) {
    int started[2];
    ASSERT_EQ(pipe(started), 0);
    const pid_t child = fork();
    if (child == 0) {
      if (::write(started[1], "x", 1) != 1) _exit(1);
      for (int64_t round = last + 1;; ++round) write(round);
    }
    char byte = 0;
    ASSERT_EQ(::read(started[0], &byte, 1), 1);
    usleep(kill_number * 7919 % 10'000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(started[0]);
    close(started[1]);
    const PtValue back = read_pt(path, "--load");
    const int64_t round = back.find("round")->integer("round");
    EXPECT_EQ(back.find("again")->integer("again"), round);
    EXPECT_GE(round, last);
    EXPECT_TRUE(at::equal(back.find("values")->tensor("values"), values));
    progress += round > last ? 1 : 0;
    last = round;
  }
  EXPECT_GT(progress, 0) << "no child ever finished a file";
  write(last + 1);
  EXPECT_EQ(names_in(folder).size(), 1u) << "a temporary file of a killed writer is left";
}

TEST(PtFile, NotAFileToRead) {
  const ScratchFolder folder;
  const std::string start = "--load " + folder.path();
  EXPECT_EQ(usage_error(folder / "none.pt"), start + "/none.pt: No such file or directory");
  EXPECT_EQ(usage_error(folder.path()), start + ": is a folder, not a file");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(usage_error(folder / "pipe"), start + "/pipe: is not a regular file");
  EXPECT_EQ(usage_error("/dev/zero"), "--load /dev/zero: is not a regular file");
  EXPECT_EQ(usage_error(""), "--load: the file name is empty");
  write_file(folder / "empty.pt", "");
  EXPECT_EQ(usage_error(folder / "empty.pt"), start + "/empty.pt: not a PyTorch file (no zip archive)");
  write_file(folder / "text.pt", std::string(1000, 'x'));
  EXPECT_EQ(usage_error(folder / "text.pt"), start + "/text.pt: not a PyTorch file (no zip archive)");
  write_file(folder / "old.pt", std::string("\x80\x02\x8a\x0alQ\x9c", 7) + std::string(100, 'x'));
  EXPECT_TRUE(says(usage_error(folder / "old.pt"), "bare pickle"));
  if (geteuid() != 0) {
    write_file(folder / "locked.pt", "x");
    ASSERT_EQ(chmod((folder / "locked.pt").c_str(), 0), 0);
    EXPECT_EQ(usage_error(folder / "locked.pt"), start + "/locked.pt: Permission denied");
  }
}

TEST(PtFile, AccessorsNameThePlace) {
  const PtValue value{Dict{{"a", {int64_t{1}}}}};
  EXPECT_EQ(error_of<RunError>([&] { value.find("a")->text("entry a"); }), "entry a is an integer, not a text");
  EXPECT_EQ(error_of<RunError>([&] { value.list("root"); }), "root is a dictionary, not a list");
  EXPECT_EQ(value.find("a")->number("entry a"), 1.0);
  EXPECT_EQ(value.find("b"), nullptr);
  EXPECT_EQ(value.find("a")->find("b"), nullptr);
}

TEST(PtFile, ChecksumIsThatOfZip) {
  EXPECT_EQ(crc32(0, "123456789", 9), 0xcbf43926u);  // the check value of CRC-32
  const std::string text(1000, 'q');
  EXPECT_EQ(crc32(crc32(0, text.data(), 13), text.data() + 13, 987), crc32(0, text.data(), 1000));
}

// tests/pytorch/test_files.py sets these, to have files of Python read and written again here.
TEST(PtFile, ConvertsForPython) {
  const std::string in = environment("MGP_PT_IN"), out = environment("MGP_PT_OUT");
  if (in.empty() || out.empty()) GTEST_SKIP() << "for tests/pytorch/test_files.py";
  write_pt(out, read_pt(in, "--load"));
}

TEST(PtFile, WritesForPython) {
  const std::string out = environment("MGP_PT_EVERY_KIND");
  if (out.empty()) GTEST_SKIP() << "for tests/pytorch/test_files.py";
  write_pt(out, every_kind());
}

}  // namespace
}  // namespace mgp

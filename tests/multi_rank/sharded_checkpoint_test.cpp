// The sharded checkpoint as ranks write it: flat ranges that tear rows, rows, ranks without anything, replicas; and
// what happens when one rank cannot write.
#include "common/sharded_checkpoint.hpp"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <thread>

#include "common/published_folder.hpp"
#include "tests/multi_rank/world.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

using mgp_test::error_of;
using mgp_test::world;

/// Rows of 12, 1, 7 (one row) and 6 elements; 10 rows do not divide by 3 or 4.
const std::vector<ParameterShape> kParameters = {
    {"embedding.weight", {10, 3, 4}}, {"norm.bias", {5}}, {"head.weight", {1, 7}}, {"last.weight", {4, 6}}};

/// Different numbers for each kind and parameter.
at::Tensor whole(size_t kind, size_t p, at::ScalarType type = at::kFloat) {
  const double base = 1000.0 * static_cast<double>(kind) + 200.0 * static_cast<double>(p);
  return at::arange(kParameters[p].numel(), at::kDouble).add(base).to(type).view(kParameters[p].shape);
}

/// A folder that all ranks see; rank 0 makes and removes it.
class SharedFolder {
 public:
  SharedFolder() {
    if (world().rank() == 0) mine_.emplace();
    path_ = world().gather_text("folder of the test", mine_ ? mine_->path() : "")[0];
  }
  ~SharedFolder() { world().barrier("end of the test"); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::optional<ScratchFolder> mine_;
  std::string path_;
};

/// Cuts the flat concatenation of all parameters at `ends` (by rank, ascending): what FSDP1 does.
std::vector<Piece> flat_pieces(const std::vector<int64_t>& ends, int rank) {
  const int64_t first = rank == 0 ? 0 : ends[static_cast<size_t>(rank) - 1], last = ends[static_cast<size_t>(rank)];
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (const ParameterShape& parameter : kParameters) {
    const int64_t end = begin + parameter.numel();
    const int64_t from = std::max(first, begin), to = std::min(last, end);
    if (from < to) pieces.push_back({parameter, from - begin, to - from});
    begin = end;
  }
  return pieces;
}

/// Rows of each parameter in even blocks, the last ones shorter or empty: what FSDP2 does.
std::vector<Piece> row_pieces(int ranks, int rank) {
  std::vector<Piece> pieces;
  for (const ParameterShape& parameter : kParameters) {
    const int64_t rows = parameter.shape[0], row = parameter.numel() / rows, block = (rows + ranks - 1) / ranks;
    const int64_t from = std::min(rows, block * rank), to = std::min(rows, from + block);
    if (from < to) pieces.push_back({parameter, from * row, (to - from) * row});
  }
  return pieces;
}

struct Local {
  explicit Local(std::vector<Piece> pieces, at::ScalarType type = at::kFloat)
      : layout(kParameters, std::move(pieces), type, world()) {
    for (size_t i = 0; i < layout.mine().size(); ++i) {
      size_t p = 0;
      while (kParameters[p].name != layout.mine()[i].of.name) ++p;
      for (size_t kind = 0; kind < 3; ++kind) {
        const at::Tensor all = whole(kind, p, kind == 0 ? type : at::kFloat);
        kinds[kind].emplace_back(kParameters[p].name, layout.cut(i, all).clone().to(world().device()));
      }
    }
  }
  ShardLayout layout;
  NamedTensors kinds[3];
};

TrainingState some_training() {
  TrainingState training;
  training.step = 3;
  training.next_sample = 36 + world().rank();  // rank 0's is written
  training.rng_cpu = at::full({9}, world().rank(), at::kByte);
  return training;
}

void save(const std::string& folder, const Local& local) {
  save_sharded(folder, preset_config("tiny", ModelKind::classifier), local.layout, local.kinds[0], local.kinds[1],
               local.kinds[2], at::full({}, 2.0).to(world().device()), some_training(), world());
}

void expect_whole(const std::string& folder, at::ScalarType type = at::kFloat) {
  const FullState state = load_sharded(folder);  // on every rank
  const NamedTensors* const kinds[] = {&state.model, &state.exp_avg, &state.exp_avg_sq};
  for (size_t kind = 0; kind < 3; ++kind) {
    EXPECT_EQ(kinds[kind]->size(), kParameters.size());
    for (size_t p = 0; p < std::min(kinds[kind]->size(), kParameters.size()); ++p) {
      EXPECT_EQ((*kinds[kind])[p].first, kParameters[p].name);
      EXPECT_TRUE(at::equal((*kinds[kind])[p].second, whole(kind, p, kind == 0 ? type : at::kFloat)))
          << kind << " " << kParameters[p].name << "\n"
          << (*kinds[kind])[p].second;
    }
  }
  EXPECT_EQ(state.training.step, 3);
  EXPECT_EQ(state.training.next_sample, 36);
  EXPECT_TRUE(at::equal(state.training.rng_cpu, at::zeros({9}, at::kByte)));
  for (const auto& [name, steps] : state.steps) EXPECT_EQ(steps.item<float>(), 2.0f) << name;
  EXPECT_EQ(state.config.layers, preset_config("tiny", ModelKind::classifier).layers);
}

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

int64_t total() {
  int64_t sum = 0;
  for (const ParameterShape& parameter : kParameters) sum += parameter.numel();
  return sum;  // 120 + 5 + 7 + 24 = 156
}

TEST(ShardedCheckpoint, FlatRangesWithTornRows) {
  const SharedFolder scratch;
  const int ranks = world().size();
  // Even cuts; all cuts in one row of the first parameter, so that ranks in the middle have only fragments and no file;
  // cuts in the single row of head.weight; everything on the last rank, so that the others have nothing.
  std::vector<std::vector<int64_t>> cases(4);
  for (int rank = 0; rank < ranks; ++rank) {
    const bool last = rank == ranks - 1;
    cases[0].push_back(total() * (rank + 1) / ranks);
    cases[1].push_back(last ? total() : 13 + 2 * rank);
    cases[2].push_back(last ? total() : 126 + rank);
    cases[3].push_back(last ? total() : 0);
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string folder = scratch / std::to_string(i);
    save(folder, Local(flat_pieces(cases[i], world().rank())));
    EXPECT_FALSE(exists(folder + ".tmp-3"));
    expect_whole(folder);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(exists(scratch / ("1/" + shard_file_name(rank))), rank == 0 || rank == ranks - 1) << rank;
    EXPECT_EQ(exists(scratch / ("3/" + shard_file_name(rank))), rank == ranks - 1) << rank;
  }
}

TEST(ShardedCheckpoint, RandomCuts) {
  const SharedFolder scratch;
  uint64_t random = 88172645463325252ull;  // the same on all ranks
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    std::vector<int64_t> ends;
    for (int rank = 0; rank + 1 < world().size(); ++rank) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      ends.push_back(static_cast<int64_t>(random % static_cast<uint64_t>(total() + 1)));
    }
    ends.push_back(total());
    std::sort(ends.begin(), ends.end());
    save(scratch / "a", Local(flat_pieces(ends, world().rank()), round % 2 == 0 ? at::kDouble : at::kBFloat16));
    expect_whole(scratch / "a", round % 2 == 0 ? at::kDouble : at::kBFloat16);
    world().barrier("read");  // the next round replaces it
  }
}

TEST(ShardedCheckpoint, UnevenRows) {
  const SharedFolder scratch;
  save(scratch / "a", Local(row_pieces(world().size(), world().rank())));
  expect_whole(scratch / "a");
  world().barrier("read");
  // Another cut replaces it, and files of ranks that have nothing now do not stay behind.
  save(scratch / "a", Local(row_pieces(1, world().rank())));
  for (int rank = 0; rank < world().size(); ++rank) {
    EXPECT_EQ(exists(scratch / ("a/" + shard_file_name(rank))), rank == 0);
  }
  expect_whole(scratch / "a");
}

TEST(ShardedCheckpoint, ReplicasAreWrittenOnce) {
  const SharedFolder scratch;
  // Pairs of ranks hold the same; then ranges that overlap by halves.
  const int pairs = (world().size() + 1) / 2;
  save(scratch / "pairs", Local(row_pieces(pairs, world().rank() / 2)));
  expect_whole(scratch / "pairs");
  EXPECT_FALSE(exists(scratch / ("pairs/" + shard_file_name(1))));
  std::vector<Piece> overlapping;
  for (const ParameterShape& parameter : kParameters) {
    const int64_t first = parameter.numel() * world().rank() / (world().size() + 1);
    const int64_t last = parameter.numel() * (world().rank() + 2) / (world().size() + 1);
    overlapping.push_back({parameter, first, last - first});
  }
  save(scratch / "overlapping", Local(overlapping));
  expect_whole(scratch / "overlapping");
}

TEST(ShardedCheckpoint, ASnapshotIsOfItsMoment) {
  const SharedFolder scratch;
  const int ranks = world().size(), rank = world().rank();
  const ModelConfig config = preset_config("tiny", ModelKind::classifier);
  // Rows, whose tensors would be written as they stand, and flat ranges, of which some are torn and copied anyway.
  for (const bool rows : {true, false}) {
    SCOPED_TRACE(rows ? "rows" : "flat");
    std::optional<Local> local(rows ? row_pieces(ranks, rank)
                                    : flat_pieces(
                                          [&] {
                                            std::vector<int64_t> ends;
                                            for (int r = 1; r <= ranks; ++r) ends.push_back(total() * r / ranks);
                                            return ends;
                                          }(),
                                          rank));
    at::Tensor count = at::full({}, 2.0).to(world().device());
    ShardedSave save(scratch / "a", config, local->layout, local->kinds[0], local->kinds[1], local->kinds[2], count,
                     some_training(), world(), /*snapshot=*/true);
    count.add_(1);
    for (NamedTensors& kind : local->kinds) {
      for (auto& [name, tensor] : kind) tensor.zero_();  // training goes on
    }
    local.reset();  // and ends
    EXPECT_FALSE(exists(scratch / "a/index.json") && rows);
    std::thread writer([&] { save.write(); });
    writer.join();
    save.publish();
    expect_whole(scratch / "a");
    world().barrier("read");
  }
}

/// Files of this process may not grow beyond `bytes` (EFBIG), as if the disk was full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST(ShardedCheckpoint, ARankThatCannotWriteStopsAll) {
  const SharedFolder scratch;
  const std::string folder = scratch / "a";
  const int culprit = std::min(1, world().size() - 1);
  Local local(row_pieces(world().size(), world().rank()));
  save(folder, local);
  const auto expect_failure = [&](const std::string& why) {
    const std::string text = error_of([&] { save(folder, local); });
    EXPECT_EQ(text.find("saving the checkpoint " + folder + " failed: rank " + std::to_string(culprit) + ": "), 0u)
        << text;
    EXPECT_NE(text.find(why), std::string::npos) << text;
    EXPECT_FALSE(exists(folder + ".tmp-3"));
    EXPECT_FALSE(exists(folder + ".old"));
    expect_whole(folder);  // the one before is still there
    world().barrier("read");
  };
  {
    std::optional<FileSizeLimit> limit;
    if (world().rank() == culprit) limit.emplace(64);
    expect_failure("cannot write " + folder + ".tmp-3/" + shard_file_name(culprit) + ": File too large");
  }
  if (world().rank() == culprit) local.kinds[1][0].second = at::zeros({1}).to(world().device());
  expect_failure("optimizer.exp_avg.embedding.weight: 1 elements for a piece of ");
  save(folder, Local(row_pieces(world().size(), world().rank())));  // and it goes on
  expect_whole(folder);
}

TEST(ShardedCheckpoint, AFolderThatCannotBeReplacedStopsAll) {
  const SharedFolder scratch;
  const std::string folder = scratch / "a";
  if (world().rank() == 0) {
    mkdir(folder.c_str(), 0777);
    std::ofstream(folder + "/notes.txt") << "mine";
  }
  const Local local(row_pieces(world().size(), world().rank()));
  const std::string text = error_of([&] { save(folder, local); });
  EXPECT_NE(text.find("failed: rank 0: cannot replace the folder " + folder + ": notes.txt in it"), std::string::npos)
      << text;
  EXPECT_TRUE(exists(folder + "/notes.txt"));
  const std::string missing = error_of([&] { save(scratch / "none/a", local); });
  EXPECT_NE(missing.find("none: No such file or directory"), std::string::npos) << missing;
}

// For tests/pytorch/test_sharded_folder.py: leaves a folder behind, with the numbers of whole().
TEST(ShardedCheckpoint, WritesForPython) {
  const char* const out = std::getenv("MGP_SHARDED_OUT");
  if (out == nullptr) GTEST_SKIP() << "for tests/pytorch/test_sharded_folder.py";
  const std::string folder = out;
  std::vector<int64_t> ends;
  for (int rank = 1; rank <= world().size(); ++rank) ends.push_back(total() * rank / world().size());
  save(folder + "/flat", Local(flat_pieces(ends, world().rank())));
  save(folder + "/rows", Local(row_pieces(world().size(), world().rank())));
  expect_whole(folder + "/flat");
  expect_whole(folder + "/rows");
}

}  // namespace
}  // namespace mgp

#include "common/launch.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>

#include "common/error.hpp"

namespace mgp {
namespace {

/// The environment, read as text and as checked numbers. A variable that is set but empty counts as unset.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = environment_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }

  std::optional<int> number(const char* name) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    int result = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), result);
    if (error != std::errc() || end != value->data() + value->size() || result < 0) {
      throw UsageError(fmt::format("{} is '{}'; it must be a whole number, 0 or more", name, *value));
    }
    return result;
  }

 private:
  const Environment& environment_;
};

/// One row of the table: who set it, the names of its variables, and their values.
struct Row {
  std::string launcher;
  const char* rank_name;
  const char* size_name;
  const char* local_rank_name;
  const char* local_size_name;
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::string note;  ///< what had to be assumed

  std::string shown() const {
    std::string text = fmt::format("{}={} {}={}", rank_name, rank, size_name, size);
    if (local_rank) text += fmt::format(" {}={}", local_rank_name, *local_rank);
    if (local_size) text += fmt::format(" {}={}", local_size_name, *local_size);
    return text + note;
  }
};

/// A row whose four values come from four variables; nullopt if neither rank nor size is set.
std::optional<Row> plain_row(const Reader& reader, const std::string& launcher, const char* rank_name,
                             const char* size_name, const char* local_rank_name, const char* local_size_name) {
  const std::optional<int> rank = reader.number(rank_name);
  const std::optional<int> size = reader.number(size_name);
  if (!rank && !size) return std::nullopt;
  if (!rank)
    throw UsageError(fmt::format("{}={} is set but {} is not: set both, or neither", size_name, *size, rank_name));
  if (!size)
    throw UsageError(fmt::format("{}={} is set but {} is not: set both, or neither", rank_name, *rank, size_name));
  return Row{launcher,
             rank_name,
             size_name,
             local_rank_name,
             local_size_name,
             *rank,
             *size,
             reader.number(local_rank_name),
             reader.number(local_size_name),
             ""};
}

/// Slurm sets SLURM_PROCID in three places, and only the first is a launch of ours: the tasks of `srun`, the batch
/// script itself (no SLURM_STEP_ID, but a job id), and the shell of an interactive allocation (a step with a reserved
/// number, or one of a single task in an allocation of several).
bool is_srun_task(const Reader& reader) {
  if (!reader.number("SLURM_PROCID")) return false;
  std::optional<std::string> step = reader.text("SLURM_STEP_ID");
  if (!step) step = reader.text("SLURM_STEPID");
  if (!step) return !reader.text("SLURM_JOB_ID") && !reader.text("SLURM_JOBID");
  uint64_t step_number = 0;
  const auto [end, error] = std::from_chars(step->data(), step->data() + step->size(), step_number);
  constexpr uint64_t kFirstReserved = 0xfffffff0;  // interactive, batch and extern steps, slurm.h
  if (error != std::errc() || end != step->data() + step->size() || step_number >= kFirstReserved) return false;
  return !(reader.number("SLURM_STEP_NUM_TASKS").value_or(0) == 1 && reader.number("SLURM_NTASKS").value_or(1) > 1);
}

std::optional<Row> slurm_row(const Reader& reader) {
  if (!is_srun_task(reader)) return std::nullopt;
  Row row{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "tasks on this host", 0, 1, {}, {}, ""};
  row.rank = *reader.number("SLURM_PROCID");
  row.local_rank = reader.number("SLURM_LOCALID");

  std::vector<int> counts;  // tasks of each node of the step
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (const auto text = reader.text(name); text && counts.empty()) counts = expand_slurm_counts(*text);
  }
  // The step's own number first: SLURM_NTASKS can be the whole allocation's, and some sites do not set it at all.
  std::optional<int> size;
  for (const char* name : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"}) {
    if (!size && (size = reader.number(name))) row.size_name = name;
  }
  const int64_t counted = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (!size) {
    if (counts.empty()) {
      throw UsageError(
          fmt::format("SLURM_PROCID={} is set but SLURM_NTASKS is not: start with srun --ntasks N", row.rank));
    }
    size = static_cast<int>(std::min<int64_t>(counted, std::numeric_limits<int>::max()));
    row.size_name = "SLURM_TASKS_PER_NODE, summed";
  }
  row.size = *size;

  const std::optional<int> node = reader.number("SLURM_NODEID");
  if (counted == row.size && counts.size() == 1) {
    row.local_size = row.size;
  } else if (counted == row.size && node && static_cast<size_t>(*node) < counts.size()) {
    row.local_size = counts[static_cast<size_t>(*node)];
  } else if (reader.number("SLURM_STEP_NUM_NODES").value_or(reader.number("SLURM_NNODES").value_or(0)) == 1) {
    row.local_size = row.size;
  }
  return row;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

/// Fills in LOCAL_RANK and LOCAL_WORLD_SIZE where that is safe, and says so; refuses where it is a guess.
void complete_local(Row& row, const std::optional<std::string>& master_addr) {
  const bool may_be_local = !master_addr || is_loopback(*master_addr);
  if (!row.local_rank) {
    if (row.local_size ? *row.local_size != row.size : !may_be_local) {
      throw UsageError(
          fmt::format("{}={} is set but {} is not, and the ranks are on several hosts: set {} to the rank among "
                      "the processes of its host, it picks the GPU",
                      row.rank_name, row.rank, row.local_rank_name, row.local_rank_name));
    }
    row.local_rank = row.rank;
    row.note += fmt::format(" ({} is not set, assumed)", row.local_rank_name);
  }
  if (!row.local_size) {
    // Without the number, only a lower bound is known as soon as there may be other hosts.
    row.local_size = (*row.local_rank == row.rank && may_be_local) ? row.size : *row.local_rank + 1;
    row.note += fmt::format(" ({} is not set, assumed)", row.local_size_name);
  }
}

/// A wrapper script that exports RANK and WORLD_SIZE alone: the launcher below it knows the place on this host.
void borrow_local(Row& row, const std::optional<Row>& other) {
  if (!other || other->rank != row.rank || other->size != row.size || row.local_rank || !other->local_rank) return;
  row.local_rank = other->local_rank;
  row.local_rank_name = other->local_rank_name;
  if (!row.local_size && other->local_size) {
    row.local_size = other->local_size;
    row.local_size_name = other->local_size_name;
  }
}

void check_ranges(const Row& row) {
  if (row.size < 1) throw UsageError(fmt::format("{} is {}; a run has at least 1 rank", row.size_name, row.size));
  if (row.rank >= row.size) {
    throw UsageError(fmt::format("{} is {} but {} is {}; ranks are 0..{}", row.rank_name, row.rank, row.size_name,
                                 row.size, row.size - 1));
  }
  if (row.local_size && (*row.local_size < 1 || *row.local_size > row.size)) {
    throw UsageError(fmt::format("{} is {} but {} is {}; a host has 1..{} of the ranks", row.local_size_name,
                                 *row.local_size, row.size_name, row.size, row.size));
  }
  if (row.local_rank && *row.local_rank >= row.local_size.value_or(row.size)) {
    throw UsageError(fmt::format("{} is {} but {} is {}; local ranks are 0..{}", row.local_rank_name, *row.local_rank,
                                 row.local_size ? row.local_size_name : row.size_name,
                                 row.local_size.value_or(row.size), row.local_size.value_or(row.size) - 1));
  }
}

void expect_agreement(const std::optional<Row>& a, const std::optional<Row>& b) {
  if (!a || !b || (a->rank == b->rank && a->size == b->size)) return;
  throw UsageError(
      fmt::format("two launchers disagree: {} ({}) and {} ({}): use one launcher, or unset the variables of "
                  "the other",
                  a->shown(), a->launcher, b->shown(), b->launcher));
}

int read_port(const Reader& reader) {
  const std::optional<std::string> text = reader.text("MASTER_PORT");
  if (!text) return 0;
  int port = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), port);
  const bool whole = end == text->data() + text->size();
  if (error != std::errc() || !whole || port < 1 || port > 65535) {
    throw UsageError(fmt::format("MASTER_PORT is {}; a port is 1..65535", *text));
  }
  return port;
}

/// Below the range from which the kernel hands out ports, different for the steps of a job and for neighbouring jobs.
int slurm_port(const Reader& reader) {
  const auto digits = [&](const char* name, const char* other) {
    const std::string text = reader.text(name).value_or(reader.text(other).value_or("0"));
    uint64_t value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    return value;
  };
  const uint64_t job = digits("SLURM_JOB_ID", "SLURM_JOBID");
  return static_cast<int>(10000 + (job * 16 + digits("SLURM_STEP_ID", "SLURM_STEPID")) % 20000);
}

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

}  // namespace

Launch detect_launch(const Environment& environment) {
  const Reader reader(environment);

  // RANK ..: torchrun, launch.sh, or a script that sets them. Open MPI: mpirun. PMI: Hydra, the mpirun of MPICH and
  // Intel MPI; Slurm's PMI plugin sets PMI_RANK too, for its own step, so inside a step Hydra's local rank must be
  // there as well.
  const bool torchrun = reader.text("TORCHELASTIC_RUN_ID").has_value();
  const std::optional<Row> rank_row =
      plain_row(reader, torchrun ? "torchrun" : reader.text("MGP_LAUNCHER").value_or("environment"), "RANK",
                "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  const std::optional<Row> open_mpi = plain_row(reader, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                                "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  std::optional<Row> pmi;
  const bool in_slurm = reader.text("SLURM_PROCID").has_value();
  if (!in_slurm || reader.text("MPI_LOCALRANKID")) {
    pmi = plain_row(reader, reader.text("I_MPI_ROOT") ? "Intel MPI" : "MPICH", "PMI_RANK", "PMI_SIZE",
                    "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  }
  expect_agreement(rank_row, open_mpi);
  expect_agreement(rank_row, pmi);
  expect_agreement(open_mpi, pmi);
  // Not even read under a nearer launcher, unless that one leaves the place on this host open.
  const std::optional<Row>& nearest = rank_row ? rank_row : open_mpi ? open_mpi : pmi;
  const std::optional<Row> slurm = nearest && nearest->local_rank ? std::nullopt : slurm_row(reader);

  Launch launch;
  launch.host = host_name();
  launch.master_port = read_port(reader);
  launch.rendezvous_file = reader.text("MGP_RENDEZVOUS_FILE").value_or("");
  launch.share_gpu = reader.text("MGP_SHARE_GPU").value_or("0") == "1";

  std::optional<Row> row = nearest ? nearest : slurm;
  if (!row) {
    if (const auto local = reader.number("LOCAL_RANK")) {
      throw UsageError(
          fmt::format("LOCAL_RANK={} is set but RANK and WORLD_SIZE are not: set all three, or none", *local));
    }
    launch.matched = "no launcher's variables are set: one rank";
    launch.master_addr = reader.text("MASTER_ADDR").value_or("127.0.0.1");
    return launch;
  }

  check_ranges(*row);
  const std::optional<std::string> master_addr = reader.text("MASTER_ADDR");
  for (const auto& other : {open_mpi, pmi, slurm}) borrow_local(*row, other);
  complete_local(*row, master_addr);
  check_ranges(*row);
  launch.rank = row->rank;
  launch.world_size = row->size;
  launch.local_rank = *row->local_rank;
  launch.local_size = *row->local_size;
  launch.launcher = row->launcher;
  launch.matched = row->shown();

  const bool all_local = launch.local_size == launch.world_size;
  launch.master_addr = master_addr.value_or(all_local ? "127.0.0.1" : "");
  if (rank_row && torchrun) {
    launch.agent_store = reader.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
    launch.store_prefix = fmt::format("{}/{}", *reader.text("TORCHELASTIC_RUN_ID"),
                                      reader.text("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  } else if (!nearest) {
    const std::string nodes =
        reader.text("SLURM_STEP_NODELIST").value_or(reader.text("SLURM_JOB_NODELIST").value_or(""));
    if (launch.master_addr.empty()) launch.master_addr = first_slurm_host(nodes);
    if (launch.master_port == 0) launch.master_port = slurm_port(reader);
    launch.store_prefix = fmt::format("slurm/{}.{}", reader.text("SLURM_JOB_ID").value_or("0"),
                                      reader.text("SLURM_STEP_ID").value_or("0"));
  } else if (open_mpi) {
    if (const auto job = reader.text("PMIX_NAMESPACE")) launch.store_prefix = "openmpi/" + *job;
  }
  return launch;
}

Launch detect_launch() {
  return detect_launch([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace mgp

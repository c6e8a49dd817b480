#include "common/mpi_runtime.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "common/error.hpp"

#if MGP_WITH_MPI
#include <mpi.h>
#endif

namespace mgp {

#if MGP_WITH_MPI

namespace {

void check(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw RunError(fmt::format("{} failed: {}", call, text));
}

bool on_path(const std::string& program) {
  std::istringstream folders(std::getenv("PATH") != nullptr ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

std::unique_ptr<MpiRuntime> MpiRuntime::start(const Launch& launch) {
  std::unique_ptr<MpiRuntime> runtime(new MpiRuntime);
  int finalized = 0;
  int initialized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) throw RunError("MPI was finalised before: a process can connect its ranks over MPI only once");
  MPI_Initialized(&initialized);
  int provided = MPI_THREAD_SINGLE;
  if (initialized == 0) {
    // Open MPI looks for ssh or rsh although nothing remote is started here, and ends the process when there is
    // neither.
    if (!on_path("ssh") && !on_path("rsh")) ::setenv("OMPI_MCA_plm_rsh_agent", "false", /*overwrite=*/0);
    // One thread at a time is enough: all MPI calls stay on the thread that calls backward().
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    runtime->finalize_ = true;
  } else {
    MPI_Query_thread(&provided);
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (provided < MPI_THREAD_SERIALIZED) {
    throw UsageError(
        fmt::format("{} does not let several threads call it in turn (MPI_THREAD_SERIALIZED is needed)", version()));
  }
  int rank = 0;
  int size = 1;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (size == launch.world_size && rank == launch.rank) return runtime;
  if (size == 1 && launch.launcher == "Slurm") {
    throw UsageError(
        fmt::format("srun started {} CPU ranks, but MPI sees only this one: srun did not pass on what MPI "
                    "needs. Use srun --mpi=pmix (srun --mpi=list shows the choice), mpirun or "
                    "scripts/launch.sh",
                    launch.world_size));
  }
  if (size == 1) {
    throw UsageError(
        fmt::format("{} started {} CPU ranks, but MPI sees only this one: CPU ranks exchange over MPI and "
                    "must be started by it. Use mpirun or scripts/launch.sh, or train on GPUs with "
                    "--device cuda",
                    launch.launcher, launch.world_size));
  }
  throw UsageError(
      fmt::format("the launcher ({}) says that this is rank {} of {}, MPI says rank {} of {}. Start the ranks "
                  "with mpirun or scripts/launch.sh alone",
                  launch.launcher, launch.rank, launch.world_size, rank, size));
}

MpiRuntime::~MpiRuntime() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalize_ && finalized == 0) MPI_Finalize();
}

std::string MpiRuntime::version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string line = text;
  line.erase(std::min(line.find('\n'), line.size()));
  line.erase(std::min(line.find(','), line.size()));  // "Open MPI v4.1.4, package: ...", "MPICH Version: 4.0"
  const size_t v = line.find(" v");
  if (v != std::string::npos) line.erase(v + 1, 1);
  const size_t mpich = line.find("Version:");
  if (mpich != std::string::npos) {
    line.erase(mpich, sizeof("Version:") - 1);
    for (char& letter : line) letter = letter == '\t' ? ' ' : letter;
    const size_t spaces = line.find("  ");
    if (spaces != std::string::npos) line.erase(spaces, 1);
  }
  return line;
}

std::string MpiRuntime::tell_all(const std::string& text) const {
  int length = static_cast<int>(text.size());
  check(MPI_Bcast(&length, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
  std::string result = text;
  result.resize(static_cast<size_t>(length));
  check(MPI_Bcast(result.data(), length, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return result;
}

bool started_by_mpi(const Launch& launch) {
  return launch.launcher == "Open MPI" || launch.launcher == "MPICH" || launch.launcher == "Intel MPI";
}

#else

std::unique_ptr<MpiRuntime> MpiRuntime::start(const Launch&) {
  throw UsageError(
      "CPU ranks exchange over MPI, but this was built without it: install libopenmpi-dev and openmpi-bin "
      "and configure again with -DMGP_MPI=ON, or train on GPUs with --device cuda");
}

MpiRuntime::~MpiRuntime() = default;

std::string MpiRuntime::version() { return "none"; }

std::string MpiRuntime::tell_all(const std::string& text) const { return text; }

bool started_by_mpi(const Launch&) { return false; }

#endif

}  // namespace mgp

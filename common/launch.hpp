// Who am I, how many are we, how do I reach the others: one table of the environment variables of each launcher.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace mgp {

struct Launch {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< rank among the processes of this host: picks the GPU
  int local_size = 1;
  std::string launcher = "none";  ///< row of the table that matched: "torchrun", "launch.sh", "environment" (RANK and
                                  ///< WORLD_SIZE set by something else), "Open MPI", "MPICH", "Intel MPI", "Slurm"
  std::string matched;            ///< the variables that were used, with values, for the banner
  std::string host;
  std::string master_addr;      ///< where the store is, or "" when nobody said
  int master_port = 0;          ///< 0: nobody said
  std::string rendezvous_file;  ///< MGP_RENDEZVOUS_FILE: rank 0 binds any port and writes host:port there
  bool agent_store = false;     ///< torchrun's agent already serves the store: every rank is a client (trial B96)
  std::string store_prefix;     ///< torchrun: run id and restart count; Open MPI and Slurm: the job; else ""
  bool share_gpu = false;       ///< several ranks on one GPU were asked for (--share-gpu of launch.sh)
};

/// getenv, or a stand-in for tests.
using Environment = std::function<const char*(const char*)>;

/// Reads the launcher's variables; first match wins (torchrun / launch.sh RANK.., Open MPI, MPICH or Intel MPI, Slurm,
/// none). Throws UsageError when two launchers disagree (both shown), a number is missing or out of range, or a port is
/// outside 1..65535. Slurm's variables never contradict: under mpirun or torchrun they describe the job step in which
/// the launcher itself runs, one process a host, and the launcher's own variables are the nearer ones.
Launch detect_launch(const Environment& environment);
Launch detect_launch();

/// "2(x3),1" as Slurm writes task counts -> {2,2,2,1}. Throws UsageError on other text.
std::vector<int> expand_slurm_counts(const std::string& text);

/// First host of a Slurm node list, "node[03-05,9],gpu1" -> "node03".
std::string first_slurm_host(const std::string& nodelist);

}  // namespace mgp

// The launch table, row by row, with a stand-in for the environment (trials B62, B64, B66, B69, B96).
#include "common/launch.hpp"

#include <gtest/gtest.h>

#include <map>

#include "common/error.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

using Variables = std::map<std::string, std::string>;

Launch detect(const Variables& variables) {
  return detect_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

/// The line with which these variables are refused; "" if they are not.
std::string refusal(const Variables& variables) {
  try {
    detect(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

Variables operator+(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "node1"},
                             {"MASTER_PORT", "41000"},
                             {"TORCHELASTIC_RUN_ID", "job7"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"PMIX_NAMESPACE", "1234"}};
const Variables kHydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kSrun = {{"SLURM_JOB_ID", "200505"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "7"},
                         {"SLURM_STEP_NUM_TASKS", "7"},
                         {"SLURM_LOCALID", "2"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"},
                         {"SLURM_STEP_NODELIST", "gnode[10,20,25]"}};
// As a batch script of a real cluster sees it: a task number although srun has not run.
const Variables kBatchShell = {{"SLURM_JOB_ID", "200505"},
                               {"SLURM_PROCID", "0"},
                               {"SLURM_NTASKS", "4"},
                               {"SLURM_TASKS_PER_NODE", "1(x4)"},
                               {"SLURM_LOCALID", "0"},
                               {"SLURM_NODEID", "0"},
                               {"SLURM_JOB_NODELIST", "gnode[10,20,25,37]"}};

TEST(Launch, NothingSetIsOneRank) {
  const Launch launch = detect({});
  EXPECT_EQ(launch.launcher, "none");
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_EQ(launch.local_size, 1);
  EXPECT_EQ(launch.master_port, 0);
  EXPECT_FALSE(launch.host.empty());
}

TEST(Launch, Torchrun) {
  const Launch launch = detect(kTorchrun);
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.master_addr, "node1");
  EXPECT_EQ(launch.master_port, 41000);
  EXPECT_TRUE(launch.agent_store);
  EXPECT_EQ(launch.store_prefix, "job7/2") << "a restarted run must not read the keys of the one before";
  EXPECT_EQ(launch.matched, "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2");
}

TEST(Launch, TorchrunWithoutAgentStore) {
  EXPECT_FALSE(detect(kTorchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}}).agent_store);
  // Without torchrun's run id the variable is a left-over.
  Variables leftover = kTorchrun;
  leftover.erase("TORCHELASTIC_RUN_ID");
  EXPECT_FALSE(detect(leftover).agent_store);
  EXPECT_EQ(detect(leftover).launcher, "environment");
}

TEST(Launch, LaunchSh) {
  const Launch launch = detect({{"RANK", "1"},
                                {"WORLD_SIZE", "2"},
                                {"LOCAL_RANK", "1"},
                                {"LOCAL_WORLD_SIZE", "2"},
                                {"MGP_LAUNCHER", "launch.sh"},
                                {"MGP_SHARE_GPU", "1"},
                                {"MGP_RENDEZVOUS_FILE", "/tmp/run/address"}});
  EXPECT_EQ(launch.launcher, "launch.sh");
  EXPECT_TRUE(launch.share_gpu);
  EXPECT_EQ(launch.rendezvous_file, "/tmp/run/address");
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_EQ(launch.master_port, 0);
}

TEST(Launch, LocalRankIsNotTheGlobalRank) {
  const Launch launch = detect({{"RANK", "5"}, {"LOCAL_RANK", "1"}, {"WORLD_SIZE", "8"}});
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.master_addr, "") << "there are other hosts: nobody said where rank 0 is";
  EXPECT_TRUE(contains(launch.matched, {"LOCAL_WORLD_SIZE=2 (LOCAL_WORLD_SIZE is not set, assumed)"}));
}

TEST(Launch, LocalRankIsAssumedOnlyOnOneHost) {
  const Launch launch = detect({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_TRUE(contains(launch.matched, {"LOCAL_RANK is not set, assumed"}));
  EXPECT_TRUE(
      contains(refusal({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}}), {"RANK=1", "LOCAL_RANK"}));
  EXPECT_TRUE(contains(refusal({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}), {"set LOCAL_RANK"}));
}

TEST(Launch, OpenMpi) {
  const Launch launch = detect(kOpenMpi);
  EXPECT_EQ(launch.launcher, "Open MPI");
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 3);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.local_size, 3);
  EXPECT_EQ(launch.store_prefix, "openmpi/1234");
}

TEST(Launch, Hydra) {
  EXPECT_EQ(detect(kHydra).launcher, "MPICH");
  EXPECT_EQ(detect(kHydra).rank, 1);
  EXPECT_EQ(detect(kHydra).local_size, 4);
  EXPECT_EQ(detect(kHydra + Variables{{"I_MPI_ROOT", "/opt/intel"}}).launcher, "Intel MPI");
  EXPECT_EQ(detect({{"PMIX_RANK", "1"}}).launcher, "none") << "PMIX_RANK alone tells no size";
}

TEST(Launch, Srun) {
  const Launch launch = detect(kSrun);
  EXPECT_EQ(launch.launcher, "Slurm");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 7);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.local_size, 3);
  EXPECT_EQ(launch.master_addr, "gnode10");
  EXPECT_EQ(launch.master_port, 10000 + 200505 * 16 % 20000);
  const Launch next_step = detect(kSrun + Variables{{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(next_step.master_port, launch.master_port) << "two steps of a job can run at once";
}

TEST(Launch, SrunSizeFromOtherVariables) {
  Variables variables = kSrun;
  variables.erase("SLURM_NTASKS");
  EXPECT_EQ(detect(variables).world_size, 7);
  variables.erase("SLURM_STEP_NUM_TASKS");
  EXPECT_EQ(detect(variables).world_size, 7);  // 3 + 3 + 1
  variables.erase("SLURM_STEP_TASKS_PER_NODE");
  EXPECT_TRUE(contains(refusal(variables), {"SLURM_NTASKS is not"}));
  // Set by hand, without a job: taken as they are.
  const Launch by_hand = detect({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(by_hand.launcher, "Slurm");
  EXPECT_EQ(by_hand.world_size, 2);
  EXPECT_EQ(by_hand.master_addr, "127.0.0.1");
}

TEST(Launch, SlurmShellsAreNotSrun) {
  EXPECT_EQ(detect(kBatchShell).launcher, "none");
  EXPECT_EQ(detect(kBatchShell).world_size, 1);
  for (const char* step : {"4294967290", "4294967291", "batch"}) {
    EXPECT_EQ(detect(kBatchShell + Variables{{"SLURM_STEP_ID", step}}).launcher, "none") << step;
  }
  const Variables interactive = {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  EXPECT_EQ(detect(kBatchShell + interactive).launcher, "none");
  // salloc without srun: sizes, but no task number.
  EXPECT_EQ(detect({{"SLURM_JOB_ID", "1"}, {"SLURM_NTASKS", "4"}}).world_size, 1);
}

TEST(Launch, SlurmIsIgnoredUnderANearerLauncher) {
  // mpirun in a batch script or in an allocation: Slurm's numbers are those of the shell or of Open MPI's daemon.
  EXPECT_EQ(detect(kOpenMpi + kBatchShell).launcher, "Open MPI");
  EXPECT_EQ(detect(kOpenMpi + kBatchShell).rank, 2);
  const Variables daemon = {{"SLURM_JOB_ID", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"},
                            {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"},
                            {"PMI_RANK", "1"},     {"PMI_SIZE", "2"}};
  EXPECT_EQ(detect(kOpenMpi + daemon).world_size, 3) << "PMI_RANK there is Slurm's, for the daemon";
  EXPECT_EQ(detect(kTorchrun + daemon).world_size, 4);
  EXPECT_EQ(detect(kHydra + daemon + kHydra).launcher, "MPICH");
  // srun with its PMI plugin and no mpirun: Slurm's row, which knows the local rank.
  EXPECT_EQ(detect(daemon).launcher, "Slurm");
  EXPECT_EQ(detect(daemon).local_rank, 0);
}

TEST(Launch, AWrapperMayLeaveTheLocalRankToTheLauncherBelow) {
  const Launch mpi = detect(kOpenMpi + Variables{{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "node1"}});
  EXPECT_EQ(mpi.launcher, "environment");
  EXPECT_EQ(mpi.local_rank, 2);
  EXPECT_EQ(mpi.local_size, 3);
  const Launch slurm = detect(kSrun + Variables{{"RANK", "5"}, {"WORLD_SIZE", "7"}, {"MASTER_ADDR", "node1"}});
  EXPECT_EQ(slurm.local_rank, 2);
  EXPECT_EQ(slurm.local_size, 3);
  EXPECT_EQ(slurm.master_addr, "node1");
}

TEST(Launch, ContradictionsShowBoth) {
  const std::string line = refusal(kOpenMpi + Variables{{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "0"}});
  EXPECT_TRUE(contains(line, {"RANK=0 WORLD_SIZE=3", "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3", "disagree"}));
  EXPECT_TRUE(contains(refusal(kOpenMpi + kHydra), {"OMPI_COMM_WORLD_SIZE=3", "PMI_SIZE=4"}));
  EXPECT_TRUE(contains(refusal(kTorchrun + kOpenMpi), {"(torchrun) and"}));
  EXPECT_EQ(refusal(kOpenMpi + Variables{{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "2"}}), "") << "they agree";
}

TEST(Launch, MissingAndBadNumbers) {
  EXPECT_EQ(refusal({{"RANK", "1"}}), "RANK=1 is set but WORLD_SIZE is not: set both, or neither");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "4"}}), "WORLD_SIZE=4 is set but RANK is not: set both, or neither");
  EXPECT_TRUE(contains(refusal({{"LOCAL_RANK", "1"}}), {"RANK and WORLD_SIZE are not"}));
  EXPECT_TRUE(contains(refusal({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), {"RANK is 'x'"}));
  EXPECT_TRUE(contains(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), {"RANK is '-1'"}));
  EXPECT_TRUE(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}), {"WORLD_SIZE is '99999999999'"}));
  EXPECT_TRUE(contains(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), {"at least 1 rank"}));
  EXPECT_EQ(refusal({{"RANK", "4"}, {"WORLD_SIZE", "4"}}), "RANK is 4 but WORLD_SIZE is 4; ranks are 0..3");
  const Variables world = {{"RANK", "1"}, {"WORLD_SIZE", "4"}};
  EXPECT_TRUE(contains(refusal(world + Variables{{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}), {"0..1"}));
  EXPECT_TRUE(contains(refusal(world + Variables{{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "8"}}), {"1..4"}));
  EXPECT_EQ(detect({{"RANK", ""}, {"WORLD_SIZE", ""}}).launcher, "none") << "empty counts as unset";
}

TEST(Launch, PortRange) {
  for (const char* port : {"66660", "0", "-1", "65536", "29500x", "99999999999999999999"}) {
    EXPECT_EQ(refusal({{"MASTER_PORT", port}}), std::string("MASTER_PORT is ") + port + "; a port is 1..65535");
  }
  EXPECT_EQ(detect({{"MASTER_PORT", "65535"}}).master_port, 65535);
  EXPECT_EQ(detect({{"MASTER_PORT", "1"}}).master_port, 1);
}

TEST(Launch, SlurmCounts) {
  EXPECT_EQ(expand_slurm_counts("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(expand_slurm_counts("1(x2)"), (std::vector<int>{1, 1}));
  EXPECT_EQ(expand_slurm_counts("4"), (std::vector<int>{4}));
  EXPECT_EQ(expand_slurm_counts("1,2,3(x2)"), (std::vector<int>{1, 2, 3, 3}));
  for (const char* text : {"", "x", "2(x", "2(x0)", "2(3)", "2,", "2(x3)1", "-1", "2(x99999999)"}) {
    EXPECT_THROW(expand_slurm_counts(text), UsageError) << text;
  }
}

TEST(Launch, FirstSlurmHost) {
  EXPECT_EQ(first_slurm_host("node[03-05,9],gpu1"), "node03");
  EXPECT_EQ(first_slurm_host("gnode[10,20]"), "gnode10");
  EXPECT_EQ(first_slurm_host("node[7]"), "node7");
  EXPECT_EQ(first_slurm_host("alpha,beta"), "alpha");
  EXPECT_EQ(first_slurm_host("rack[1-2]n[03-05]"), "rack1n03");
  EXPECT_EQ(first_slurm_host("node[1-4].cluster"), "node1.cluster");
  EXPECT_EQ(first_slurm_host(""), "");
  EXPECT_EQ(first_slurm_host("node["), "");
}

}  // namespace
}  // namespace mgp

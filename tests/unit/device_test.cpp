// Choice of device, CPU threads, facts of devices (trials B67, B69, B76, B80). Runs with and without a GPU.
#include "common/device.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <map>

#include "common/error.hpp"
#include "tests/unit/helpers.hpp"

namespace mgp {
namespace {

using namespace std::chrono_literals;

Launch local_launch(int local_rank, int local_size, bool share = false) {
  Launch launch;
  launch.rank = launch.local_rank = local_rank;
  launch.world_size = launch.local_size = local_size;
  launch.host = "testhost";
  launch.share_gpu = share;
  return launch;
}

std::string refusal(const Launch& launch, const std::string& request, int visible) {
  try {
    choose_device(launch, request, visible);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Device, AutoTakesAGpuWhereThereIsOne) {
  EXPECT_EQ(choose_device(local_launch(0, 1), "auto", -1).str(), "cpu");
  EXPECT_EQ(choose_device(local_launch(0, 4), "auto", 0).str(), "cpu");
  EXPECT_EQ(choose_device(local_launch(1, 2), "auto", 2).str(), "cuda:1");
  EXPECT_EQ(choose_device(local_launch(1, 2), "cpu", 2).str(), "cpu");
}

TEST(Device, TheLocalRankPicksTheGpu) {
  Launch launch = local_launch(1, 4);
  launch.rank = 5;
  launch.world_size = 8;
  EXPECT_EQ(choose_device(launch, "cuda", 4).str(), "cuda:1");
  EXPECT_EQ(choose_device(local_launch(3, 4), "cuda", 1).str(), "cuda:0") << "each rank may see a GPU of its own";
  EXPECT_EQ(choose_device(local_launch(3, 4, true), "cuda", 2).str(), "cuda:1");
  EXPECT_EQ(choose_device(local_launch(3, 4, true), "0", 2).str(), "cuda:0");
  EXPECT_EQ(choose_device(local_launch(0, 1), "1", 2).str(), "cuda:1");
}

TEST(Device, MoreRanksThanGpus) {
  EXPECT_EQ(
      refusal(local_launch(0, 4), "cuda", 2),
      "4 ranks on this host but 2 visible GPUs: start at most 2, or share them with scripts/launch.sh --share-gpu");
  EXPECT_TRUE(contains(refusal(local_launch(3, 4), "auto", 2), {"4 ranks", "2 visible GPUs"}));
}

TEST(Device, ImpossibleRequests) {
  EXPECT_EQ(refusal(local_launch(0, 1), "3", 2), "--device 3: this process sees 2 GPUs (0..1)");
  EXPECT_EQ(refusal(local_launch(0, 1), "1", 1), "--device 1: this process sees 1 GPU (0)");
  EXPECT_EQ(refusal(local_launch(0, 1), "cuda", -1),
            "--device cuda: this build has no CUDA (configure with -DMGP_CUDA=ON)");
  EXPECT_TRUE(contains(refusal(local_launch(0, 1), "cuda", 0), {"no GPU is visible", "CUDA_VISIBLE_DEVICES"}));
  EXPECT_TRUE(contains(refusal(local_launch(0, 1), "0", 0), {"--device 0: no GPU is visible"}));
  EXPECT_TRUE(
      contains(refusal(local_launch(0, 2), "0", 2), {"--device 0 would put 2 ranks on one GPU", "--share-gpu"}));
  for (const char* request : {"gpu", "", "-1", "cuda:0", "1x", "99999999999"}) {
    EXPECT_EQ(refusal(local_launch(0, 1), request, 2),
              std::string("--device ") + request + ": use auto, cpu, cuda or a number");
  }
}

TEST(Device, ClaimingTheCpuAlwaysWorks) {
  EXPECT_EQ(claim_device(local_launch(0, 1), "cpu").str(), "cpu");
  EXPECT_THROW(claim_device(local_launch(0, 1), "gpu"), UsageError);
  EXPECT_THROW(claim_device(local_launch(0, 1), "100"), UsageError) << "no host has 101 GPUs";
}

TEST(Threads, CoresAreSharedByTheRanksOfAHost) {
  EXPECT_EQ(thread_limit("", 8, 1), 8);
  EXPECT_EQ(thread_limit("", 8, 3), 2);
  EXPECT_EQ(thread_limit("", 2, 4), 1);
  EXPECT_EQ(thread_limit("1", 8, 2), 1);
  EXPECT_EQ(thread_limit("64", 8, 2), 4) << "never more than the rank's share";
  EXPECT_EQ(thread_limit("2,4", 8, 1), 2);
  EXPECT_EQ(thread_limit("99999999999", 8, 1), 8);
  for (const char* text : {"0", "-1", "many", "2x"}) EXPECT_THROW(thread_limit(text, 8, 1), UsageError) << text;
}

TEST(Threads, LibTorchIsToldTheLimit) {
  const int before = at::get_num_threads();
  const int limit = limit_threads(local_launch(0, 1));
  EXPECT_GE(limit, 1);
  EXPECT_LE(limit, usable_cores());
  EXPECT_EQ(at::get_num_threads(), limit);
  EXPECT_EQ(limit_threads(local_launch(0, 1000)), 1) << "a second call is harmless";
  at::set_num_threads(before);
}

TEST(Threads, TheAffinityMaskCounts) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_LE(usable_cores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(usable_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

/// A folder in which files of control groups are laid out.
class FakeCgroups : public ScratchFolder {
 public:
  void write(const std::string& name, const std::string& text) const {
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
      mkdir(file(name.substr(0, slash)).c_str(), 0755);
    }
    std::ofstream(file(name)) << text << "\n";
  }
  const std::string& root() const { return path(); }
};

TEST(Threads, QuotaOfControlGroups) {
  const FakeCgroups groups;
  EXPECT_EQ(cgroup_cpu_quota(groups.root(), "0::/job/step\n"), 0) << "nothing there: no limit";
  groups.write("job/step/cpu.max", "max 100000");
  EXPECT_EQ(cgroup_cpu_quota(groups.root(), "0::/job/step\n"), 0);
  groups.write("job/cpu.max", "250000 100000");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(groups.root(), "0::/job/step\n"), 2.5) << "the limit of a parent counts";
  EXPECT_EQ(cgroup_cpu_quota(groups.root(), "0::/\n"), 0);
  groups.write("cpu.max", "150000 100000");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(groups.root(), "0::/not/mounted/here\n"), 1.5) << "a container sees its own root";
  EXPECT_EQ(cgroup_cpu_quota(groups.root(), "damaged\n::\n"), cgroup_cpu_quota(groups.root(), "0::/\n"));
}

TEST(Threads, QuotaOfControlGroupsVersion1) {
  const FakeCgroups groups;
  const std::string self = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n";
  groups.write("cpu,cpuacct/job/cpu.cfs_quota_us", "-1");
  groups.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpu_quota(groups.root(), self), 0);
  groups.write("cpu/cpu.cfs_quota_us", "50000");
  groups.write("cpu/cpu.cfs_period_us", "100000");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(groups.root(), self), 0.5);
}

TEST(Facts, OfTheCpu) {
  const DeviceFacts facts = describe_device(local_launch(0, 1), c10::Device(c10::DeviceType::CPU), 3);
  EXPECT_EQ(facts.device, "cpu");
  EXPECT_EQ(facts.pid, getpid());
  EXPECT_EQ(facts.host, "testhost");
  EXPECT_EQ(facts.threads, 3);
  EXPECT_EQ(facts.physical, -1);
  EXPECT_TRUE(facts.uuid.empty());
  EXPECT_FALSE(facts.name.empty());
  EXPECT_GT(facts.total_bytes, 0);
  EXPECT_GT(facts.free_bytes, 0);
  EXPECT_LE(facts.free_bytes, facts.total_bytes);
}

DeviceFacts gpu_facts(int rank, const std::string& host, const std::string& uuid) {
  DeviceFacts facts;
  facts.rank = rank;
  facts.pid = 4711 + rank;
  facts.host = host;
  facts.device = "cuda:0";
  facts.physical = 3;
  facts.uuid = uuid;
  facts.pci = "0000:1b:00.0";
  facts.name = "NVIDIA H200";
  facts.total_bytes = 150'754'820'096;
  facts.free_bytes = 150'000'000'000;
  facts.threads = 2;
  return facts;
}

TEST(Facts, SerializationKeepsEverything) {
  DeviceFacts facts = gpu_facts(7, "node 1 \"a\"\n{\\}", "GPU-0123");
  facts.name = "Grafikkarte f\xc3\xbcr 1.000 \xe2\x82\xac, 'x' = {1}";
  const DeviceFacts back = parse_device_facts(serialize(facts));
  EXPECT_EQ(back.rank, facts.rank);
  EXPECT_EQ(back.pid, facts.pid);
  EXPECT_EQ(back.host, facts.host);
  EXPECT_EQ(back.device, facts.device);
  EXPECT_EQ(back.physical, facts.physical);
  EXPECT_EQ(back.uuid, facts.uuid);
  EXPECT_EQ(back.pci, facts.pci);
  EXPECT_EQ(back.name, facts.name);
  EXPECT_EQ(back.total_bytes, facts.total_bytes);
  EXPECT_EQ(back.free_bytes, facts.free_bytes);
  EXPECT_EQ(back.threads, facts.threads);
  facts.host = "not utf-8: \xff";
  EXPECT_TRUE(contains(parse_device_facts(serialize(facts)).host, {"not utf-8: "}));
}

TEST(Facts, DamagedTextIsAnError) {
  EXPECT_THROW(parse_device_facts(""), RunError);
  EXPECT_THROW(parse_device_facts("{\"rank\": 1}"), RunError);
  EXPECT_THROW(parse_device_facts("{\"rank\": \"one\"}"), RunError);
}

/// exchange_devices() by several ranks, as threads; the line with which each is refused, "" if not.
std::vector<std::string> exchange(const std::vector<DeviceFacts>& all, bool share) {
  const ScratchFolder folder;
  const int size = static_cast<int>(all.size());
  std::vector<std::future<std::string>> results;
  for (int rank = 0; rank < size; ++rank) {
    results.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
      Launch launch = local_launch(rank, size);
      launch.rendezvous_file = folder.file("address");
      const auto meeting = Rendezvous::meet(launch, 20s);
      std::string line;
      try {
        const auto seen = exchange_devices(all[static_cast<size_t>(rank)], share, meeting.get());
        for (int r = 0; r < size; ++r) EXPECT_EQ(seen.at(static_cast<size_t>(r)).rank, r);
      } catch (const UsageError& error) {
        line = error.what();
      }
      meeting->goodbye();
      return line;
    }));
  }
  std::vector<std::string> lines;
  for (auto& result : results) lines.push_back(result.get());
  return lines;
}

TEST(Facts, TwoRanksOnOneGpuAreNamed) {
  const std::vector<DeviceFacts> clash = {gpu_facts(0, "node1", "GPU-aaaa"), gpu_facts(1, "node1", "GPU-bbbb"),
                                          gpu_facts(2, "node1", "GPU-aaaa")};
  for (const std::string& line : exchange(clash, false)) {
    EXPECT_TRUE(contains(line, {"ranks 0 and 2", "node1", "GPU-aaaa", "--share-gpu"}));
  }
  for (const std::string& line : exchange(clash, true)) EXPECT_EQ(line, "");
  const std::vector<DeviceFacts> cpus = {gpu_facts(0, "node1", ""), gpu_facts(1, "node1", "")};
  for (const std::string& line : exchange(cpus, false)) EXPECT_EQ(line, "") << "ranks on CPUs have no uuid";
}

TEST(Facts, AloneThereIsNothingToExchange) {
  const auto seen = exchange_devices(gpu_facts(0, "node1", "GPU-aaaa"), false, nullptr);
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].uuid, "GPU-aaaa");
}

TEST(Peak, ByNameAndPrecision) {
  EXPECT_EQ(peak_tflops("NVIDIA H200", "bf16"), 989);
  EXPECT_EQ(peak_tflops("NVIDIA H200", "tf32"), 494.5);
  EXPECT_EQ(peak_tflops("NVIDIA H200", "fp32"), 67);
  EXPECT_EQ(peak_tflops("NVIDIA H200", "fp64"), 67);
  EXPECT_EQ(peak_tflops("NVIDIA H100 80GB HBM3", "bf16"), 989);
  EXPECT_EQ(peak_tflops("NVIDIA H100 PCIe", "bf16"), 756);
  EXPECT_EQ(peak_tflops("NVIDIA A100-SXM4-80GB", "bf16"), 312);
  EXPECT_EQ(peak_tflops("NVIDIA A100-PCIE-40GB", "tf32"), 156);
  EXPECT_EQ(peak_tflops("Tesla V100-SXM2-16GB", "fp32"), 15.7);
  EXPECT_EQ(peak_tflops("Tesla V100-PCIE-32GB", "fp32"), 14);
  EXPECT_EQ(peak_tflops("Tesla V100-SXM2-16GB", "bf16"), 0) << "no bf16 there";
  EXPECT_EQ(peak_tflops("NVIDIA L4", "bf16"), 121);
  EXPECT_EQ(peak_tflops("NVIDIA L40S", "bf16"), 362);
  EXPECT_EQ(peak_tflops("NVIDIA GeForce RTX 3090", "bf16"), 71);
  EXPECT_EQ(peak_tflops("NVIDIA GeForce RTX 4090", "fp32"), 82.6);
  EXPECT_EQ(peak_tflops("NVIDIA B200", "bf16"), 2250);
}

TEST(Peak, UnknownIsZero) {
  for (const char* name : {"", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
                           "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD EPYC", "NVIDIA GeForce RTX 3090 Ti"}) {
    EXPECT_EQ(peak_tflops(name, "bf16"), 0) << name;
  }
  EXPECT_EQ(peak_tflops("NVIDIA H200", "int8"), 0);
}

TEST(Environment, LinesAreOneLineEach) {
  std::map<std::string, std::string> values;
  for (const auto& [name, value] : environment_lines()) {
    EXPECT_FALSE(value.empty()) << name;
    EXPECT_EQ(value.find('\n'), std::string::npos) << name;
    EXPECT_TRUE(values.emplace(name, value).second) << name << " is there twice";
  }
  for (const char* name : {"compiler", "LibTorch", "CLI11", "fmt", "CPU", "cores", "memory"}) {
    EXPECT_EQ(values.count(name), 1U) << name;
  }
#if MGP_WITH_NCCL
  EXPECT_EQ(values["NCCL header"], values["NCCL library"]);
  EXPECT_EQ(values["NCCL copies loaded"], "1");
  EXPECT_TRUE(contains(values["NCCL loaded from"], {"libnccl"}));
#endif
}

TEST(Environment, TheNcclThatWasLoadedFitsTheHeader) { EXPECT_NO_THROW(check_nccl_version()); }

}  // namespace
}  // namespace mgp

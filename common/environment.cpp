// What this program was built with, what it was loaded with, and whether the two fit.
#include <dlfcn.h>

#include <fstream>
#include <set>

#if MGP_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif
#if MGP_WITH_NCCL
#include <nccl.h>
#endif
#if MGP_WITH_MPI
#include <mpi.h>
#endif
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/Version.hpp>
#include <nlohmann/json.hpp>

#include "common/device.hpp"
#include "common/error.hpp"

namespace mgp {
namespace {

std::string gibibytes(int64_t bytes) {
  return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0));
}

std::string fmt_version() {
  return fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
}

#if MGP_WITH_CUDA
std::string cuda_version(int number) {
  return number == 0 ? "none" : fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}
#endif

#if MGP_WITH_NCCL
/// NCCL's numbers are 1000 * major + ... up to 2.8 and 10000 * major + ... from 2.9 on.
std::string nccl_version(int number) {
  if (number < 10000) return fmt::format("{}.{}.{}", number / 1000, number % 1000 / 100, number % 100);
  return fmt::format("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
}

/// The file from which ncclGetVersion was loaded.
std::string nccl_path() {
  // Looked up by name: the address of the function itself may be a stub in this executable.
  void* symbol = dlsym(RTLD_DEFAULT, "ncclGetVersion");
  Dl_info info{};
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return "unknown";
  return info.dli_fname;
}

/// All files named libnccl.so* that are mapped into this process. More than one is trouble.
std::set<std::string> mapped_nccl() {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash != std::string::npos && line.find("/libnccl.so") != std::string::npos) files.insert(line.substr(slash));
  }
  return files;
}
#endif

#if MGP_WITH_MPI
std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "unknown";  // allowed before MPI_Init
  const std::string line(text, static_cast<size_t>(length));
  return line.substr(0, line.find_first_of("\r\n,"));  // the rest tells who built it
}
#endif

}  // namespace

std::vector<std::pair<std::string, std::string>> environment_lines() {
  std::vector<std::pair<std::string, std::string>> lines;
  const auto add = [&](const char* name, const std::string& value) { lines.emplace_back(name, value); };
#if defined(__clang__)
  add("compiler", "clang " __clang_version__);
#else
  add("compiler", "g++ " __VERSION__);
#endif
  add("LibTorch", TORCH_VERSION);
#if MGP_WITH_CUDA
  int runtime = 0;
  int driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);  // 0 without a driver
  add("CUDA header", cuda_version(CUDART_VERSION));
  add("CUDA runtime", cuda_version(runtime));
  add("CUDA driver", driver == 0 ? "none on this machine" : "up to CUDA " + cuda_version(driver));
#else
  add("CUDA", "not in this build");
#endif
#if MGP_WITH_NCCL
  int nccl = 0;
  ncclGetVersion(&nccl);
  add("NCCL header", nccl_version(NCCL_VERSION_CODE));
  add("NCCL library", nccl_version(nccl));
  add("NCCL loaded from", nccl_path());
  add("NCCL copies loaded", std::to_string(mapped_nccl().size()));
#else
  add("NCCL", "not in this build");
#endif
#if MGP_WITH_MPI
  const std::string mpi = mpi_library();
  add("MPI library", mpi);
  add("MPI kind", mpi.rfind("Open MPI", 0) == 0 ? "Open MPI" : "other");
#else
  add("MPI", "not in this build");
#endif
  add("CLI11", CLI11_VERSION);
  add("fmt", fmt_version());
  add("nlohmann_json",
      fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH));
  add("CPU", cpu_name());
  add("cores", std::to_string(usable_cores()));
  const HostMemory memory = host_memory();
  add("memory", fmt::format("{}, {} available", gibibytes(memory.total_bytes), gibibytes(memory.available_bytes)));
#if MGP_WITH_CUDA
  const int gpus = c10::cuda::device_count();
  add("GPUs visible", std::to_string(gpus));
  for (int index = 0; index < gpus; ++index) {
    cudaDeviceProp properties{};  // no context is made for this
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    lines.emplace_back(fmt::format("GPU {}", index),
                       fmt::format("{}, {}, compute capability {}.{}, {} SMs", properties.name,
                                   gibibytes(static_cast<int64_t>(properties.totalGlobalMem)), properties.major,
                                   properties.minor, properties.multiProcessorCount));
  }
#endif
  return lines;
}

void check_nccl_version() {
#if MGP_WITH_NCCL
  int loaded = 0;
  const ncclResult_t result = ncclGetVersion(&loaded);
  if (result != ncclSuccess) {
    throw UsageError(
        fmt::format("the NCCL library in {} does not tell its version: {}", nccl_path(), ncclGetErrorString(result)),
        /*every_rank=*/true);
  }
  if (loaded == NCCL_VERSION_CODE) return;
  throw UsageError(fmt::format("built with the header of NCCL {} but loaded NCCL {} from {}: take that folder out of "
                               "LD_LIBRARY_PATH and LD_PRELOAD, or build again with that NCCL",
                               nccl_version(NCCL_VERSION_CODE), nccl_version(loaded), nccl_path()),
                   /*every_rank=*/true);
#endif
}

}  // namespace mgp

// Named ranges for Nsight Systems (nsys profile -t cuda,nvtx,nccl ...). Without a profiler attached each call costs some
// nanoseconds; without CUDA's header it is nothing.
#pragma once

#if MGP_WITH_CUDA && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define MGP_WITH_NVTX 1
#else
#define MGP_WITH_NVTX 0
#endif

namespace mgp {

/// Opens a range on this thread; kernels that are launched inside it belong to it.
inline void nvtx_push([[maybe_unused]] const char* name) {
#if MGP_WITH_NVTX
  nvtxRangePushA(name);
#endif
}

/// Closes the range that was opened last on this thread.
inline void nvtx_pop() {
#if MGP_WITH_NVTX
  nvtxRangePop();
#endif
}

/// The range of a scope.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtx_push(name); }
  ~NvtxRange() { nvtx_pop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace mgp

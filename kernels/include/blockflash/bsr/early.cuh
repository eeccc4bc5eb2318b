// The beginning of the persistent kernels of BSR matmul, which look up their first tile early.
#pragma once

#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {

// Begins a kernel, by all threads of a CTA: one fetches the tensor maps and initialises the
// barriers, which the cluster may use from here on. The predecessors in the stream may still be
// running. The pattern was complete before the host had it and never changes (`BsrIndices`), so it
// may be read at once, which takes a microsecond otherwise, and so may values that are settled.
// Whoever touches anything else, such as B, C, other values, the workspace or the tile counter,
// waits for the predecessors before.
template <class Cluster, class Barriers, class... Maps>
__device__ __forceinline__ void begin_early(const Barriers& barriers, const Maps&... maps) {
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    (ptx::prefetch_tensor_map(&maps), ...);
    barriers.init();
  }
  Cluster::begin();
}

// Waits for the predecessors at its first call.
struct Predecessors {
  bool running = true;

  __device__ __forceinline__ void wait() {
    if (running) ptx::wait_for_predecessors();
    running = false;
  }
};

}  // namespace blockflash

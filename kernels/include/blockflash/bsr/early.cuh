// The beginning of the persistent kernels of BSR matmul, which look up their first tile early.
#pragma once

#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {

// Waits for all lines of the parameters in the constant cache, a line per warp: one after another,
// each would take the latency of memory when a launch finds nothing in its caches.
template <class Params>
__device__ __forceinline__ void touch_parameters(const Params& params) {
  constexpr int kLine = 128;
  const int at = threadIdx.x / 32 * kLine;
  if (at >= static_cast<int>(sizeof(Params))) return;
  const uint32_t word = reinterpret_cast<const uint32_t*>(&params)[at / 4];
  // A use that does nothing.
  asm volatile(
      "{\n\t.reg .pred never;\n\tsetp.eq.u32 never, %0, 0xfffffffd;\n\t"
      "@never nanosleep.u32 0;\n\t}" ::"r"(word));
}

// Begins a kernel, by all threads of a CTA: one fetches the tensor maps and initialises the
// barriers, which the cluster may use from here on. The predecessors in the stream may still be
// running. The pattern was complete before the host had it and never changes (`BsrIndices`), so it
// may be read at once, which takes a microsecond otherwise, and so may values that are settled.
// Whoever touches anything else, such as B, C, other values, the workspace or the tile counter,
// waits for the predecessors before.
template <class Cluster, class Params, class Barriers, class... Maps>
__device__ __forceinline__ void begin_early(const Params& params, const Barriers& barriers,
                                            const Maps&... maps) {
  ptx::launch_dependents();
  touch_parameters(params);
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

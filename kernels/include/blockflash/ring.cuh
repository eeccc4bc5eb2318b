// The ring of pipeline stages between the producer and the consumer warpgroups of a persistent
// kernel, and the two slots through which tiles are announced ahead.
#pragma once

#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {

// The mbarriers of such a kernel, 8 bytes each: "full" and "empty" of each stage, "announced" and
// "wanted" of each slot. Tile n of a CTA uses slot n % 2, and each slot is used in turns, so the
// phase of its barriers follows from n.
template <int stages>
struct RingBarriers {
  static constexpr int kBytes = 16 * stages + 32;
  uint32_t full, empty, announced, wanted;

  __device__ __forceinline__ explicit RingBarriers(uint32_t at)
      : full(at), empty(at + 8 * stages), announced(at + 16 * stages), wanted(announced + 16) {}

  // `readers` arrive when they have read a stage, `askers` when they have read the previous tile of
  // a slot (consumers) or are about to need its next one (producers).
  __device__ __forceinline__ void init(int readers, int askers) const {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, readers);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(announced + 8 * i, 1);
      ptx::mbarrier_init(wanted + 8 * i, askers);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ uint32_t announced_of(int n) const { return announced + n % 2 * 8; }
  __device__ __forceinline__ uint32_t wanted_of(int n) const { return wanted + n % 2 * 8; }
  __device__ __forceinline__ void wait_announced(int n) const {
    ptx::mbarrier_wait(announced_of(n), n / 2 & 1);
  }
  // Nothing has to be waited for before the first tile.
  __device__ __forceinline__ void wait_wanted(int n) const {
    ptx::mbarrier_wait(wanted_of(n), (n - 1) / 2 & 1);
  }
};

// Begins a persistent kernel, by all threads of a CTA: one fetches the tensor maps and initialises
// the barriers, which the cluster may use from here on. The predecessors in the stream may have
// written any operand, or still read the output.
template <class Cluster, class Barriers, class... Maps>
__device__ __forceinline__ void begin_kernel(const Barriers& barriers, const Maps&... maps) {
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    (ptx::prefetch_tensor_map(&maps), ...);
    barriers.init();
  }
  Cluster::begin();
  ptx::wait_for_predecessors();
}

// Where a warpgroup is in the ring. A consumer starts with the parity 0 of "full", a producer with
// the parity 1 of "empty", which a fresh barrier passes at once.
template <int stages>
struct RingPosition {
  int stage;
  uint32_t parity;

  // Waits for this stage at the first of the ring's "full" or "empty" barriers.
  __device__ __forceinline__ void wait(uint32_t barriers) const {
    ptx::mbarrier_wait(barriers + 8 * stage, parity);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

}  // namespace blockflash

// How the scheduler of a persistent CTA hands tiles to the other warps: they request the next tile
// some steps before they need it, and the scheduler looks it up and publishes it in a slot of
// shared memory. So the lookup is hidden, and tiles are still taken late enough to balance the
// load.
#pragma once

#include "blockflash/pipeline.cuh"

namespace blockflash {

// The mbarriers of the slots: tile n has slot n % slots. "published" completes when the slot
// describes tile n; "requested" when nobody reads the slot any more (consumers have taken the tile
// before from it) and tile n is about to be needed (producers).
template <int slots>
struct TileBarriers {
  static constexpr int kBytes = 2 * kBarrierBytes * slots;
  uint32_t published, requested;

  __device__ __forceinline__ explicit TileBarriers(uint32_t at)
      : published(at), requested(at + kBarrierBytes * slots) {}

  __device__ __forceinline__ void init(int requesters) const {
    for (int i = 0; i < slots; ++i) {
      ptx::mbarrier_init(published + kBarrierBytes * i, 1);
      ptx::mbarrier_init(requested + kBarrierBytes * i, requesters);
    }
  }

  __device__ __forceinline__ uint32_t published_of(int n) const {
    return published + n % slots * kBarrierBytes;
  }
  __device__ __forceinline__ uint32_t requested_of(int n) const {
    return requested + n % slots * kBarrierBytes;
  }
  __device__ __forceinline__ void wait_published(int n) const {
    ptx::mbarrier_wait(published_of(n), n / slots & 1);
  }
  // By the scheduler, for n > 0: nobody requests the first tile.
  __device__ __forceinline__ void wait_requested(int n) const {
    ptx::mbarrier_wait(requested_of(n), (n - 1) / slots & 1);
  }
};

// The mbarriers of a persistent kernel with one ring and two slots.
template <int stages>
struct PersistentBarriers : PipelineBarriers<stages>, TileBarriers<2> {
  static constexpr int kBytes = PipelineBarriers<stages>::kBytes + TileBarriers<2>::kBytes;

  __device__ __forceinline__ explicit PersistentBarriers(uint32_t at)
      : PipelineBarriers<stages>(at), TileBarriers<2>(at + PipelineBarriers<stages>::kBytes) {}

  __device__ __forceinline__ uint32_t end() const { return this->full + kBytes; }
  __device__ __forceinline__ void init(int readers, int requesters) const {
    PipelineBarriers<stages>::init(readers);
    TileBarriers<2>::init(requesters);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace blockflash

// Attention of few queries to the keys of a cache, contiguous or paged, for sm_80 and newer.
//
// The products are transposed: keys, then columns of V, are the M of mma.sync, and 8 to 32 rows
// (queries times heads that share keys) are its N. A warp is alone with its keys: it copies, every
// fourth step of 16, into a ring of its own and keeps sums of its own, so the main loop has no
// barrier among warps. The README says why.
#include "blockflash/attention/soft_cap.cuh"
#include "blockflash/config.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"
#include "loader.cuh"
#include "output.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {

// Waits for the oldest step, behind which `younger` ones, at most `most`, were started.
template <int most>
__device__ __forceinline__ void wait_for_oldest(int younger) {
  if (younger >= most)
    ptx::cp_async_wait_group<most>();
  else if constexpr (most > 0)
    wait_for_oldest<most - 1>(younger);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_decode_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int kStages = Config::stages;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kRingBytes = kStages * kStageBytes;
  unsigned char* const ring = smem + warp * kRingBytes;
  unsigned char* const q_tile = smem + Config::warps * kRingBytes;
  Shared& shared = *reinterpret_cast<Shared*>(q_tile + kQBytes);
  const uint32_t smem_at = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t ring_smem = smem_at + warp * kRingBytes;

  ptx::wait_for_predecessors();

  // One warp takes the items for all, since lengths that change meanwhile could make warps disagree
  // about how often they meet at a barrier. Item n of this CTA is announced in slot n % 2 while
  // item n - 1 begins.
  const auto announce = [&](int n) {
    DecodeItem& slot = shared.items[n % 2];
    const int number = shared.number;
    ItemWalk<Config::rows> walk = shared.walk;
    const bool found = number >= 0 && walk.find(p, number, slot, lane);
    if (lane > 0) return;
    shared.walk = walk;
    if (found) return;
    slot.sequence = -1;
    // The last CTA that gets none leaves the counter as it was.
    if (number >= 0 && p.tile_counter != nullptr &&
        ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
      p.tile_counter[0] = 0;
  };
  // The number of the item after those that were taken, in lane 0; -1: there are no more.
  const auto take = [&] {
    if (lane > 0 || p.tile_counter == nullptr || shared.number < 0) return -1;
    return static_cast<int>(gridDim.x + atomicAdd(p.tile_counter, 1));
  };
  if (warp == 0) {
    if (lane == 0) shared.number = blockIdx.x, shared.walk = {};
    __syncwarp();
    announce(0);
    __syncwarp();
    if (lane == 0) shared.number = shared.items[0].sequence < 0 ? -1 : take();
  }
  __syncthreads();
  if (shared.items[0].sequence < 0) return;

  Loader loader;
  loader.begin_item(p, shared.items[0], warp, lane);
  int loading = 0, known = 0;    // number of the item that is copied, and of the last announced one
  int issued = 0, consumed = 0;  // steps
  const auto fill = [&](int limit) {
    while (issued < limit) {
      while (!loader.has_step()) {
        if (loading == known || shared.items[(loading + 1) % 2].sequence < 0) return;
        loader.begin_item(p, shared.items[++loading % 2], warp, lane);
      }
      const int stage = issued++ % kStages;
      const int key =
          loader.start_step(p, shared.items[loading % 2], ring_smem + stage * kStageBytes, lane);
      if (lane == 0) shared.first_key[warp][stage] = key;
    }
  };

  WarpSums sums(ring_smem, smem_at + Config::warps * kRingBytes, lane);
  for (int n = 0; shared.items[n % 2].sequence >= 0; ++n) {
    const DecodeItem& item = shared.items[n % 2];
    fill(consumed + kStages - 1);
    QueryCopy queries;
    queries.load(p, item);
    if (warp == 0) {
      const int number = take();
      announce(n + 1);
      __syncwarp();
      if (lane == 0) shared.number = shared.items[(n + 1) % 2].sequence < 0 ? -1 : number;
    }
    queries.store(q_tile);
    __syncthreads();
    known = n + 1;
    sums.begin(lane);
#pragma unroll 1
    for (int at = item.positions.begin + warp * kStepKeys; at < item.positions.end;
         at += Config::warps * kStepKeys, ++consumed) {
      wait_for_oldest<kStages - 2>(issued - consumed - 1);
      __syncwarp();  // the step is visible to all lanes, and all have read the one before it
      fill(consumed + kStages);
      const int stage = consumed % kStages;
      sums.add_step(p, item, ring, stage, shared.first_key[warp][stage], lane);
    }
    __syncwarp();
    finish_item(p, item, sums, shared, smem, (consumed + kStages - 1) % kStages);
  }
}

// What one warp does for all: it finds items, and loads their keys.
#pragma once

#include "blockflash/latent_hopper/layout.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {
namespace {

// Finds items with the lanes of a warp, since lengths that change meanwhile could make warps
// disagree about how often they meet at a barrier.
__device__ __forceinline__ void find_items(const Params& params, Shared& shared,
                                           const Barriers& barriers, RunWalk& walk) {
  const blockflash_attention_decode_params& p = params.base;
  const int lane = threadIdx.x % kWarpSize;
  const bool one_each = gridDim.x >= static_cast<unsigned>(p.items);
  int number = blockIdx.x;
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_empty<2>(barriers.item_empty, n);
    const bool found = number >= 0 && walk.find<true>(params, number, shared.items[n % 2], lane);
    // Lane 0 takes the next number for all lanes.
    int next = -1;
    if (found && !one_each && lane == 0)
      next = static_cast<int>(gridDim.x + atomicAdd(p.tile_counter, 1));
    if (!found && lane == 0) {
      shared.items[n % 2].sequence = -1;
      // The last CTA that gets none leaves the counter as it was.
      if (!one_each && ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
        p.tile_counter[0] = 0;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.item_full, n % 2));
    if (!found) return;
    number = __shfl_sync(~0u, next, 0);
  }
}

// The boxes of a lane: some rows of each tile, and of these some panels.
struct Boxes {
  const blockflash_attention_latent_params& params;
  const unsigned page_size, last_column;
  int row, first_panel, panel_step;
  int sequence, head, first_key;  // of an item
  int page, slot;                 // of the rows in a tile

  __device__ __forceinline__ Boxes(const blockflash_attention_latent_params& params, int lane)
      : params(params),
        page_size(static_cast<unsigned>(params.runs.base.cache.page_size)),
        last_column(static_cast<unsigned>(params.runs.base.cache.capacity - 1) / page_size) {
    const int boxes_log2 = 31 - __clz(kKeys / params.box_rows);  // of a panel
    first_panel = lane >> boxes_log2, panel_step = kWarpSize >> boxes_log2;
    row = (lane - (first_panel << boxes_log2)) * params.box_rows;
  }
  // Keys behind the last page have the address of a slot in it.
  __device__ __forceinline__ void find(int tile) {
    const unsigned key = static_cast<unsigned>(first_key) + tile * kKeys + row;
    const unsigned column = min(key / page_size, last_column);
    slot = static_cast<int>(min(key - column * page_size, page_size - 1));
    page = page_of_column(params.runs.base.cache, sequence, static_cast<int>(column));
  }
  __device__ __forceinline__ void load(uint32_t smem, int stage, int part, uint32_t full) const {
#pragma unroll 1
    for (int panel = first_panel; panel < kPanels; panel += panel_step)
      if (part_of(panel, stage) == part)
        ptx::tensor_copy_4d(smem + stage * kTileBytes + panel * kPanelBytes + row * 128,
                            &params.keys, panel * 64, slot, head, page, full);
  }
};

// Loads the tiles of all items with the lanes of a warp.
__device__ __forceinline__ void load_tiles(const blockflash_attention_latent_params& params,
                                           Shared& shared, const Barriers& barriers,
                                           uint32_t smem) {
  const int lane = threadIdx.x % kWarpSize;
  Boxes boxes(params, lane);
  int tile = 0;  // of all items
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_full<2>(barriers.item_full, n);
    const DecodeRun& item = shared.items[n % 2];
    const Tiles tiles(item);
    boxes.sequence = item.sequence, boxes.head = item.head_kv, boxes.first_key = tiles.first_key;
    __syncwarp();  // all have read the item
    if (boxes.sequence < 0) return;
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.item_empty, n % 2));
#pragma unroll 1
    for (int t = 0; t < 2 * tiles.pairs; ++t, ++tile) {
      const int stage = tile % 2;
      boxes.find(t);
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const uint32_t full = barrier_of(barriers.full, 2 * stage + part);
        ptx::mbarrier_wait(barrier_of(barriers.empty, 2 * stage + part), (tile / 2 & 1) ^ 1);
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, part_bytes(part, stage));
        __syncwarp();
        boxes.load(smem, stage, part, full);
      }
    }
  }
}

}  // namespace
}  // namespace blockflash

// The thread that loads tiles by TMA.
#pragma once

#include "../attention_fwd_sm90a/scheduler.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "layout.cuh"

namespace blockflash {

__device__ __forceinline__ void produce(const Params& params, uint32_t smem,
                                        const Barriers& barriers) {
  const blockflash_attention_fwd_tma_params& fwd = params.fwd;
  PhaseBits empty = PhaseBits::producer();
  const auto copy = [&](int stage, uint32_t dst, int tile_rows, const blockflash_tensor_map& map,
                        int row, int head, int batch) {
    empty.wait(barriers.empty, stage);
    const uint32_t full = barrier_of(barriers.full, stage);
    ptx::mbarrier_arrive_expect_tx(full, tile_rows * kD);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tensor_copy_4d(dst + panel * tile_rows * kRowBytes, &map, panel * kRowBytes, row, head,
                          batch, full);
  };
  int k_stage = 0, v_stage = 0;
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    const TileRows rows = TileRows::load(slot + kRowsInSlot);
    // Every consumer has one of the two previous tiles or is completing the one before them, so the
    // slot of the next tile is free.
    if (tile.key_tiles >= 0 && tile.key_tiles < kRequestAhead)
      ptx::mbarrier_arrive(barriers.requested_of(n + 1));
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const int at = n % Config::q_stages * kWarpgroups + w;
      if (tile.key_tiles > 0) {
        copy(Barriers::kQ + at, smem + at * kQBytes, 64, fwd.q, rows.q + w * kRowStep, tile.head,
             rows.batch);
      } else {
        empty.wait(barriers.empty, Barriers::kQ + at);
        ptx::mbarrier_arrive(barrier_of(barriers.full, Barriers::kQ + at));
      }
    }
    if (tile.key_tiles < 0) break;
    DescendingTiles tiles(slot + kListInSlot, tile.first_key_tile + tile.key_tiles - 1);
#pragma unroll 1
    for (int left = tile.key_tiles; left > 0; --left, tiles.advance()) {
      const int row = rows.kv + tiles.tile() * kBlockKv;
      copy(k_stage, smem + kKOffset + k_stage * kKvBytes, kBlockKv, fwd.k, row, rows.head_kv,
           rows.batch);
      copy(Barriers::kLoaded + v_stage, smem + kLoadedOffset + v_stage * kKvBytes, kBlockKv, fwd.v,
           row, rows.head_kv, rows.batch);
      k_stage = next_stage<kStages>(k_stage), v_stage = next_stage<kLoadedStages>(v_stage);
      if (left == kRequestAhead) ptx::mbarrier_arrive(barriers.requested_of(n + 1));
    }
  }
}

}  // namespace blockflash

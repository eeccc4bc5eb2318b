// The producer warps: one loads queries and keys, one for each warpgroup its values.
#pragma once

#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/ptx/tensor_prefetch.cuh"
#include "layout.cuh"

namespace blockflash {

// CTAs of a head read its keys at about the same time. For each key tile one in `kFetchers` of them
// fetches the one `kAhead` tiles later into L2, where the others find it.
constexpr int kFetchers = 8, kAhead = 2;

// Chunks [first, last) of all tiles of keys or of values, by one thread. Tile t has the "full"
// mbarriers from t % sets * kChunks on.
template <int sets, int first, int last>
__device__ __forceinline__ void load_tiles(const blockflash_tensor_map& map, uint32_t to,
                                           const Work& work, const TileRows& rows, uint32_t full,
                                           uint32_t empty) {
  const int tiles = 2 * work.pairs;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    const int row = rows.kv + (work.first_tile + t) * kKeys;
    const bool fetches = (t + blockIdx.x) % kFetchers == 0 && t + kAhead < tiles;
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      const uint32_t at = barrier_of(full, t % sets * kChunks + chunk);
      ptx::mbarrier_wait(barrier_of(empty, chunk), (t & 1) ^ 1);
      ptx::mbarrier_arrive_expect_tx(at, kChunkBytes);
#pragma unroll
      for (int panel = chunk * kChunkPanels; panel < (chunk + 1) * kChunkPanels; ++panel) {
        ptx::tensor_copy_4d(to + panel * kPanelBytes, &map, panel * 64, row, rows.head_kv,
                            rows.batch, at);
        if (fetches)
          ptx::tensor_prefetch_4d(&map, panel * 64, row + kAhead * kKeys, rows.head_kv, rows.batch);
      }
    }
  }
}

__device__ __forceinline__ void load_queries(const Params& params, uint32_t to, const Work& work,
                                             const TileRows& rows, uint32_t full) {
  ptx::mbarrier_arrive_expect_tx(full, kTileBytes);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel)
    ptx::tensor_copy_4d(to + panel * kPanelBytes, &params.q, panel * 64, rows.q, work.tile.head,
                        rows.batch, full);
}

}  // namespace blockflash

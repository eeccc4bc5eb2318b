// The order in which the persistent BSR kernels compute tiles of C.
#pragma once

#include <stdint.h>

#include "blockflash/params/bsr.h"

namespace blockflash {

// The tile of C at an index of this order, the same as in the portable kernel. `Column` is the
// integer type of columns of C.
template <int block_n, class Column = int>
struct BsrTile {
  int position;  // position of its block rows in their order, counted in tiles
  Column first_column;

  __device__ __forceinline__ BsrTile(int tiles_m, int tiles_n, uint32_t index) {
    // Panels of about 1024 columns keep their slice of B in L2 while all block rows pass over it.
    constexpr uint32_t kPanelTiles = 1024 / block_n;
    const uint32_t panel = index / (tiles_m * kPanelTiles),
                   rest = index - panel * tiles_m * kPanelTiles;
    const uint32_t width = min(kPanelTiles, tiles_n - panel * kPanelTiles);
    position = rest / width;
    first_column = static_cast<Column>(panel * kPanelTiles + rest % width) * block_n;
  }
};

// Takes the tile after the one at `index`: the next one of all, or without a counter the next one
// in a fixed order. `takers`: number of CTAs, or of clusters.
template <class Params>
__device__ __forceinline__ uint32_t take_tile(const Params& params, uint32_t index,
                                              uint32_t takers) {
  return params.tile_counter != nullptr ? takers + atomicAdd(params.tile_counter, 1u)
                                        : index + takers;
}

// Called by one thread of each taker when there are no more tiles. The last one resets the counters
// for the next launch.
template <class Params>
__device__ __forceinline__ void leave_tiles(const Params& params, uint32_t takers) {
  if (params.tile_counter == nullptr) return;
  __threadfence();
  if (atomicAdd(params.tile_counter + 1, 1u) == takers - 1)
    params.tile_counter[0] = params.tile_counter[1] = 0;
}

}  // namespace blockflash

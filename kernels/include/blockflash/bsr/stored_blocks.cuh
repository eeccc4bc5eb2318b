// The stored blocks that a tile of the SDDMM computes: neighbours in a block row, found without a
// plan.
#pragma once

#include <stdint.h>

namespace blockflash {

// `count` stored blocks of a block row from `first` on.
struct StoredBlocks {
  int block_row, first, count;
};

template <int block, class Params>
__device__ __forceinline__ int block_rows_of(const Params& p) {
  return p.m / block + (p.m % block != 0);
}

// Tiles are indexed without a plan: block row r begins at index row_ptr[r] / blocks + r. This gives
// it room for all of its tiles and at most one index too many, whose tile has no block.
template <int blocks, class Params>
__device__ __forceinline__ uint32_t first_tile(const Params& p, int block_row) {
  return static_cast<uint32_t>(__ldg(p.row_ptr + block_row)) / blocks + block_row;
}

// A warp finds the tile at an index below that of block row ceil(m / block): each round divides the
// block rows among the lanes. The tile has at most `blocks` blocks.
template <int block, int blocks, class Params>
__device__ __forceinline__ StoredBlocks find_blocks(const Params& p, uint32_t index, int lane) {
  int first = 0, rows = block_rows_of<block>(p);  // range in which its block row is
  while (rows > 1) {
    const int step = (rows + 31) / 32, probe = lane * step;
    const uint32_t before = __ballot_sync(
        ~0u, probe < rows && first_tile<blocks>(p, first + min(probe, rows - 1)) <= index);
    const int last =
        31 - __clz(before);  // lane 0 always votes, since its row never begins behind the index
    first += last * step, rows = min(step, rows - last * step);
  }
  const int start = __ldg(p.row_ptr + first), end = __ldg(p.row_ptr + first + 1);
  const int at = start + static_cast<int>(index - (start / blocks + first)) * blocks;
  return {first, at, max(min(blocks, end - at), 0)};
}

}  // namespace blockflash

// Shared memory, mbarriers and the producer warpgroup of the Hopper SDDMM.
#pragma once

#include "blockflash/bsr/cluster.cuh"
#include "blockflash/bsr/early.cuh"
#include "blockflash/bsr/stored_blocks.cuh"
#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/scheduler.cuh"

namespace blockflash {

using Config = BsrSddmmConfig;
using Params = blockflash_bsr_sddmm_params;

constexpr int kBlock = Config::block_size, kBlocks = Config::blocks, kStages = Config::stages,
              kConsumerWarps = 4 * Config::warpgroups;
constexpr int kDepth = 64;  // of a stage along K: a row of the swizzle, 128 bytes
static_assert(kBlock % 64 == 0 && kBlock * kBlocks == 256,
              "a tile has the columns of the widest product");

// Shared memory: a ring of stages, each with a block row of A and the block columns of B;
// mbarriers; slots. A block of an operand that is contiguous along K is as rows of 64 along K,
// another one as panels of 64 rows or columns, with one such line per position along K.
constexpr int kPanelBytes = 64 * 128, kBlockBytes = kBlock / 64 * kPanelBytes;
constexpr int kStageBytes = (1 + kBlocks) * kBlockBytes;
constexpr int kBarrierOffset = kStages * kStageBytes, kSlotOffset = kBarrierOffset + 128,
              kSlotBytes = 32;
static_assert(kSlotOffset + 2 * kSlotBytes <= Config::smem_bytes,
              "the manifest row has room for two tiles");

// The ring's mbarriers.
struct Barriers : PersistentBarriers<kStages> {
  using PersistentBarriers::PersistentBarriers;

  __device__ __forceinline__ void init() const {
    static_assert(kBytes <= kSlotOffset - kBarrierOffset, "barriers end before the slots");
    PersistentBarriers::init(kConsumerWarps, kConsumerWarps + 1);
  }
};

// A tile: `blocks` stored blocks of a block row from `first_block` on, and their block columns. A
// negative block row says that there are no more tiles.
struct Tile {
  int block_row, first_block, blocks;
  int columns[4];

  static __device__ __forceinline__ Tile load(uint32_t slot) {
    const int4 x = ptx::load_shared_int4(slot), y = ptx::load_shared_int4(slot + 16);
    return {x.x, x.y, x.z, {y.x, y.y, y.z, y.w}};
  }
  __device__ __forceinline__ void store(uint32_t slot) const {
    ptx::store_shared_int4(slot, make_int4(block_row, first_block, blocks, 0));
    ptx::store_shared_int4(slot + 16, make_int4(columns[0], columns[1], columns[2], columns[3]));
  }
};
__device__ __forceinline__ uint32_t slot_of(uint32_t smem, int n) {
  return smem + kSlotOffset + n % 2 * kSlotBytes;
}

// A warp finds the tile at an index below the first one of block row ceil(m / block).
__device__ __forceinline__ Tile find_tile(const Params& p, uint32_t index, int lane) {
  const StoredBlocks blocks = find_blocks<kBlock, kBlocks>(p, index, lane);
  Tile tile = {blocks.block_row, blocks.first, blocks.count, {}};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
    if (i < tile.blocks) tile.columns[i] = __ldg(p.col_idx + blocks.first + i);
  return tile;
}

// One warp takes tiles and looks up their blocks, those of the first tile before the predecessors
// in the stream are complete. It prefetches the next tile kRequestAhead stages early: early enough
// to hide the lookup, late enough to keep dynamic load balancing.
constexpr int kRequestAhead = 8;
__device__ __forceinline__ void schedule(const Params& p, uint32_t smem, const Barriers& barriers,
                                         int lane) {
  const uint32_t tiles = p.nnz_blocks / kBlocks + block_rows_of<kBlock>(p);
  Predecessors predecessors;  // they use the same tile counter
  uint32_t index = blockIdx.x;
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n > 0) barriers.wait_requested(n);
    Tile tile = {-1, 0, 0, {}};
    for (bool take = n > 0;; take = true) {
      if (take) {
        predecessors.wait();
        if (lane == 0) index = take_tile(p, index, gridDim.x);
        index = __shfl_sync(~0u, index, 0);
      }
      if (index >= tiles) break;
      tile = find_tile(p, index, lane);
      if (tile.blocks > 0) break;
      tile.block_row = -1;
    }
    if (lane == 0) {
      tile.store(slot_of(smem, n));
      ptx::mbarrier_arrive(barriers.published_of(n));
    }
    if (tile.block_row < 0) break;
  }
  predecessors.wait();
  if (lane == 0) leave_tiles(p, gridDim.x);
}

// Starts the TMA loads of one block row of A or block column of B, which starts at row or column
// `position`, for 64 along K from k on.
template <bool k_major>
__device__ __forceinline__ void copy_block(uint32_t smem, const blockflash_tensor_map* map,
                                           int position, int k, uint32_t full) {
  if constexpr (k_major) {
    ptx::tensor_copy_2d(smem, map, k, position, full);
  } else {
#pragma unroll
    for (int i = 0; i < kBlock / 64; ++i)
      ptx::tensor_copy_2d(smem + i * kPanelBytes, map, position + i * 64, k, full);
  }
}

// One thread issues the TMA loads. Elements beyond m, n and k arrive as zeros.
__device__ __forceinline__ void produce(const Params& p, uint32_t smem, const Barriers& barriers) {
  Predecessors predecessors;
  PipelineState<kStages> at = PipelineState<kStages>::producer();
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const Tile tile = Tile::load(slot_of(smem, n));
    if (tile.block_row < 0) break;
    predecessors.wait();
    bool requested = false;  // the next tile
#pragma unroll 1
    for (int k = 0;; k += kDepth) {
      if (!requested && p.k - k <= kRequestAhead * kDepth)
        requested = true, ptx::mbarrier_arrive(barriers.requested_of(n + 1));
      if (k >= p.k) break;
      const uint32_t full = at.of(barriers.full), a = smem + at.stage * kStageBytes;
      at.wait(barriers.empty);
      ptx::mbarrier_arrive_expect_tx(full, (1 + tile.blocks) * kBlockBytes);
      copy_block<!Config::a_column_major>(a, &p.a, tile.block_row * kBlock, k, full);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        if (i < tile.blocks)
          copy_block<Config::b_column_major>(a + (1 + i) * kBlockBytes, &p.b,
                                             tile.columns[i] * kBlock, k, full);
      at.advance();
    }
  }
}

}  // namespace blockflash

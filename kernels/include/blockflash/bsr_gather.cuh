// Shared memory, barriers and the producer warpgroup of bsr_matmul_gather_sm90a.cu.
//
// Block rows of a tile share B: it is read once for the union of their block columns. The union is found while copying, nothing is planned:
//
//   schedule (a warp)    takes the next tile, looks up its block rows and their first columns, announces it in a slot
//   merge    (a warp)    lane r has the next columns of block row r as bits; their union is cut into stages, which it describes
//   copy_b   (a warp)    brings the rows of B of a stage's block columns, by tensor copies of one thread
//   copy_a   (a warp)    brings the blocks of A, those of a block row one after another
//
// Nobody waits in a circle. A stage is described when the consumers have emptied it, which takes only stages described before; copies
// wait for a description alone. A tile is announced when the merge asks for it, which it does at the latest in the last stage of the tile
// before, and when the consumers have read the slot's previous tile, which takes only tiles before that. Every tile has a stage, be it an
// empty one.
#pragma once

#include "bsr_tiles.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_mbarrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"

namespace blockflash {

using Config = BsrMatmulHopperConfig;
using Element = Config::Element;
using Params = blockflash_bsr_matmul_tma_params;

constexpr int kBlock = Config::block_size, kRows = Config::block_rows, kBlockN = Config::block_n, kStages = Config::stages;
constexpr int kConsumerWarps = 4 * Config::warpgroups;
static_assert(Config::block_k == kBlock, "boxes of B are as many rows as a block of A has columns");

// A stage holds up to kColumns block columns of B, as panels of 64 columns each, and up to kSlots blocks of A that meet them, by block row.
constexpr int kColumns = 128 / kBlock;
constexpr int kPanels = kBlockN / 64, kPanelBytes = kBlock * 128, kColumnBytes = kPanels * kPanelBytes, kBBytes = kColumns * kColumnBytes;
constexpr int kABytes = 16 * 1024, kBlockBytes = kBlock * kBlock * 2, kSlots = kABytes / kBlockBytes;
constexpr int kStageBytes = kBBytes + kABytes;
static_assert(kSlots >= kRows && kRows <= 16, "a column in which every block row has a block fits into a stage");

constexpr int kBarrierOffset = kStages * kStageBytes;
constexpr int kSliceOffset = kBarrierOffset + 8192;  // what is left stages C

// The description of a stage: up to kColumns of the 32 block columns from `first` on, bit i is column first + i.
struct Stage {
  static constexpr int kBytes = 3 * 64 + 128 + 16;
  uint32_t at;

  struct Head {
    uint32_t columns;
    int first, panel;  // the tile's first panel of B; negative: there are no more stages
    bool last;         // of the tile
  };
  __device__ __forceinline__ void store(const Head& head) const {
    ptx::store_shared_int4(at, make_int4(head.columns, head.first, head.panel, head.last));
  }
  __device__ __forceinline__ Head load() const {
    const int4 x = ptx::load_shared_int4(at);
    return {static_cast<uint32_t>(x.x), x.y, x.z, x.w != 0};
  }
  // Per block row: which of the columns it has a block in, where the first of these is among all blocks of A, and its slot in the stage.
  __device__ __forceinline__ uint32_t columns(int r) const { return at + 16 + 4 * r; }
  __device__ __forceinline__ uint32_t block(int r) const { return at + 80 + 4 * r; }
  __device__ __forceinline__ uint32_t slot(int r) const { return at + 144 + 4 * r; }
  // Per slot: where its block is among all blocks of A.
  __device__ __forceinline__ uint32_t source(int slot) const { return at + 208 + 4 * slot; }
};
static_assert(kSlots <= 32 && kSlots % 4 == 0, "sources are read four at a time");

// An announced tile: a queue of block columns per block row, the block rows as {index, first block, end of blocks}, and the first column
// in C. A row that does not exist is the first beyond A and has no blocks; a negative first one: there are no more tiles.
struct TileSlot {
  // Columns are fetched so many blocks before they are needed. The queue is a ring: that of block i is in place i % kAhead.
  static constexpr uint32_t kAhead = 32, kQueueBytes = 4 * kAhead;
  static constexpr int kBytes = kRows * (kQueueBytes + 16) + 64;
  uint32_t at;

  __device__ __forceinline__ uint32_t queue(int r, uint32_t block) const { return at + r * kQueueBytes + block % kAhead * 4; }
  __device__ __forceinline__ uint32_t row(int r) const { return at + kRows * kQueueBytes + 16 * r; }
  __device__ __forceinline__ uint32_t first_column() const { return at + kRows * (kQueueBytes + 16); }
};

// Barriers "full", "empty" and "described" of each stage; "announced" and "wanted" of the two slots.
struct Barriers {
  uint32_t full, empty, described, announced, wanted;
  __device__ __forceinline__ explicit Barriers(uint32_t smem)
      : full(smem + kBarrierOffset), empty(full + 8 * kStages), described(empty + 8 * kStages), announced(described + 8 * kStages),
        wanted(announced + 16) {}

  __device__ __forceinline__ void init() const {
    static_assert(24 * kStages + 32 <= 256, "barriers end before the descriptions");
    for (int i = 0; i < kStages; ++i) {
      // Both who copy, when they have read the description: so it is not written again before. And each lane's copies of A.
      ptx::mbarrier_init(full + 8 * i, 2 + kWarpSize);
      ptx::mbarrier_init(empty + 8 * i, kConsumerWarps);
      ptx::mbarrier_init(described + 8 * i, 1);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(announced + 8 * i, 1);
      // The consumers have read the tile that was there, and the merge is about to need the next.
      ptx::mbarrier_init(wanted + 8 * i, kConsumerWarps + 1);
    }
    ptx::fence_mbarrier_init();
  }
};

constexpr int kStageOffset = kBarrierOffset + 256, kTileOffset = kStageOffset + kStages * Stage::kBytes;
static_assert(kTileOffset + 2 * TileSlot::kBytes <= kSliceOffset, "all this ends before the slices");
__device__ __forceinline__ Stage stage_of(uint32_t smem, int stage) { return {smem + kStageOffset + stage * Stage::kBytes}; }
__device__ __forceinline__ TileSlot slot_of(uint32_t smem, int n) { return {smem + kTileOffset + n % 2 * TileSlot::kBytes}; }

__device__ __forceinline__ void schedule(const Params& params, uint32_t smem, const Barriers& barriers) {
  const blockflash_bsr_matmul_params& p = params.base;
  const int lane = threadIdx.x % 32;
  const int block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
  const int tiles_m = (block_rows + kRows - 1) / kRows, tiles_n = static_cast<int>((p.n + kBlockN - 1) / kBlockN);
  uint32_t index = blockIdx.x;
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n > 0) {
      ptx::mbarrier_wait(barriers.wanted + n % 2 * 8, (n - 1) / 2 & 1);
      if (lane == 0) index = take_tile(params, index);
      index = __shfl_sync(~0u, index, 0);
    }
    const TileSlot slot = slot_of(smem, n);
    const bool more = index < static_cast<uint32_t>(tiles_m) * tiles_n;
    if (more) {
      const BsrTile<kBlockN> tile(tiles_m, tiles_n, index);
      const int r = lane % kRows, position = tile.position * kRows + r;
      int4 row = make_int4(block_rows, 0, 0, 0);
      if (position < block_rows) {
        row.x = p.row_order != nullptr ? p.row_order[position] : position;
        row.y = p.row_ptr[row.x], row.z = p.row_ptr[row.x + 1];
      }
      // Several lanes for a row.
      const int blocks = min(row.z - row.y, static_cast<int>(TileSlot::kAhead));
#pragma unroll 4
      for (int i = lane / kRows; i < blocks; i += kWarpSize / kRows) ptx::cp_async_ca_4(slot.queue(r, row.y + i), p.col_idx + row.y + i);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      if (lane < kRows) ptx::store_shared_int4(slot.row(lane), row);
      if (lane == 0) ptx::store_shared(slot.first_column(), tile.first_column);
    } else if (lane == 0) {
      ptx::store_shared_int4(slot.row(0), make_int4(-1, 0, 0, 0));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.announced + n % 2 * 8);
    if (!more) break;
  }
  if (lane == 0) leave_tiles(params);
}

// The next tile is asked for when no block row has more blocks left than this: looking it up takes a while, but whoever is slow should take
// fewer.
constexpr int kAnnounceAhead = 128 / kBlock;
constexpr int kNoColumn = INT32_MAX;

__device__ __forceinline__ void merge(const Params& params, uint32_t smem, const Barriers& barriers) {
  const int lane = threadIdx.x % 32, r = lane % kRows;
  int at_stage = 0;
  uint32_t parity = 1;  // everything is empty at first
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(barriers.announced + n % 2 * 8, n / 2 & 1);
    const TileSlot slot = slot_of(smem, n);
    if (static_cast<int>(ptx::load_shared(slot.row(0))) < 0) break;
    const int panel = ptx::load_shared(slot.first_column()) / 64;
    int block = 0, left = 0;  // the lane's next one, and how many there are from it on
    if (lane < kRows) {
      const int4 row = ptx::load_shared_int4(slot.row(lane));
      block = row.y, left = row.z - row.y;
    }
    bool asked = false, last = false;  // for the next tile; stage of this one
#pragma unroll 1
    while (!last) {
      // A stage takes kColumns blocks of a row at most, and each made one group: a column that is needed was asked for before these.
      ptx::cp_async_wait_group<TileSlot::kAhead / kColumns - 1>();
      int next[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) next[i] = i < left ? ptx::load_shared(slot.queue(r, block + i)) : kNoColumn;
      // Without any column, the one that none has lies just outside.
      const int first = min(__reduce_min_sync(~0u, next[0]), kNoColumn - 32);
      uint32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) mine |= next[i] - first < 32 ? 1u << (next[i] - first) : 0;
      // What a row has beyond its first kColumns is not among the first kColumns of all.
      const uint32_t all = __reduce_or_sync(~0u, mine);
      uint32_t columns = __ballot_sync(~0u, (all >> lane & 1) != 0 && __popc(all & ((1u << lane) - 1)) < kColumns);
#pragma unroll 1
      while (__reduce_add_sync(~0u, __popc(mine & columns)) > kSlots) columns ^= 0x80000000u >> __clz(columns);
      mine &= columns;
      const int taken = __popc(mine), first_block = block;
#pragma unroll 1
      for (int i = 0; i < taken && i + static_cast<int>(TileSlot::kAhead) < left; ++i)
        ptx::cp_async_ca_4(slot.queue(r, block + i), params.base.col_idx + block + i + TileSlot::kAhead);
      ptx::cp_async_commit_group();
      block += taken, left -= taken;
      const int most = __reduce_max_sync(~0u, left);
      last = most == 0;
      if (!asked && most <= kAnnounceAhead) {
        asked = true;
        if (lane == 0) ptx::mbarrier_arrive(barriers.wanted + (n + 1) % 2 * 8);
      }
      const Stage stage = stage_of(smem, at_stage);
      ptx::mbarrier_wait(barriers.empty + 8 * at_stage, parity);
      if (lane < kRows) {
        ptx::store_shared(stage.columns(lane), mine);
        ptx::store_shared(stage.block(lane), first_block);
      }
      if (lane == 0) stage.store({columns, first, panel, last});
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.described + 8 * at_stage);
      if (++at_stage == kStages) at_stage = 0, parity ^= 1;
    }
  }
  ptx::mbarrier_wait(barriers.empty + 8 * at_stage, parity);
  if (lane == 0) {
    stage_of(smem, at_stage).store({0, 0, -1, true});
    ptx::mbarrier_arrive(barriers.described + 8 * at_stage);
  }
}

// Rows and columns beyond B arrive as zeros. The compiler must see that it is one thread that copies: else each copy becomes a loop over the
// threads that may be there.
__device__ __forceinline__ void copy_b(const Params& params, uint32_t smem, const Barriers& barriers) {
  const int panels = static_cast<int>(params.base.n / 64);  // whole ones of B
  int at_stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    ptx::mbarrier_wait(barriers.described + 8 * at_stage, parity);
    const Stage::Head head = stage_of(smem, at_stage).load();
    if (head.panel < 0) break;
    if (ptx::elect()) {
      const uint32_t full = barriers.full + 8 * at_stage;
      ptx::mbarrier_arrive_expect_tx(full, __popc(head.columns) * kColumnBytes);
      uint32_t b = smem + at_stage * kStageBytes, columns = head.columns;
      if (head.panel + kPanels <= panels) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i, columns &= columns - 1)
          if (columns != 0)
            ptx::tensor_copy_3d(b + i * kColumnBytes, &params.b, 0, (head.first + __ffs(columns) - 1) * kBlock, head.panel, full);
      } else {
#pragma unroll 1
        for (; columns != 0; columns &= columns - 1)
#pragma unroll 1
          for (int i = 0; i < kPanels; ++i, b += kPanelBytes)
            ptx::tensor_copy_3d(b, &params.b_edge, (head.panel + i) * 64, (head.first + __ffs(columns) - 1) * kBlock, 0, full);
      }
    }
    __syncwarp();
    if (++at_stage == kStages) at_stage = 0, parity ^= 1;
  }
}

__device__ __forceinline__ void copy_a(const Params& params, uint32_t smem, const Barriers& barriers) {
  constexpr int kTurnBytes = 16 * kWarpSize;
  const int lane = threadIdx.x % 32;
  const char* const values = static_cast<const char*>(params.base.values) + 16 * lane;
  int at_stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const Stage stage = stage_of(smem, at_stage);
    ptx::mbarrier_wait(barriers.described + 8 * at_stage, parity);
    if (stage.load().panel < 0) break;
    uint32_t columns = 0, first_block = 0;
    if (lane < kRows) columns = ptx::load_shared(stage.columns(lane)), first_block = ptx::load_shared(stage.block(lane));
    // Slots of the blocks: those of a block row after those of the rows before it.
    const int blocks = __popc(columns);
    int end = blocks;
#pragma unroll
    for (int i = 1; i < kRows; i *= 2) {
      const int before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    const int slot = end - blocks, all = __shfl_sync(~0u, end, kRows - 1);
    if (lane < kRows) ptx::store_shared(stage.slot(lane), slot);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) ptx::store_shared(stage.source(slot + i), first_block + i);
    const uint32_t full = barriers.full + 8 * at_stage;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full);
    uint32_t a = smem + at_stage * kStageBytes + kBBytes + 16 * lane;
#pragma unroll 1
    for (int i = 0; i < all; i += 4, a += 4 * kBlockBytes) {
      const int4 x = ptx::load_shared_int4(stage.source(i));
      const int sources[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < all)
#pragma unroll
          for (int at = 0; at < kBlockBytes; at += kTurnBytes)
            ptx::cp_async_cg_16(a + j * kBlockBytes + at, values + static_cast<int64_t>(sources[j]) * kBlockBytes + at, 16);
    }
    ptx::cp_async_arrive(full);
    if (++at_stage == kStages) at_stage = 0, parity ^= 1;
  }
  // Nobody leaves with copies under way.
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

}  // namespace blockflash

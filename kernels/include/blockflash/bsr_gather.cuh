// Shared memory, barriers and the producer warpgroup of bsr_matmul_gather_sm90a.cu.
//
// Block rows of a tile share B: it is read once for the union of their block columns. The union is found while copying, nothing is planned:
//
//   schedule (a warp)    takes the next tile, looks up its block rows and their first columns, announces it in a slot
//   merge    (a warp)    lane r walks the columns of block row r; the least of all lanes is the next of the union; describes stages
//   copy_b   (a thread)  brings the rows of B of a stage's block columns, by tensor copies
//   copy_a   (a warp)    brings the blocks of A: those of a block row lie one after another in the values, so one copy per block row
//
// Nobody waits in a circle. A stage is described when the consumers have emptied it, which takes only stages described before; copies
// wait for a description alone. A tile is announced when the merge asks for it, which it does at the latest in the last stage of the tile
// before, and when the consumers have read the slot's previous tile, which takes only tiles before that. Every tile has a stage, be it an
// empty one.
#pragma once

#include "bsr_tiles.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
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
constexpr int kSliceOffset = kBarrierOffset + 4096;  // what is left stages C

// The description of a stage.
struct Stage {
  static constexpr int kBytes = 192;
  uint32_t at;

  // Per block row: which of the stage's columns it has a block in (bits 0 to 7), the slot of the first of these (bits 8 to 15), and whether
  // the stage is the tile's last.
  static constexpr uint32_t kLast = 1u << 31;
  __device__ __forceinline__ uint32_t row(int r) const { return at + 4 * r; }
  // Per block row: where the first of these is among all blocks of A.
  __device__ __forceinline__ uint32_t block(int r) const { return at + 64 + 4 * r; }
  // The block columns.
  __device__ __forceinline__ uint32_t column(int i) const { return at + 128 + 4 * i; }
  // How many of them there are; -1: there are no more stages. And the first panel of the tile.
  __device__ __forceinline__ uint32_t columns() const { return at + 160; }
  __device__ __forceinline__ uint32_t panel() const { return at + 164; }
};

// An announced tile: a queue of block columns per block row, the block rows as {index, first block, end of blocks}, and the first column
// in C. A row that does not exist is the first beyond A and has no blocks; a negative first one: there are no more tiles.
struct TileSlot {
  // Columns are fetched so many blocks before they are needed. The queue is a ring: that of block i is in place i % kAhead.
  static constexpr uint32_t kAhead = 16, kQueueBytes = 4 * kAhead;
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
      // Both who copy, when they have read the description: so it is not written again before.
      ptx::mbarrier_init(full + 8 * i, 2);
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
    if (more && lane < kRows) {
      const BsrTile<kBlockN> tile(tiles_m, tiles_n, index);
      const int position = tile.position * kRows + lane;
      int4 row = make_int4(block_rows, 0, 0, 0);
      if (position < block_rows) {
        row.x = p.row_order != nullptr ? p.row_order[position] : position;
        row.y = p.row_ptr[row.x], row.z = p.row_ptr[row.x + 1];
      }
      const int blocks = min(row.z - row.y, static_cast<int>(TileSlot::kAhead));
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) ptx::cp_async_ca_4(slot.queue(lane, row.y + i), p.col_idx + row.y + i);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      ptx::store_shared_int4(slot.row(lane), row);
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
  const int lane = threadIdx.x % 32;
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
    int column = left > 0 ? ptx::load_shared(slot.queue(lane % kRows, block)) : kNoColumn;
    int next = left > 1 ? ptx::load_shared(slot.queue(lane % kRows, block + 1)) : kNoColumn;
    const int* ahead = params.base.col_idx + block + TileSlot::kAhead;
    int least = __reduce_min_sync(~0u, column);
    bool owns = column == least;
    int owners = __popc(__ballot_sync(~0u, owns));
    bool asked = false, last = false;  // for the next tile; stage of this one
#pragma unroll 1
    while (!last) {
      const int first_block = block;
      uint32_t mine = 0;
      int columns = 0, blocks = 0, kept = 0;  // lane i keeps column i
#pragma unroll 1
      while (least != kNoColumn && columns < kColumns && blocks + owners <= kSlots) {
        kept = lane == columns ? least : kept;
        column = owns ? next : column;
        least = __reduce_min_sync(~0u, column);
        // What else there is to do about this column takes place while the lanes find the next one.
        if (owns && left > static_cast<int>(TileSlot::kAhead)) ptx::cp_async_ca_4(slot.queue(lane % kRows, block), ahead);
        ptx::cp_async_commit_group();
        // A column that is needed was asked for when block `block + 2 - kAhead` was taken: since then, each block made a younger group.
        ptx::cp_async_wait_group<TileSlot::kAhead - 2>();
        const int queued = ptx::load_shared(slot.queue(lane % kRows, block + 2));
        next = owns ? (left > 2 ? queued : kNoColumn) : next;
        mine |= static_cast<uint32_t>(owns) << columns;
        block += owns, ahead += owns, left -= owns;
        blocks += owners;
        ++columns;
        owns = column == least;
        owners = __popc(__ballot_sync(~0u, owns));
      }
      last = least == kNoColumn;
      if (!asked && __reduce_max_sync(~0u, left) <= kAnnounceAhead) {
        asked = true;
        if (lane == 0) ptx::mbarrier_arrive(barriers.wanted + (n + 1) % 2 * 8);
      }
      const Stage stage = stage_of(smem, at_stage);
      ptx::mbarrier_wait(barriers.empty + 8 * at_stage, parity);
      if (lane < kRows) {
        ptx::store_shared(stage.row(lane), last ? mine | Stage::kLast : mine);
        ptx::store_shared(stage.block(lane), first_block);
      }
      if (lane < kColumns) ptx::store_shared(stage.column(lane), kept);
      if (lane == 0) {
        ptx::store_shared(stage.columns(), columns);
        ptx::store_shared(stage.panel(), panel);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.described + 8 * at_stage);
      if (++at_stage == kStages) at_stage = 0, parity ^= 1;
    }
  }
  ptx::mbarrier_wait(barriers.empty + 8 * at_stage, parity);
  if (lane == 0) {
    ptx::store_shared(stage_of(smem, at_stage).columns(), ~0u);
    ptx::mbarrier_arrive(barriers.described + 8 * at_stage);
  }
}

// Rows and columns beyond B arrive as zeros.
__device__ __forceinline__ void copy_b(const Params& params, uint32_t smem, const Barriers& barriers) {
  const int panels = static_cast<int>(params.base.n / 64);  // whole ones of B
  int at_stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const Stage stage = stage_of(smem, at_stage);
    ptx::mbarrier_wait(barriers.described + 8 * at_stage, parity);
    const int columns = ptx::load_shared(stage.columns()), panel = ptx::load_shared(stage.panel());
    if (columns < 0) break;
    int first_rows[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) first_rows[i] = ptx::load_shared(stage.column(i)) * kBlock;
    const uint32_t full = barriers.full + 8 * at_stage, b = smem + at_stage * kStageBytes;
    ptx::mbarrier_arrive_expect_tx(full, columns * kColumnBytes);
    if (panel + kPanels <= panels) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (i < columns) ptx::tensor_copy_3d(b + i * kColumnBytes, &params.b, 0, first_rows[i], panel, full);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns * kPanels; ++i)
        if (i / kPanels < columns)
          ptx::tensor_copy_3d(b + i * kPanelBytes, &params.b_edge, (panel + i % kPanels) * 64, first_rows[i / kPanels], 0, full);
    }
    if (++at_stage == kStages) at_stage = 0, parity ^= 1;
  }
}

__device__ __forceinline__ void copy_a(const Params& params, uint32_t smem, const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  const char* const values = static_cast<const char*>(params.base.values);
  int at_stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const Stage stage = stage_of(smem, at_stage);
    ptx::mbarrier_wait(barriers.described + 8 * at_stage, parity);
    if (static_cast<int>(ptx::load_shared(stage.columns())) < 0) break;
    uint32_t row = 0, first_block = 0;
    if (lane < kRows) row = ptx::load_shared(stage.row(lane)), first_block = ptx::load_shared(stage.block(lane));
    // Slots of the blocks: those of a block row after those of the rows before it.
    const int blocks = __popc(row & 0xFF);
    int end = blocks;
#pragma unroll
    for (int i = 1; i < kRows; i *= 2) {
      const int before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    const int slot = end - blocks;
    if (lane < kRows) ptx::store_shared(stage.row(lane), row | slot << 8);
    const uint32_t full = barriers.full + 8 * at_stage;
    __syncwarp();
    if (lane == kRows - 1) ptx::mbarrier_arrive_expect_tx(full, end * kBlockBytes);
    __syncwarp();
    if (blocks > 0) {
      const uint32_t a = smem + at_stage * kStageBytes + kBBytes + slot * kBlockBytes;
      ptx::bulk_copy(a, values + static_cast<int64_t>(first_block) * kBlockBytes, blocks * kBlockBytes, full);
    }
    if (++at_stage == kStages) at_stage = 0, parity ^= 1;
  }
}

}  // namespace blockflash

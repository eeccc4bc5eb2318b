// Shared memory, mbarriers and the scheduler of the Hopper kernels for small blocks,
// bsr_matmul_gather_sm90a and bsr_matmul_filled_sm90a.
//
// The block rows of a tile form a group and share B, which is loaded once for the union of their
// block columns, cut into stages by the plan of the pattern. One thread of the producer warpgroup
// schedules: it takes the next tile, looks up the stages of its group and publishes it in a slot.
// Three warps load, every third stage of the ring each (copy.cuh beside each kernel).
//
// There is no circular wait. A stage is filled when the consumers have emptied it, which takes only
// earlier stages. A tile is published when all loading warps have requested it, at the latest at
// the end of the previous tile, and when the consumers have read the slot's previous tile, which
// takes only earlier tiles.
#pragma once

#include "blockflash/bsr/cluster.cuh"
#include "blockflash/bsr/early.cuh"
#include "blockflash/bsr/split_k.cuh"
#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/elect.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/scheduler.cuh"

namespace blockflash {

using Config = BsrMatmulHopperConfig;
using Element = Config::Element;
using Params = blockflash_bsr_matmul_tma_params;

constexpr int kBlock = Config::block_size, kRows = Config::block_rows, kBlockN = Config::block_n,
              kStages = Config::stages;
using Cluster = BsrCluster<Config::cluster>;
constexpr int kClusterN = Config::cluster * kBlockN;  // columns of C that a cluster computes
// The CTAs of a cluster compute some of these columns each; in the filled kernel, all of them for a
// part of the block rows.
constexpr int kOwnN = Config::filled ? kClusterN : kBlockN,
              kOwnRows = Config::filled ? kRows / Config::cluster : kRows;
constexpr int kConsumerWarps = 4 * Config::warpgroups, kCopyWarps = 3;
static_assert(Config::block_k == kBlock, "boxes of B are as many rows as a block of A has columns");

// A stage of the ring is one of the plan: up to kColumns block columns of B, as panels of 64
// columns each, and the blocks of A in them, by block row. In the filled kernel it is one block
// column and a place for a block of each of the CTA's own block rows.
constexpr int kPlanColumns = 128 / kBlock;
constexpr int kColumns = Config::filled ? 1 : kPlanColumns,
              kSlots = Config::filled ? kOwnRows : Config::stage_blocks;
constexpr int kPanels = kOwnN / 64, kPanelBytes = kBlock * 128,
              kColumnBytes = kPanels * kPanelBytes, kBBytes = kColumns * kColumnBytes;
constexpr int kBlockBytes = kBlock * kBlock * 2, kStageBytes = kBBytes + kSlots * kBlockBytes;
static_assert(kSlots >= kOwnRows,
              "a column in which every block row has a block fits into a stage");
static_assert(kStageBytes % 1024 == 0, "panels are aligned to the swizzle");

// The ring's mbarriers are behind the ring, followed by the slots and the words of the stages.
struct Barriers : PersistentBarriers<kStages> {
  __device__ __forceinline__ explicit Barriers(uint32_t smem)
      : PersistentBarriers(smem + kStages * kStageBytes) {}

  __device__ __forceinline__ void init() const {
    PersistentBarriers::init(kConsumerWarps * Config::cluster,
                             (kConsumerWarps + kCopyWarps) * Config::cluster);
  }
};
constexpr int kStageWords = Config::filled ? 1 : kRows;
constexpr int kSlotOffset = kStages * kStageBytes + 192, kRowsOffset = kSlotOffset + 64,
              kSliceOffset = kStages * kStageBytes + 1024;
static_assert(Barriers::kBytes <= 192 && kRowsOffset + kStages * kStageWords * 4 <= kSliceOffset,
              "all this ends before the slices");

// A word per stage and block row: the columns in which the block row has blocks, as bits, and the
// place of its first block in the stage. Filled: a word per stage with the warpgroups that have
// blocks in it, as bits, and above them whether the stage is the last of its tile.
__device__ __forceinline__ uint32_t stage_word(uint32_t smem, int stage, int row = 0) {
  return smem + kRowsOffset + (stage * kStageWords + row) * 4;
}

// A published tile of the cluster, or a split of it. A negative group says that there are no more.
struct Tile {
  int first_stage, stages, first_column, group;

  static __device__ __forceinline__ uint32_t slot(uint32_t smem, int n) {
    return smem + kSlotOffset + n % 2 * 32;
  }
  static __device__ __forceinline__ Tile load(uint32_t smem, int n) {
    const int4 x = ptx::load_shared_int4(slot(smem, n));
    return {x.x, x.y, x.z, x.w};
  }
  __device__ __forceinline__ void store(uint32_t smem, int n, uint32_t barrier) const {
    Cluster::store_int4(slot(smem, n), make_int4(first_stage, stages, first_column, group),
                        barrier);
  }
  // Which split of the tile it is.
  static __device__ __forceinline__ BsrSplit split(uint32_t smem, int n) {
    return BsrSplit::load(slot(smem, n) + 16);
  }
};

// Takes tiles and looks up their stages, those of the first tile before the predecessors in the
// stream are complete.
__device__ __forceinline__ void schedule(const Params& params, uint32_t smem,
                                         const Barriers& barriers) {
  const blockflash_bsr_matmul_params& p = params.base;
  const int block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
  const int groups = (block_rows + kRows - 1) / kRows,
            tiles_n = static_cast<int>((p.n + kClusterN - 1) / kClusterN);
  Predecessors predecessors;  // they use the same tile counter
  uint32_t index = Cluster::index();
  const bool once = has_tile_for_each(params, groups, tiles_n, Cluster::count());
  const auto take_next = [&] {
    if (once) return static_cast<void>(index += Cluster::count());
    predecessors.wait();
    index = take_tile(params, index, Cluster::count());
  };
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n > 0) {
      barriers.wait_requested(n);
      take_next();
    }
    const uint32_t published = barriers.published_of(n);
    Tile tile = {0, 0, 0, -1};
#pragma unroll 1
    for (;; take_next()) {
      const BsrPlace place(params, groups, tiles_n, index);
      if (place.tiles_m == 0) break;
      const BsrTile<kClusterN> at(place.tiles_m, tiles_n, place.index);
      const int first = params.group_stages[at.position],
                stages = params.group_stages[at.position + 1] - first;
      const BsrSplit split = {place.split, splits_of(params, stages)};
      if (split.number >= split.count) continue;  // a tile that is shorter than others at its place
      Cluster::store(Tile::slot(smem, n) + 16, split.word(), published);
      tile = {first + split.begin(stages), split.end(stages) - split.begin(stages), at.first_column,
              at.position};
      break;
    }
    tile.store(smem, n, published);
    Cluster::publish(published, tile.group < 0 ? 16 : 20);
    if (tile.group < 0) break;
  }
  if (once) return;
  predecessors.wait();
  leave_tiles(params, Cluster::count());
}

// The next tile is prefetched when this many stages are left: early enough to hide the lookup, late
// enough to keep dynamic load balancing.
constexpr int kRequestAhead = 8;

// A stage of the plan, described in params.h, is a pair of words per lane.
constexpr int kColumnLane = 16, kSizeLane = kColumnLane + 8;
static_assert(kRows <= kColumnLane && kPlanColumns <= 8, "a stage of the plan holds all of it");

}  // namespace blockflash

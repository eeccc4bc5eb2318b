// Shared memory, mbarriers and the producer warpgroup of the Hopper BSR matmul.
#pragma once

#include "blockflash/bsr/cluster.cuh"
#include "blockflash/bsr/early.cuh"
#include "blockflash/bsr/split_k.cuh"
#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
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
constexpr int kSteps = kBlock / 64;                   // stages per block
static_assert(Config::block_k == 64 && kBlock % 64 == 0,
              "a stage is a row of the swizzle deep, 128 bytes, and a part of one block of A");

// Shared memory: a ring of stages, each with one block per block row and panels of 64 columns of B;
// mbarriers and slots; the rest stages C. A transposed block comes in panels of 64 of its columns
// and a column-major B as columns of 128 bytes, which take the same space.
constexpr int kPanels = kBlockN / 64, kPanelBytes = 64 * 128;
constexpr int kBlockBytes = kBlock * 128, kABytes = kRows * kBlockBytes;
constexpr int kBBytes = kPanels * kPanelBytes, kStageBytes = kABytes + kBBytes;
constexpr int kBarrierOffset = kStages * kStageBytes, kSlotOffset = kBarrierOffset + 256,
              kStagingOffset = kBarrierOffset + 1024;
constexpr int kConsumerWarps = 4 * Config::warpgroups;
constexpr int kLoaders = 2;  // threads that issue TMA loads, one for A and one for B

// The ring's mbarriers, and per stage a word with the block rows that have a block in it.
struct Barriers : PersistentBarriers<kStages> {
  uint32_t owners;
  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : PersistentBarriers(at), owners(end()) {}

  __device__ __forceinline__ void init() const {
    static_assert(kBytes + 4 * kStages <= kSlotOffset - kBarrierOffset,
                  "barriers end before the slots");
    PersistentBarriers::init(kConsumerWarps * Config::cluster,
                             (kConsumerWarps + kLoaders) * Config::cluster);
  }
};

// A block row of a tile as its slot describes it: blocks [first_block, end_block) of A and the
// block column of the first one. A row that does not exist has the index one past A's last row and
// no blocks; a negative index says that there are no more tiles.
struct BlockRow {
  int index, first_block, end_block, first_column;

  static __device__ __forceinline__ BlockRow load(uint32_t smem) {
    const int4 x = ptx::load_shared_int4(smem);
    return {x.x, x.y, x.z, x.w};
  }
  // The one at a position in the order of block rows, by a single load: the order, `row_ptr` and
  // `col_idx` one after another would take the latency of memory three times.
  static __device__ __forceinline__ BlockRow at(const Params& params, int position) {
    const int4 x = __ldg(reinterpret_cast<const int4*>(params.rows) + position);
    return {x.x, x.y, x.z, x.w};
  }
  __device__ __forceinline__ void store(uint32_t smem, uint32_t barrier) const {
    Cluster::store_int4(smem, make_int4(index, first_block, end_block, first_column), barrier);
  }
};
// A slot holds the block rows and the cluster's first column of C.
__device__ __forceinline__ uint32_t slot_of(uint32_t smem, int n) {
  return smem + kSlotOffset + n % 2 * 64;
}
constexpr int kColumnInSlot = 16 * kRows;
// Where A is transposed: the position of each block row's first block among the values.
constexpr int kPlacesInSlot = kColumnInSlot + 4;
// Which split of a tile this is, and the position of its block row in the order of rows. Tiles of
// two block rows are not split, since only merging their columns would tell where to cut.
constexpr bool kSplits = kRows == 1;
constexpr int kSplitInSlot = 32;
constexpr uint32_t kSlotBytes =
    16 * kRows + 4 + 4 * kRows * Config::a_transposed + 8 * kSplits;  // bytes stored in a slot
static_assert(kPlacesInSlot + 4 * kRows <= (kSplits ? kSplitInSlot : 64) && kRows <= 2,
              "a tile fits into its slot");

// One thread of a cluster takes tiles and looks up their blocks, those of the first tile before the
// predecessors in the stream are complete. It prefetches the next tile index
// kRequestAhead blocks early: early enough to hide the lookup, late enough to keep dynamic load
// balancing.
constexpr int kRequestAhead = 8 / kSteps;  // in blocks
__device__ __forceinline__ void schedule(const Params& params, uint32_t smem,
                                         const Barriers& barriers) {
  const blockflash_bsr_matmul_params& p = params.base;
  const int block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
  const int tiles_m = (block_rows + kRows - 1) / kRows,
            tiles_n = static_cast<int>((p.n + kClusterN - 1) / kClusterN);
  Predecessors predecessors;  // they use the same tile counter
  uint32_t index = Cluster::index();
  const bool once = has_tile_for_each(params, tiles_m, tiles_n, Cluster::count());
  const auto take_next = [&] {
    if (once) return static_cast<void>(index += Cluster::count());
    predecessors.wait();
    index = take_tile(params, index, Cluster::count());
  };
  const auto blocks_at = [&](const BsrPlace& place) {
    const BsrTile<kClusterN> tile(place.tiles_m, tiles_n, place.index);
    const BlockRow row = BlockRow::at(params, tile.position);
    return row.end_block - row.first_block;
  };
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n > 0) {
      barriers.wait_requested(n);
      take_next();
    }
    const uint32_t slot = slot_of(smem, n), published = barriers.published_of(n);
    BsrPlace place(params, tiles_m, tiles_n, index);
    // A tile that is shorter than others at its place has no such split.
    while (place.split > 0 && place.split >= splits_of(params, blocks_at(place)))
      take_next(), place = BsrPlace(params, tiles_m, tiles_n, index);
    const bool more = place.tiles_m > 0;
    if (more) {
      const BsrTile<kClusterN> tile(place.tiles_m, tiles_n, place.index);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int position = tile.position * kRows + r;
        BlockRow row = {block_rows, 0, 0, 0};
        if (position < block_rows) {
          row = BlockRow::at(params, position);
          if constexpr (kSplits) {
            const int blocks = row.end_block - row.first_block;
            const BsrSplit split = {place.split, splits_of(params, blocks)};
            Cluster::store(slot + kSplitInSlot, split.word(), published),
                Cluster::store(slot + kSplitInSlot + 4, position, published);
            row.end_block = row.first_block + split.end(blocks),
            row.first_block += split.begin(blocks);
            if (split.number > 0 && row.first_block < row.end_block)
              row.first_column = p.col_idx[row.first_block];
          }
        }
        row.store(slot + 16 * r, published);
        if constexpr (Config::a_transposed)
          Cluster::store(slot + kPlacesInSlot + 4 * r,
                         row.first_block < row.end_block ? params.block_idx[row.first_block] : 0,
                         published);
      }
      Cluster::store(slot + kColumnInSlot, tile.first_column, published);
    } else {
      BlockRow{-1, 0, 0, 0}.store(slot, published);
    }
    Cluster::publish(published, more ? kSlotBytes : 16);
    if (!more) break;
  }
  if (once) return;
  predecessors.wait();
  leave_tiles(params, Cluster::count());
}

// Starts the TMA load of this CTA's share of 64 columns, from k on, of a block of A. Where A is
// transposed, these are rows of the stored block, in panels of 64 columns.
__device__ __forceinline__ void copy_block(const Params& params, uint32_t a, int k, int block,
                                           uint32_t full, int rank, uint64_t policy) {
  constexpr int kShare = (Config::a_transposed ? 64 : kBlock) / Config::cluster;
  static_assert(kShare % 8 == 0, "shares are whole rows of the swizzle");
  const int first = rank * kShare;
  if constexpr (Config::a_transposed) {
#pragma unroll
    for (int m = 0; m < kBlock; m += 64)
      Cluster::tensor_copy_3d(a + (m + first) * 128, &params.a, m, k + first, block, full, policy);
  } else {
    Cluster::tensor_copy_3d(a + first * 128, &params.a, k, first, block, full, policy);
  }
}

// One thread issues the TMA loads of A and another one those of B, so that neither waits for the
// other; where the values are settled, the first stages get their A while the predecessors in the
// stream still run. Two block rows are merged: a stage serves all rows that have a block in the
// next column of any, and loads B once for all of them. Rows beyond A and B arrive as zeros, as do
// columns up to the end of a panel; panels beyond B are not loaded.
__device__ __forceinline__ void produce(const Params& params, uint32_t smem,
                                        const Barriers& barriers, bool loads_a) {
  const int rank = Cluster::rank();
  // With wide tiles, few CTAs read a block of A and at about the same time, so L2 should keep B
  // instead.
  const uint64_t policy = kBlockN >= 256 ? ptx::evict_first() : ptx::evict_normal();
  Predecessors predecessors;
  PipelineState<kStages> at = PipelineState<kStages>::producer();
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const uint32_t slot = slot_of(smem, n);
    BlockRow rows[kRows];  // first_block and first_column advance
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = BlockRow::load(slot + 16 * r);
    if (rows[0].index < 0) break;
    int places[kRows] =
        {};  // next blocks among the values where A is transposed; else they are consecutive
    if constexpr (Config::a_transposed)
#pragma unroll
      for (int r = 0; r < kRows; ++r) places[r] = ptx::load_shared(slot + kPlacesInSlot + 4 * r);
    const int first_column = ptx::load_shared(slot + kColumnInSlot) + rank * kBlockN,
              panel = first_column / 64;
    const int columns = min(
        kBlockN, static_cast<int>(params.base.n) - first_column);  // columns of the tile that exist
    const int panels = columns <= 0 ? 0 : (columns + 63) / 64;
    const uint32_t b_bytes = Config::b_column_major ? columns * 128 : panels * kPanelBytes;
    bool requested = false;  // the next tile
#pragma unroll 1
    for (;;) {
      int left = 0, column = INT32_MAX;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        left = max(left, rows[r].end_block - rows[r].first_block);
        if (rows[r].first_block < rows[r].end_block) column = min(column, rows[r].first_column);
      }
      if (!requested && left <= kRequestAhead)
        requested = true, Cluster::request(barriers.requested_of(n + 1));
      if (left == 0) break;
      int blocks[kRows];  // blocks in this column; -1: none
      uint32_t owners = 0, bytes = b_bytes;
      bool last = true;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool owns =
            kRows == 1 || rows[r].first_block < rows[r].end_block && rows[r].first_column == column;
        blocks[r] = !owns ? -1 : Config::a_transposed ? places[r] : rows[r].first_block;
        if (owns) {
          owners |= 1u << r, bytes += kBlockBytes;
          if (++rows[r].first_block < rows[r].end_block) {
            rows[r].first_column = __ldg(params.base.col_idx + rows[r].first_block);
            if constexpr (Config::a_transposed)
              places[r] = __ldg(params.block_idx + rows[r].first_block);
          }
        }
        last &= rows[r].first_block == rows[r].end_block;
      }
      if (!loads_a || !params.values_settled) predecessors.wait();
#pragma unroll 1
      for (int k = 0; k < kBlock; k += 64) {
        const uint32_t full = at.of(barriers.full), a = smem + at.stage * kStageBytes,
                       b = a + kABytes;
        at.wait(barriers.empty);
        if (loads_a) {
          if constexpr (kRows > 1)
            ptx::store_shared(barriers.owners + 4 * at.stage, owners | last << kRows);
          ptx::mbarrier_arrive_expect_tx(full, bytes);  // B may arrive before
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (blocks[r] >= 0)
              copy_block(params, a + r * kBlockBytes, k, blocks[r], full, rank, policy);
        } else if constexpr (Config::b_column_major) {
          ptx::tensor_copy_3d(b, columns == kBlockN ? &params.b : &params.b_edge,
                              column * kBlock + k, first_column, 0, full);
        } else if (columns == kBlockN) {
          ptx::tensor_copy_3d(b, &params.b, 0, column * kBlock + k, panel, full);
        } else {
#pragma unroll 1
          for (int i = 0; i < panels; ++i)
            ptx::tensor_copy_3d(b + i * kPanelBytes, &params.b_edge, (panel + i) * 64,
                                column * kBlock + k, 0, full);
        }
        at.advance();
      }
    }
  }
}

}  // namespace blockflash

// Fills the stages of bsr_matmul_filled_sm90a: each of three warps takes every third block column,
// with TMA loads.
//
// Each of the two CTAs of a cluster loads half of B for both, and the blocks of A of its own half
// of the group. A warpgroup without any block in the column leaves its rows as they are. Where some
// of its block rows have a block, the copying warp writes zeros for the others. Boxes outside the
// tensor would also bring zeros but take about a microsecond each; for the same reason panels
// beyond B are not loaded.
#pragma once

#include "blockflash/bsr/gather.cuh"

namespace blockflash {

constexpr int kCopiedPanels = kBlockN / 64;  // panels of B that each CTA loads for both
constexpr int kWarpgroupRows = kOwnRows / Config::warpgroups;  // block rows of a warpgroup
static_assert(kWarpgroupRows * kBlock == 64, "a warpgroup multiplies 64 rows");

// The warpgroups, as bits, in which one of the block rows `rows` is; and all block rows of these.
__device__ __forceinline__ uint32_t owners_of(uint32_t rows) {
  uint32_t owners = 0;
#pragma unroll
  for (int g = 0; g < Config::warpgroups; ++g)
    if (rows >> g * kWarpgroupRows & (1u << kWarpgroupRows) - 1) owners |= 1u << g;
  return owners;
}
__device__ __forceinline__ uint32_t rows_of(uint32_t owners) {
  uint32_t rows = 0;
#pragma unroll
  for (int g = 0; g < Config::warpgroups; ++g)
    if (owners >> g & 1) rows |= (1u << kWarpgroupRows) - 1 << g * kWarpgroupRows;
  return rows;
}

// Writes zeros in place of the blocks of these block rows, with all lanes.
__device__ __forceinline__ void fill_with_zeros(uint32_t a, uint32_t rows, int lane) {
#pragma unroll 1
  for (; rows != 0; rows &= rows - 1) {
    const uint32_t block = a + (__ffs(rows) - 1) * kBlockBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < kBlockBytes; i += kWarpSize * 16)
      ptx::store_shared_int4(block + i, make_int4(0, 0, 0, 0));
  }
}

// Every warp reads all stages of the plan, one lane per block row and per block column.
__device__ __forceinline__ void copy(const Params& params, uint32_t smem, const Barriers& barriers,
                                     int who) {
  const int lane = threadIdx.x % 32, rank = Cluster::rank();
  const int2* const plan = reinterpret_cast<const int2*>(params.stages) + lane;
  const uint64_t policy = ptx::evict_normal();
  Predecessors predecessors;
  uint32_t before =
      0;  // block columns of the previous tiles, and of this one up to the stage of the plan
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const Tile tile = Tile::load(smem, n);
    if (tile.group < 0) break;
    // The tile's panels that exist, and the range of them that this CTA loads.
    const int panels =
        min(kPanels, (static_cast<int>(params.base.n) - tile.first_column + 63) / 64);
    const int first_panel = rank * kCopiedPanels, copied = min(kCopiedPanels, panels - first_panel);
    const bool whole = tile.first_column + kClusterN <= params.base.n;
    const auto load = [&](int i) {
      return i < tile.stages ? __ldg(plan + static_cast<int64_t>(tile.first_stage + i) * 32)
                             : make_int2(0, 0);
    };
    bool requested = false;  // the next tile
    const auto request = [&] {
      __syncwarp();
      if (!requested && lane == 0) Cluster::request(barriers.requested_of(n + 1));
      requested = true;
    };
    const auto copy_column = [&](uint32_t b, int column, uint32_t full) {
      const uint32_t to = b + first_panel * kPanelBytes;
      if (whole) {
        Cluster::tensor_copy_3d(to, &params.b, 0, column * kBlock,
                                tile.first_column / 64 + first_panel, full, policy);
      } else {
#pragma unroll 1
        for (int k = 0; k < copied; ++k)
          Cluster::tensor_copy_3d(to + k * kPanelBytes, &params.b_edge,
                                  tile.first_column + (first_panel + k) * 64, column * kBlock, 0,
                                  full, policy);
      }
    };
    int2 next = load(0);
#pragma unroll 1
    for (int i = 0; i < tile.stages; ++i) {
      const int2 now = next;
      next = load(i + 1);
      if (tile.stages - i <= kRequestAhead) request();
      const int columns = __shfl_sync(~0u, now.x, kSizeLane),
                of_row = rank * kOwnRows + lane % kOwnRows;
      // The columns in which this lane's block row has blocks, and the first of them.
      const int first_block = __shfl_sync(~0u, now.x, of_row);
      const uint32_t mine = __shfl_sync(~0u, now.y, of_row) & (lane < kOwnRows ? 0xFF : 0);
      predecessors.wait();
#pragma unroll 1
      for (int c = (who + kCopyWarps - before % kCopyWarps) % kCopyWarps; c < columns;
           c += kCopyWarps) {
        const PipelineState<kStages> at = PipelineState<kStages>::producer_at(before + c);
        const int column = __shfl_sync(~0u, now.x, kColumnLane + c);
        const uint32_t full = at.of(barriers.full), b = smem + at.stage * kStageBytes;
        const uint32_t rows = __ballot_sync(~0u, mine >> c & 1), owners = owners_of(rows);
        const bool last = i == tile.stages - 1 && c == columns - 1;
        at.wait(barriers.empty);
        fill_with_zeros(b + kBBytes, rows_of(owners) & ~rows, lane);
        ptx::fence_proxy_async();  // makes the zeros visible to WGMMA
        __syncwarp();
        if (ptx::elect()) {
          ptx::store_shared(stage_word(smem, at.stage), owners | static_cast<uint32_t>(last)
                                                                     << Config::warpgroups);
          ptx::mbarrier_arrive_expect_tx(full, panels * kPanelBytes + __popc(rows) * kBlockBytes);
          copy_column(b, column, full);
        }
        __syncwarp();
        if (rows >> lane & 1)
          ptx::tensor_copy_3d(b + kBBytes + lane * kBlockBytes, &params.a, 0, 0,
                              first_block + __popc(mine & (1u << c) - 1), full);
        __syncwarp();
      }
      before += columns;
    }
    request();
  }
}

}  // namespace blockflash

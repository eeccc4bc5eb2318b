// Fills the stages of bsr_matmul_gather_sm90a: each of three warps takes every third stage of the
// plan,
// with TMA loads of B and bulk copies of A.
#pragma once

#include "blockflash/bsr/gather.cuh"

namespace blockflash {

// One lane per block row copies its blocks as they are, and one lane per block column loads B. Rows
// beyond B arrive as zeros, as do columns up to the end of a panel; panels beyond B are not loaded.
__device__ __forceinline__ void copy(const Params& params, uint32_t smem, const Barriers& barriers,
                                     int who) {
  const int lane = threadIdx.x % 32, rank = Cluster::rank();
  const char* const values = static_cast<const char*>(params.base.values);
  const int2* const plan = reinterpret_cast<const int2*>(params.stages) + lane;
  Predecessors predecessors;
  uint32_t before = 0;  // stages of the previous tiles
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const Tile tile = Tile::load(smem, n);
    if (tile.group < 0) break;
    const int first_column = tile.first_column + rank * kBlockN, panel = first_column / 64;
    const int width = min(
        kBlockN, static_cast<int>(params.base.n) - first_column);  // columns of the tile that exist
    const int panels = width <= 0 ? 0 : (width + 63) / 64;
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
    int i = (who + kCopyWarps - before % kCopyWarps) % kCopyWarps;
    int2 next = load(i);
#pragma unroll 1
    for (; i < tile.stages; i += kCopyWarps) {
      const int2 now = next;
      next = load(i + kCopyWarps);
      if (tile.stages - i <= kRequestAhead) request();
      const PipelineState<kStages> at = PipelineState<kStages>::producer_at(before + i);
      const uint32_t full = at.of(barriers.full), b = smem + at.stage * kStageBytes;
      const int columns = __shfl_sync(~0u, now.x, kSizeLane),
                blocks = __shfl_sync(~0u, now.y, kSizeLane);
      predecessors.wait();
      at.wait(barriers.empty);
      if (lane < kRows) ptx::store_shared(stage_word(smem, at.stage, lane), now.y);
      __syncwarp();
      if (ptx::elect())
        ptx::mbarrier_arrive_expect_tx(full, columns * panels * kPanelBytes + blocks * kBlockBytes);
      __syncwarp();
      const int count = lane < kRows ? __popc(now.y & 0xFF) : 0;
      // Block rows are divided among the CTAs of the cluster.
      if (count > 0 && lane % Config::cluster == rank)
        Cluster::bulk_copy(b + kBBytes + (now.y >> 8) * kBlockBytes,
                           values + static_cast<int64_t>(now.x) * kBlockBytes, count * kBlockBytes,
                           full);
      // One lane per column of the stage.
      const int c = lane - kColumnLane;
      if (c >= 0 && c < columns) {
        const uint32_t to = b + c * kColumnBytes;
        if (width == kBlockN) {
          ptx::tensor_copy_3d(to, &params.b, 0, now.x * kBlock, panel, full);
        } else {
#pragma unroll 1
          for (int k = 0; k < panels; ++k)
            ptx::tensor_copy_3d(to + k * kPanelBytes, &params.b_edge, (panel + k) * 64,
                                now.x * kBlock, 0, full);
        }
      }
      __syncwarp();
    }
    request();
    before += tile.stages;
  }
}

}  // namespace blockflash

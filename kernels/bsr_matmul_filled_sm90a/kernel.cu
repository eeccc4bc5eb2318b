// Block-sparse (BSR) times dense for Hopper and blocks of 32 in dense patterns: TMA and WGMMA,
// clusters of two persistent CTAs with one producer warpgroup and two consumer warpgroups each.
//
// A tile of C is a group of block rows of A, 256 rows, times twice block_n columns of B, in the
// stages listed by the plan of the pattern (bsr/gather.cuh). Each CTA of the cluster computes half
// of the rows, and L2 delivers B once for both. Each warpgroup multiplies 64 rows, which are two
// block rows: where only one of them has a block, zeros are written for the other so that WGMMA can
// take both. That multiplies more than is stored, but at a rate that the exact kernel
// (bsr_matmul_gather_sm90a) does not reach. What these zeros make of NaN and infinity in B is
// undone, since a missing block contributes nothing.
#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/bsr/epilogue_copy.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "copy.cuh"

namespace blockflash {
namespace {

constexpr int kN = kOwnN;
constexpr int kPages = (Config::smem_bytes - kSliceOffset) / (kConsumerWarps * kPageBytes);
// A warp's slice of 16 rows × kSliceN columns takes the same place. The padding keeps its rows in
// different banks.
constexpr int kSliceN = 16, kSliceStride = kSliceN * 5 / 4;
static_assert(kPages >= 1 && kPages <= kN / 64 && kPages * kPageBytes >= 16 * kSliceStride * 4,
              "there is room for either");

// An element of A·B over the stored blocks alone.
__device__ __forceinline__ float exact_sum(const blockflash_bsr_matmul_params& p, int64_t row,
                                           int64_t column) {
  using Traits = ElementTraits<Element>;
  const int block_row = static_cast<int>(row / kBlock);
  float sum = 0.f;
#pragma unroll 1
  for (int block = p.row_ptr[block_row]; block < p.row_ptr[block_row + 1]; ++block) {
    const uint16_t* const a = static_cast<const uint16_t*>(p.values) +
                              (static_cast<int64_t>(block) * kBlock + row % kBlock) * kBlock;
    const int64_t first = static_cast<int64_t>(p.col_idx[block]) * kBlock;
    const uint16_t* const b = static_cast<const uint16_t*>(p.b) + first * p.ldb + column;
#pragma unroll 1
    for (int k = 0; k < kBlock && first + k < p.k; ++k)
      sum = fmaf(Traits::to_float(a[k]), Traits::to_float(b[k * p.ldb]), sum);
    if (isnan(sum)) break;  // no further term can change a NaN
  }
  return sum;
}

struct Consumer {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  const int warpgroup;
  PipelineState<kStages> at = PipelineState<kStages>::consumer();

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void release(int stage) const {
    Cluster::release(barrier_of(barriers.empty, stage), lane());
  }

  // acc += A·B over the stages of a tile, at least one.
  __device__ __forceinline__ void multiply(float (&acc)[kN / 2]) {
    const uint64_t a_ring = ptx::wgmma_descriptor<kBlock * 2>(
        smem + kBBytes + warpgroup * kWarpgroupRows * kBlockBytes);
    const uint64_t b_ring = ptx::wgmma_descriptor_mn(smem, kPanelBytes, 1024);
    int before = 0, steps = INT_MAX;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      at.wait(barriers.full);
      const uint32_t offset = at.stage * kStageBytes >> 4;
      // Shifted before the shuffle: otherwise the assembler takes the branch for a divergent one
      // and serialises the WGMMAs.
      const uint32_t owners =
          __shfl_sync(~0u, ptx::load_shared(stage_word(smem, at.stage)) >> warpgroup, 0);
      if (owners >> (Config::warpgroups - warpgroup)) steps = step + 1;
      if (owners & 1) {
        ptx::wgmma_pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlock / 16; ++k)
          ptx::Wgmma<kN, Element>::template ss<true, true, false>(acc, a_ring + offset + k * 2,
                                                                  b_ring + offset + k * 128);
        ptx::wgmma_commit_group();
      } else {
        ptx::wgmma_commit_group();  // an empty group, so that the previous group is always the one
                                    // to wait for
      }
      ptx::wgmma_wait_group<1>();  // the products of the previous stage have read it
      if (step > 0) release(before);
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(acc);
    release(before);
  }

  // Recomputes the elements that are NaN, since zeros times NaN or infinity may have caused it.
  // They go through `page` of this warp, because a loop cannot index registers.
  __device__ __forceinline__ void undo_zeros(float (&acc)[kN / 2], float* page, int first_row,
                                             int first_column) const {
    constexpr int kChunk = kPageBytes / 4 / kWarpSize;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) found |= isnan(acc[i]);
    if (!__any_sync(~0u, found)) return;
    if (lane() == 0) ptx::tensor_store_wait_read();
    __syncwarp();
    float* const mine = page + lane();
    first_row += accumulator_row(lane(), 0), first_column += accumulator_column(lane(), 0);
#pragma unroll
    for (int i0 = 0; i0 < kN / 2; i0 += kChunk) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) mine[i * kWarpSize] = acc[i0 + i];
#pragma unroll 1
      for (int i = 0; i < kChunk; ++i) {
        const int row = first_row + i % 4 / 2 * 8, column = first_column + (i0 + i) / 4 * 8 + i % 2;
        if (isnan(mine[i * kWarpSize]) && row < params.base.m && column < params.base.n)
          mine[i * kWarpSize] = exact_sum(params.base, row, column);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) acc[i0 + i] = mine[i * kWarpSize];
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(unsigned char* smem_bytes) {
    const blockflash_bsr_matmul_params& p = params.base;
    const int warp = threadIdx.x / 32 % 4, rank = Cluster::rank(),
              warp_row = (rank * Config::warpgroups + warpgroup) * 64 + warp * 16;
    const uint32_t pages = smem + kSliceOffset + (warpgroup * 4 + warp) * kPages * kPageBytes;
    float* const slice = reinterpret_cast<float*>(smem_bytes + kSliceOffset +
                                                  (warpgroup * 4 + warp) * kPages * kPageBytes);
    if (lane() == 0)
      Cluster::request(barriers.requested_of(1));  // the second slot holds no tile yet
    ptx::wait_for_predecessors();
#pragma unroll 1
    for (int n = 0;; ++n) {
      barriers.wait_published(n);
      const Tile tile = Tile::load(smem, n);
      const int first_column = tile.first_column;
      const BsrSplit split = Tile::split(smem, n);
      if (tile.group < 0) break;
      __syncwarp();
      if (lane() == 0) Cluster::request(barriers.requested_of(n));
      // A row that does not exist is the first one beyond A.
      const int position = tile.group * kRows + warp_row / kBlock,
                block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
      const int block_row = position < block_rows ? p.row_order[position] : block_rows;
      float acc[kN / 2] = {};
      if (tile.stages > 0) multiply(acc);
      // The partial sums of a cluster are laid out as if each of its CTAs had half of the columns.
      const int tiles_n = static_cast<int>((p.n + kClusterN - 1) / kClusterN) * Config::cluster;
      const BsrSums<kConsumerWarps, kN / 2> sums = {
          params, tile.group, first_column / kBlockN + rank, tiles_n, warpgroup * 4 + warp, lane()};
      if (split.number > 0) {
        sums.leave(split.number, acc);
        continue;
      }
      sums.add(split.count, acc);
      const int first_row = block_row * kBlock + warp_row % kBlock;
      undo_zeros(acc, slice, first_row, first_column);
      const auto& tiles = reinterpret_cast<const float(&)[1][kN / 8][4]>(acc);
      if (params.c_by_copies)
        store_tile_by_copies<kPages>(params, tiles[0], pages, first_row, first_column, lane());
      else if (!store_tile_directly(p, tiles[0], first_row, first_column, lane()))
        store_tile<kSliceN, kSliceStride>(p, tiles, slice, first_row, first_column, lane());
    }
    if (lane() == 0) ptx::tensor_store_wait();
  }
};

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  begin_early<Cluster>(barriers, params.a, params.b, params.b_edge);

  if (warpgroup == 0) {
    ptx::lower_registers<56>();
    if (threadIdx.x == 0 && Cluster::rank() == 0) schedule(params, smem, barriers);
    if (threadIdx.x >= 32) copy(params, smem, barriers, threadIdx.x / 32 - 1);
  } else {
    ptx::raise_registers<224>();
    Consumer{params, barriers, smem, warpgroup - 1}.run(smem_bytes);
  }
  Cluster::end();
}

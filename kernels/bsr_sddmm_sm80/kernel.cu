// Sampled dense-dense product (SDDMM) for sm_80 and newer: dense A times dense B at the stored
// blocks of a block-sparse matrix. cp.async ring, ldmatrix, mma.sync.
//
// One CTA computes a tile: several neighbouring stored blocks of a block row, which share its rows
// of A. Their columns of B are gathered by the column indices and are side by side in shared
// memory. The layouts of A and B are run-time arguments, uniform for all threads, on which only
// copies and the loads of fragments depend.
#include "blockflash/bsr/stored_blocks.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/mma/staging.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "core_matrices.cuh"
#include "eight_values.cuh"

namespace blockflash {
namespace {

using Config = BsrSddmmPortableConfig;
using Element = Config::Element;
using Params = blockflash_bsr_sddmm_portable_params;

constexpr int kBlock = Config::block_size, kColumns = Config::columns, kBlocks = kColumns / kBlock,
              kDepth = Config::block_k;
constexpr int kWarpM = kBlock / Config::warps_m, kWarpN = kColumns / Config::warps_n;
constexpr int kMTiles = kWarpM / 16, kNTiles = kWarpN / 8;
constexpr int kABytes = kBlock * kDepth * 2, kBBytes = kColumns * kDepth * 2,
              kStageBytes = kABytes + kBBytes;
constexpr bool is_power_of_two(int x) { return x > 0 && (x & (x - 1)) == 0; }

static_assert(kColumns % kBlock == 0 && kBlocks <= kWarpSize,
              "a tile is whole blocks, and one lane holds the column of one");
static_assert(kMTiles >= 1 && kNTiles % 2 == 0,
              "fragments of B are loaded for two MMA tiles at a time");
static_assert(is_power_of_two(kWarpM) && is_power_of_two(kWarpN),
              "addresses of fragments are permuted by bits");
static_assert(Config::stages >= 2 && Config::smem_bytes == Config::stages * kStageBytes,
              "manifest and kernel disagree on smem");

using Address = CoreAddress<kDepth>;
using Accumulators = float[kMTiles][kNTiles][4];

template <bool transposed>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t address) {
  if constexpr (transposed)
    ptx::ldmatrix_x4_trans(r, address);
  else
    ptx::ldmatrix_x4(r, address);
}

// acc += A·B for one stage and the rows and columns of one warp.
template <bool a_column_major, bool b_column_major>
__device__ __forceinline__ void multiply(Accumulators& acc, const Address& a_lane,
                                         const Address& b_lane, uint32_t stage) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) load_fragment<a_column_major>(a[m], a_lane.at(m, k) + stage);
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t b[4];
      load_fragment<!b_column_major>(b, b_lane.at(n / 2, k) + stage);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Slices of 16 rows × the columns of a warp, staged through the freed ring.
constexpr int kSliceStride =
    kWarpN + 8;  // floats; the padding of 8 keeps the eight rows of a store in different banks
static_assert(16 * kSliceStride * 4 * Config::warps_m * Config::warps_n <= Config::smem_bytes,
              "slices fit into the ring");
static_assert(16 * kWarpN % (8 * kWarpSize) == 0, "a slice divides among the lanes");

// values = alpha·slice + beta·values for 16 rows of the block row from `row` on and the tile's
// columns from `column` on. Lane s of the warp holds the first column of block s.
__device__ __forceinline__ void store_slice(const Params& p, const StoredBlocks& tile,
                                            int first_columns, const float* slice, int row,
                                            int column, int lane) {
  const int height = p.m - tile.block_row * kBlock;
#pragma unroll 1
  for (int i = lane; i < 16 * kWarpN / 8; i += kWarpSize) {
    const int slice_row = i / (kWarpN / 8), slice_column = i % (kWarpN / 8) * 8;
    const int block = (column + slice_column) / kBlock, row_inside = row + slice_row,
              column_inside = (column + slice_column) % kBlock;
    const int width = p.n - __shfl_sync(~0u, first_columns, block) - column_inside;
    if (block >= tile.count) continue;
    const int64_t at =
        (static_cast<int64_t>(tile.first + block) * kBlock + row_inside) * kBlock + column_inside;
    float x[8], old[8] = {};
    *reinterpret_cast<float4*>(x) =
        *reinterpret_cast<const float4*>(slice + slice_row * kSliceStride + slice_column);
    *reinterpret_cast<float4*>(x + 4) =
        *reinterpret_cast<const float4*>(slice + slice_row * kSliceStride + slice_column + 4);
    if (p.beta != 0.f) load_eight(old, p.values, p.values_dtype, p.values_vectorized, at);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] *= p.alpha;
      if (p.beta != 0.f) x[j] += p.beta * old[j];
      // Set explicitly: zeros in one operand times NaN or infinity in the other would be NaN.
      if (row_inside >= height || j >= width) x[j] = 0.f;
    }
    store_eight(p.values, p.values_dtype, p.values_vectorized, at, x);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_sddmm_portable_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_m = warp / Config::warps_n, warp_n = warp % Config::warps_n;

  const StoredBlocks tile = find_blocks<kBlock, kBlocks>(p, blockIdx.x, lane);
  if (tile.count == 0) return;
  const int first_columns = lane < tile.count ? __ldg(p.col_idx + tile.first + lane) * kBlock : -1;

  const DenseCopy<kBlock, 1, kDepth, Config::threads, Element> a_copy = {
      {static_cast<const Element*>(p.a), p.lda, p.m, p.k, p.a_column_major == 0,
       p.a_vectorized != 0},
      tile.block_row * kBlock};
  const DenseCopy<kColumns, kBlocks, kDepth, Config::threads, Element> b_copy = {
      {static_cast<const Element*>(p.b), p.ldb, p.n, p.k, p.b_column_major != 0,
       p.b_vectorized != 0},
      first_columns};
  const int steps = p.k / kDepth + (p.k % kDepth != 0);
  const auto start_stage = [&](int step) {
    if (step < steps) {
      unsigned char* const stage = smem + step % Config::stages * kStageBytes;
      a_copy.start(stage, step * kDepth);
      b_copy.start(stage + kABytes, step * kDepth);
    }
    ptx::cp_async_commit_group();  // also past the end: the group of a step must be the oldest of
                                   // stages - 1
  };
#pragma unroll 1
  for (int step = 0; step < Config::stages - 1; ++step) start_stage(step);

  // Order of the core matrices in a fragment: lines first for A, along K first for B.
  const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const Address a_lane(smem_base, warp_m * kWarpM, lane / 8 % 2, lane / 16, lane);
  const Address b_lane(smem_base + kABytes, warp_n * kWarpN, lane / 16, lane / 8 % 2, lane);
  const bool has_blocks = warp_n * kWarpN < tile.count * kBlock;
  Accumulators acc = {};
  uint32_t stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<Config::stages - 2>();
    __syncthreads();  // the stage is visible to all, and all have read the previous one, which is
                      // refilled now
    start_stage(step + Config::stages - 1);
    if (has_blocks) {
      if (p.a_column_major)
        p.b_column_major ? multiply<true, true>(acc, a_lane, b_lane, stage)
                         : multiply<true, false>(acc, a_lane, b_lane, stage);
      else
        p.b_column_major ? multiply<false, true>(acc, a_lane, b_lane, stage)
                         : multiply<false, false>(acc, a_lane, b_lane, stage);
    }
    stage = stage + kStageBytes == Config::stages * kStageBytes ? 0 : stage + kStageBytes;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the ring is free and becomes the staging area of the values

  float* const slice = reinterpret_cast<float*>(smem) + warp * 16 * kSliceStride;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    fill_slice<kWarpN, kSliceStride>(acc[m], 0, slice, lane);
    __syncwarp();
    store_slice(p, tile, first_columns, slice, warp_m * kWarpM + m * 16, warp_n * kWarpN, lane);
    __syncwarp();
  }
}

// Block-sparse (BSR) times dense in any layout, for sm_80 and newer: A or its transpose, B and C
// row- or column-major.
//
// The multistage matmul of bsr_matmul_sm80 with one tile for all layouts. "Lines" are rows of A and
// columns of B; both operands are tiles of lines × block_k of the depth. Where the depth is
// contiguous in memory, a tile is in shared memory as it is. Where lines are contiguous, each
// square of the tile is there transposed and ldmatrix transposes it back. Both kinds take the
// same space.
#include "blockflash/bsr/epilogue_columns.cuh"
#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"

namespace blockflash {
namespace {

using Config = BsrMatmulConfig;
using Element = Config::Element;

constexpr int kBlock = Config::block_size, kDepth = Config::block_k;
constexpr int kSlots =
    kDepth > kBlock ? kDepth / kBlock : 1;  // blocks of A that a stage covers, at least in part
constexpr int kSlotDepth = kDepth / kSlots;
constexpr int kWarpM = kBlock / Config::warps_m, kWarpN = Config::block_n / Config::warps_n;
constexpr int kMTiles = kWarpM / 16, kNTiles = kWarpN / 8;
constexpr int kChunks = kDepth / 8;                  // 16-byte chunks of a row in shared memory
constexpr int kRowStep = Config::threads / kChunks;  // rows between two chunks of a thread
constexpr int kABytes = kBlock * kDepth * 2, kBBytes = Config::block_n * kDepth * 2;
constexpr int kStageBytes = kABytes + kBBytes;

static_assert(kDepth == 64, "a row in shared memory is as wide as the swizzle permutes");
static_assert(kDepth % kBlock == 0 || kBlock % kDepth == 0,
              "a stage holds whole blocks, or a part of one");
static_assert(Config::block_n % kDepth == 0, "B consists of squares");
static_assert(kRowStep == 16,
              "the rows that a thread copies at a time are in one slot of the smallest blocks");
static_assert(kMTiles >= 1 && kNTiles % 2 == 0,
              "fragments of B are loaded for two MMA tiles at a time");
static_assert(Config::smem_bytes == Config::stages * kStageBytes,
              "manifest and kernel disagree on smem");

using Layout = Swizzle<kChunks>;

// The block of A in one slot of a stage: its block column, -1 past the end of the row, and its
// index among the values.
struct Block {
  int column, value;

  __device__ __forceinline__ Block of_slot(int slot) const {
    return kSlots == 1 ? *this
                       : Block{__shfl_sync(~0u, column, slot), __shfl_sync(~0u, value, slot)};
  }
};

// Starts the copy of A. Lane s of each warp holds the block of slot s; k0 is the depth of the stage
// within its first block.
__device__ __forceinline__ void start_a(const blockflash_bsr_matmul_any_params& params,
                                        uint32_t tile, Block blocks, int k0) {
  constexpr int kSquare = kSlotDepth;  // blocks, or parts of a block that is deeper than a stage
  const Element* const values = static_cast<const Element*>(params.base.values);
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const Block block = blocks.of_slot(chunk * 8 / kSquare);
  const bool valid = block.column >= 0;
  const int square_step = params.a_transposed
                              ? kSquare
                              : kSquare * kBlock;  // from a square of the stage to the next lines
  const Element* const from = values + static_cast<int64_t>(block.value) * (kBlock * kBlock) +
                              (params.a_transposed ? k0 * kBlock : k0) + row0 * kBlock +
                              chunk * 8 % kSquare;
#pragma unroll
  for (int r = 0; r < kBlock; r += kRowStep)
    ptx::cp_async_cg_16(tile + Layout::offset(row0 + r, chunk),
                        valid ? from + r / kSquare * square_step + r % kSquare * kBlock : values,
                        valid ? 16 : 0);
}

// Starts the copy of one chunk of B whose first `count` elements exist; the others become zero.
__device__ __forceinline__ void start_chunk(const blockflash_bsr_matmul_params& p,
                                            unsigned char* dst, int64_t at, int64_t count) {
  const Element* const b = static_cast<const Element*>(p.b);
  const int valid =
      static_cast<int>(max(min(count, static_cast<int64_t>(8)), static_cast<int64_t>(0)));
  if (p.b_vectorized) {
    ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(dst)),
                        valid > 0 ? b + at : b, valid * 2);
  } else {
    // Chunks that are not 16-byte aligned are copied element by element. The barrier before their
    // use makes them visible.
    const uint16_t* const from = reinterpret_cast<const uint16_t*>(b) + at;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) reinterpret_cast<uint16_t*>(dst)[i] = i < valid ? from[i] : 0;
  }
}

// Starts the copy of a row-major B. In shared memory: squares of columns one below the other, each
// with rows of B.
__device__ __forceinline__ void start_b_rows(const blockflash_bsr_matmul_params& p,
                                             unsigned char* tile, Block blocks, int k0,
                                             int64_t first_column) {
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += kRowStep) {
    const int column_of_a = blocks.of_slot(depth / kSlotDepth).column;
    const int64_t k = static_cast<int64_t>(column_of_a) * kBlock + k0 + depth % kSlotDepth + row0;
    const bool valid = column_of_a >= 0 && k < p.k;
#pragma unroll
    for (int square = 0; square < Config::block_n; square += kDepth) {
      const int64_t n = first_column + square + chunk * 8;
      start_chunk(p, tile + Layout::offset(square + depth + row0, chunk), k * p.ldb + n,
                  valid ? p.n - n : 0);
    }
  }
}

// Starts the copy of a column-major B, whose columns are the rows in shared memory.
__device__ __forceinline__ void start_b_columns(const blockflash_bsr_matmul_params& p,
                                                unsigned char* tile, Block blocks, int k0,
                                                int64_t first_column) {
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const int column_of_a = blocks.of_slot(chunk * 8 / kSlotDepth).column;
  const int64_t k = static_cast<int64_t>(column_of_a) * kBlock + k0 + chunk * 8 % kSlotDepth;
#pragma unroll
  for (int r = 0; r < Config::block_n; r += kRowStep) {
    const int64_t n = first_column + r + row0;
    start_chunk(p, tile + Layout::offset(r + row0, chunk), n * p.ldb + k,
                column_of_a >= 0 && n < p.n ? p.k - k : 0);
  }
}

// The addresses from which a lane reads the fragments of its warp, 16 lines × 16 of the depth at a
// time. `square`: lines of a square.
template <int square>
struct Fragments {
  LaneAddress<kChunks> lane;

  // `coords` of this lane inside 16 × 16 elements as they are in shared memory; first_line of its
  // warp.
  __device__ __forceinline__ Fragments(uint32_t tile, LaneCoords coords, bool transposed,
                                       int first_line)
      : lane(tile, coords.row + (transposed ? first_line / square * square : first_line),
             coords.chunk + (transposed ? first_line % square / 8 : 0)) {}

  template <bool transposed>
  __device__ __forceinline__ void load(uint32_t (&r)[4], int line, int depth,
                                       uint32_t stage) const {
    if (transposed)
      ptx::ldmatrix_x4_trans(r, lane.at(line / square * square + depth % square,
                                        (depth / square * square + line % square) / 16) +
                                    stage);
    else
      ptx::ldmatrix_x4(r, lane.at(line, depth / 16) + stage);
  }
};
using AFragments = Fragments<kSlotDepth>;
using BFragments = Fragments<kDepth>;
static_assert(kSlotDepth % kWarpM == 0 || kWarpM % kSlotDepth == 0,
              "the lines of a warp begin, or end, with a square");
static_assert(kDepth % kWarpN == 0 || kWarpN % kDepth == 0,
              "the lines of a warp begin, or end, with a square");

// acc += A·B for one stage and the rows and columns of one warp. a_lines, b_lines: lines are
// contiguous instead of the depth.
template <bool a_lines, bool b_lines>
__device__ __forceinline__ void multiply(float (&acc)[kMTiles][kNTiles][4],
                                         const AFragments& a_from, const BFragments& b_from,
                                         uint32_t stage) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) a_from.template load<a_lines>(a[m], m * 16, k, stage);
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t b[4];
      b_from.template load<b_lines>(b, n * 8, k, stage);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Slices of 16 rows × kSliceN columns per warp, staged through the freed ring.
constexpr int kSliceN = kWarpN < 64 ? kWarpN : 64;
constexpr int kSliceStride =
    kSliceN + 8;  // floats; the padding of 8 keeps the eight rows of a store in different banks
static_assert(16 * kSliceStride * 4 * Config::warps_m * Config::warps_n <= Config::smem_bytes,
              "slices fit into the ring");

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_any_params params) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];

  const blockflash_bsr_matmul_params& p = params.base;
  const BsrTile<Config::block_n, int64_t> tile(
      static_cast<int>((p.m + kBlock - 1) / kBlock),
      static_cast<int>((p.n + Config::block_n - 1) / Config::block_n), blockIdx.x);
  const int block_row = p.row_order != nullptr ? p.row_order[tile.position] : tile.position;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_m = warp / Config::warps_n, warp_n = warp % Config::warps_n;

  const int first_block = p.row_ptr[block_row], end_block = p.row_ptr[block_row + 1];
  const int steps = static_cast<int>(
      (static_cast<int64_t>(end_block - first_block) * kBlock + kDepth - 1) / kDepth);

  // The block in slot `lane` of a stage, fetched a stage ahead since the addresses of A and B
  // depend on it.
  const auto fetch_blocks = [&](int step) {
    const int at = first_block + static_cast<int>(static_cast<int64_t>(step) * kDepth / kBlock) +
                   (kSlots == 1 ? 0 : lane);
    if (at >= end_block) return Block{-1, 0};
    return Block{__ldg(p.col_idx + at),
                 params.block_idx != nullptr ? __ldg(params.block_idx + at) : at};
  };
  Block blocks = fetch_blocks(0);
  const auto start_stage = [&](int step) {
    if (step < steps) {
      unsigned char* const stage = smem + step % Config::stages * kStageBytes;
      const int k0 = kSlots == 1 ? step % (kBlock / kSlotDepth) * kDepth : 0;
      start_a(params, static_cast<uint32_t>(__cvta_generic_to_shared(stage)), blocks, k0);
      if (params.b_column_major)
        start_b_columns(p, stage + kABytes, blocks, k0, tile.first_column);
      else
        start_b_rows(p, stage + kABytes, blocks, k0, tile.first_column);
      blocks = fetch_blocks(step + 1);
    }
    ptx::cp_async_commit_group();  // also past the end: the group of a step must be the oldest of
                                   // stages - 1
  };
#pragma unroll 1
  for (int step = 0; step < Config::stages - 1; ++step) start_stage(step);

  const bool a_lines = params.a_transposed, b_lines = !params.b_column_major;
  const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const AFragments a_from(smem_base, a_lines ? lane_col_major(lane) : lane_row_major(lane), a_lines,
                          warp_m * kWarpM);
  const BFragments b_from(smem_base + kABytes,
                          b_lines ? lane_row_major(lane) : lane_col_major(lane), b_lines,
                          warp_n * kWarpN);
  float acc[kMTiles][kNTiles][4] = {};
  uint32_t stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<Config::stages - 2>();
    __syncthreads();  // the stage is visible to all, and all have read the previous one, which is
                      // refilled now
    start_stage(step + Config::stages - 1);
    if (a_lines && b_lines) multiply<true, true>(acc, a_from, b_from, stage);
    if (a_lines && !b_lines) multiply<true, false>(acc, a_from, b_from, stage);
    if (!a_lines && b_lines) multiply<false, true>(acc, a_from, b_from, stage);
    if (!a_lines && !b_lines) multiply<false, false>(acc, a_from, b_from, stage);
    stage = stage + kStageBytes == Config::stages * kStageBytes ? 0 : stage + kStageBytes;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the ring is free and becomes the staging area of the epilogue

  float* const slice = reinterpret_cast<float*>(smem) + warp * 16 * kSliceStride;
  const int64_t first_row = static_cast<int64_t>(block_row) * kBlock + warp_m * kWarpM;
  const int64_t first_column = tile.first_column + warp_n * kWarpN;
  if (p.c_column_major) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
      store_tile_columns<kSliceN, kSliceStride>(p, acc[m], slice, first_row + m * 16, first_column,
                                                lane);
  } else {
    store_tile<kSliceN, kSliceStride>(p, acc, slice, first_row, first_column, lane);
  }
}

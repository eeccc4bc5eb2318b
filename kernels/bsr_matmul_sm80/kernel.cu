// Block-sparse (BSR) times dense for sm_80 and newer: cp.async ring, ldmatrix, mma.sync.
//
// One CTA computes one block row of A times block_n columns of B. The blocks of the row laid end to
// end are the depth of a multistage matmul, whose rows of B are gathered by the column indices. No
// missing block is ever multiplied, and nothing is planned ahead.
#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"

namespace blockflash {
namespace {

using Config = BsrMatmulConfig;
using Element = Config::Element;

constexpr int kBlock = Config::block_size;
constexpr int kSlots = Config::block_k > kBlock
                           ? Config::block_k / kBlock
                           : 1;  // blocks of A that a stage covers, at least in part
constexpr int kSlotRows = Config::block_k / kSlots;
constexpr int kWarpM = kBlock / Config::warps_m, kWarpN = Config::block_n / Config::warps_n;
constexpr int kMTiles = kWarpM / 16, kNTiles = kWarpN / 8;
constexpr int kAChunks = Config::block_k / 8,
              kBChunks = Config::block_n / 8;  // 16-byte chunks of a row in shared memory
constexpr int kABytes = kBlock * Config::block_k * 2,
              kBBytes = Config::block_k * Config::block_n * 2;
constexpr int kStageBytes = kABytes + kBBytes;

static_assert(Config::block_k % kBlock == 0 || kBlock % Config::block_k == 0,
              "a stage holds whole blocks, or a part of one");
static_assert(kSlots <= kWarpSize, "one lane fetches the column index of one block");
static_assert(kMTiles >= 1 && kNTiles % 2 == 0,
              "fragments of B are loaded for two MMA tiles at a time");
static_assert(Config::smem_bytes == Config::stages * kStageBytes,
              "manifest and kernel disagree on smem");

using ALayout = Swizzle<kAChunks>;
using BLayout = Swizzle<kBChunks>;

// The tile of C that one CTA computes: of a block row with the blocks [first_block, end_block), the
// first of them in block column `first_block_column`. One load brings them: the order of the rows,
// `row_ptr` and `col_idx` one after another would take the latency of memory three times.
struct Work {
  int block_row, first_block, end_block, first_block_column;
  int64_t first_column;

  __device__ __forceinline__ explicit Work(const blockflash_bsr_matmul_portable_params& params) {
    const blockflash_bsr_matmul_params& p = params.base;
    // Panels of about 1024 columns keep their slice of B in L2 while all block rows pass over it.
    constexpr int kPanelTiles = Config::block_n < 1024 ? 1024 / Config::block_n : 1;
    const int block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
    const int tiles = static_cast<int>((p.n + Config::block_n - 1) / Config::block_n);
    const int panel = blockIdx.x / (block_rows * kPanelTiles);
    const int rest = blockIdx.x - panel * (block_rows * kPanelTiles);
    const int width = min(kPanelTiles, tiles - panel * kPanelTiles);
    const int position = rest / width;
    const int4 row = __ldg(reinterpret_cast<const int4*>(params.rows) + position);
    block_row = row.x, first_block = row.y, end_block = row.z, first_block_column = row.w;
    first_column = static_cast<int64_t>(panel * kPanelTiles + rest % width) * Config::block_n;
  }
};

// The copies of A by this thread: chunk `chunk` of rows row0, row0 + kRowStep, … of every stage.
struct ACopy {
  static constexpr int kRowStep = Config::threads / kAChunks;
  static_assert(Config::threads % kAChunks == 0 && (kRowStep >= kBlock || kBlock % kRowStep == 0),
                "rows divide among the threads");

  const Element* src;  // row `row0` of the first stage
  int row0, chunk;

  __device__ __forceinline__ ACopy(const blockflash_bsr_matmul_params& p, int first_block) {
    chunk = threadIdx.x % kAChunks;
    row0 = threadIdx.x / kAChunks;
    src =
        static_cast<const Element*>(p.values) +
        (static_cast<int64_t>(first_block) * kBlock + chunk * 8 / kBlock * kBlock + row0) * kBlock +
        chunk * 8 % kBlock;
  }

  // Starts the copy of the stage at depth k0 of the row, whose blocks end at `depth`. Depths past
  // the end become zero.
  __device__ __forceinline__ void start(uint32_t a_tile, int k0, int depth) const {
    const Element* const from =
        src + static_cast<int64_t>(k0 / kBlock) * (kBlock * kBlock) + k0 % kBlock;
    const bool valid = k0 + chunk * 8 < depth;
#pragma unroll
    for (int r = 0; r < kBlock; r += kRowStep)
      if (kRowStep <= kBlock || row0 < kBlock)
        ptx::cp_async_cg_16(a_tile + ALayout::offset(row0 + r, chunk),
                            valid ? from + r * kBlock : src, valid ? 16 : 0);
  }
};

// The copies of B by this thread: chunk `chunk` of rows row0, row0 + kRowStep, … of every stage.
struct BCopy {
  static constexpr int kRowStep = Config::threads / kBChunks;
  static_assert(Config::threads % kBChunks == 0 && kSlotRows % kRowStep == 0,
                "rows divide among the threads");

  const Element* src;  // row 0 of B
  int row0, chunk;
  int valid_columns;  // valid columns among the chunk's eight; the others become zero

  __device__ __forceinline__ BCopy(const blockflash_bsr_matmul_params& p, int64_t first_column) {
    chunk = threadIdx.x % kBChunks;
    row0 = threadIdx.x / kBChunks;
    const int64_t column = first_column + chunk * 8;
    valid_columns =
        static_cast<int>(max(min(p.n - column, static_cast<int64_t>(8)), static_cast<int64_t>(0)));
    src = static_cast<const Element*>(p.b) + (valid_columns > 0 ? column : 0);
  }

  // Starts the copy of the rows of a stage. Lane s of each warp holds the block column of slot s,
  // -1 past the end of the row; k0 is the depth of the stage within its first block. Rows past the
  // end become zero.
  __device__ __forceinline__ void start(const blockflash_bsr_matmul_params& p,
                                        unsigned char* b_tile, int columns, int k0) const {
    const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(b_tile));
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int column = kSlots == 1 ? columns : __shfl_sync(~0u, columns, slot);
      const int64_t first_row = static_cast<int64_t>(column) * kBlock + k0;
      const int valid_rows =
          column < 0 ? 0 : static_cast<int>(min(p.k - first_row, static_cast<int64_t>(kSlotRows)));
      const Element* from = src + (first_row + row0) * p.ldb;
      if (p.b_vectorized) {
#pragma unroll
        for (int r = 0; r < kSlotRows; r += kRowStep, from += kRowStep * p.ldb) {
          const bool valid = row0 + r < valid_rows;
          ptx::cp_async_cg_16(tile + BLayout::offset(slot * kSlotRows + r + row0, chunk),
                              valid ? from : src, valid ? valid_columns * 2 : 0);
        }
      } else {
        // Rows that are not 16-byte aligned are copied element by element. The barrier before their
        // use makes them visible.
#pragma unroll 1
        for (int row = row0; row < kSlotRows; row += kRowStep, from += kRowStep * p.ldb) {
          uint16_t* const dst =
              reinterpret_cast<uint16_t*>(b_tile + BLayout::offset(slot * kSlotRows + row, chunk));
#pragma unroll 1
          for (int i = 0; i < 8; ++i)
            dst[i] = row < valid_rows && i < valid_columns
                         ? reinterpret_cast<const uint16_t*>(from)[i]
                         : 0;
        }
      }
    }
  }
};

// acc += A·B for one stage and the rows and columns of one warp.
__device__ __forceinline__ void multiply(float (&acc)[kMTiles][kNTiles][4],
                                         const LaneAddress<kAChunks>& a_lane,
                                         const LaneAddress<kBChunks>& b_lane, uint32_t stage) {
#pragma unroll
  for (int k = 0; k < Config::block_k / 16; ++k) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(a[m], a_lane.at(m * 16, k) + stage);
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_lane.at(k * 16, n / 2) + stage);
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

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_portable_params params) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_bsr_matmul_params& p = params.base;

  const Work work(params);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_m = warp / Config::warps_n, warp_n = warp % Config::warps_n;

  const int first_block = work.first_block, end_block = work.end_block;
  const int depth = (end_block - first_block) * kBlock;  // of the row's blocks laid end to end
  const int steps = (depth + Config::block_k - 1) / Config::block_k;

  const uint32_t smem_base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const ACopy a_copy(p, first_block);
  const BCopy b_copy(p, work.first_column);

  // Block column of slot `lane` of a stage, fetched a stage ahead since the addresses of B depend
  // on it.
  const auto fetch_columns = [&](int step) {
    const int block = first_block + step * Config::block_k / kBlock + (kSlots == 1 ? 0 : lane);
    return block < end_block ? __ldg(p.col_idx + block) : -1;
  };
  int columns = kSlots == 1 && first_block < end_block ? work.first_block_column : fetch_columns(0);
  const auto start_a = [&](int step) {
    a_copy.start(smem_base + step % Config::stages * kStageBytes, step * Config::block_k, depth);
  };
  // The pattern was complete before the host had it and never changes (`BsrIndices`), so it may be
  // read while the predecessors in the stream are still running, and so may values that are
  // settled; everything else may not.
  int first_of_a = 0;     // the first step whose A is copied behind the predecessors
#if __CUDA_ARCH__ >= 900  // other GPUs start no launch before its predecessors are complete
  if (params.values_settled) {
    first_of_a = min(Config::stages - 1, steps);
#  pragma unroll 1
    for (int step = 0; step < first_of_a; ++step) start_a(step);
  }
#endif
  ptx::wait_for_predecessors();
  const auto start_stage = [&](int step) {
    if (step < steps) {
      unsigned char* const stage = smem + step % Config::stages * kStageBytes;
      if (step >= first_of_a) start_a(step);
      b_copy.start(p, stage + kABytes, columns, kSlots == 1 ? step * Config::block_k % kBlock : 0);
      columns = fetch_columns(step + 1);
    }
    ptx::cp_async_commit_group();  // also past the end: the group of a step must be the oldest of
                                   // stages - 1
  };
#pragma unroll 1
  for (int step = 0; step < Config::stages - 1; ++step) start_stage(step);

  const LaneCoords coords = lane_row_major(lane);
  const LaneAddress<kAChunks> a_lane(smem_base, warp_m * kWarpM + coords.row, coords.chunk);
  const LaneAddress<kBChunks> b_lane(smem_base + kABytes, coords.row,
                                     warp_n * kWarpN / 8 + coords.chunk);
  float acc[kMTiles][kNTiles][4] = {};
  uint32_t stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<Config::stages - 2>();
    __syncthreads();  // the stage is visible to all, and all have read the previous one, which is
                      // refilled now
    start_stage(step + Config::stages - 1);
    multiply(acc, a_lane, b_lane, stage);
    stage = stage + kStageBytes == Config::stages * kStageBytes ? 0 : stage + kStageBytes;
  }
  // Dependents start once no CTA of this grid has products left: while they wait they would take
  // registers and slots of the SMs for nothing.
  ptx::launch_dependents();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // the ring is free and becomes the staging area of the epilogue

  float* const slice = reinterpret_cast<float*>(smem) + warp * 16 * kSliceStride;
  const int64_t first_row = static_cast<int64_t>(work.block_row) * kBlock + warp_m * kWarpM;
  store_tile<kSliceN, kSliceStride>(p, acc, slice, first_row, work.first_column + warp_n * kWarpN,
                                    lane);
}

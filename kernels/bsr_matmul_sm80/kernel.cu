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
#include "blockflash/ptx/opaque.cuh"

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

// Whether fragments are loaded a depth of 16 ahead, also from the next stage, and the copies of a
// stage mix with products: where an SM has few warps, no other warp hides their latency. Smaller
// blocks have no registers for it, and with two stages copies would start too late.
constexpr bool kAhead = kBlock >= 64 && Config::stages > 2;
constexpr int kKSteps = Config::block_k / 16;
constexpr int kParts = kAhead ? kKSteps - 1 : 1;
constexpr int kAllParts = -1;
static_assert(!kAhead || kKSteps % 2 == 0, "fragments alternate between two sets of registers");

constexpr int kACopies = (kABytes / 16 + Config::threads - 1) / Config::threads;
constexpr int kCopies = kACopies + kBBytes / 16 / Config::threads;
__device__ __forceinline__ bool is_of_part(int copy, int part) {
  return part == kAllParts || copy * kParts / kCopies == part;
}

// The places of one thread's copies in a stage: chunk `chunk` of the rows row0, row0 + kRowStep, …
// of a tile. The swizzle repeats every eight rows, so few offsets serve all copies and the rest
// folds into immediates.
template <class Layout, int chunks>
struct Places {
  static constexpr int kRowStep = Config::threads / chunks;
  static constexpr int kOffsets = kRowStep < 8 ? 8 / kRowStep : 1;
  static_assert(Config::threads % chunks == 0 && (kRowStep % 8 == 0 || 8 % kRowStep == 0),
                "rows divide among the threads");

  int row0 = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  uint32_t offsets[kOffsets];

  __device__ __forceinline__ Places() {
#pragma unroll
    for (int i = 0; i < kOffsets; ++i)
      offsets[i] = ptx::opaque(Layout::offset(row0 + i * kRowStep, chunk));
  }

  // The offset of row row0 + row, where `row` is a multiple of kRowStep that is known when the
  // kernel is compiled.
  __device__ __forceinline__ uint32_t at(int row) const {
    const int i = row / kRowStep % kOffsets;
    return offsets[i] + (row - i * kRowStep) * Layout::row_bytes;
  }
};

// The copies of A by this thread.
struct ACopy {
  Places<ALayout, kAChunks> places;
  static constexpr int kRowStep = decltype(places)::kRowStep;
  static_assert(kRowStep >= kBlock || kBlock % kRowStep == 0, "rows divide among the threads");

  const Element* src;  // row row0 of the first stage

  __device__ __forceinline__ ACopy(const blockflash_bsr_matmul_params& p, int first_block) {
    const int column = places.chunk * 8;
    src = static_cast<const Element*>(p.values) +
          (static_cast<int64_t>(first_block) * kBlock + column / kBlock * kBlock + places.row0) *
              kBlock +
          column % kBlock;
  }

  // Starts a part of the copy of the stage at depth k0 of the row, whose blocks end at `depth`.
  // Depths past the end become zero: a copy of no bytes reads no memory, wherever its source is.
  __device__ __forceinline__ void start(bool active, uint32_t a_tile, int k0, int depth,
                                        int part) const {
    const Element* const from =
        src + static_cast<int64_t>(k0 / kBlock) * (kBlock * kBlock) + k0 % kBlock;
    const int bytes = k0 + places.chunk * 8 < depth ? 16 : 0;
#pragma unroll
    for (int row = 0; row < kBlock; row += kRowStep)
      if (is_of_part(row / kRowStep, part))
        ptx::cp_async_cg_16_if(active && (kRowStep <= kBlock || places.row0 < kBlock),
                               a_tile + places.at(row), from + row * kBlock, bytes);
  }
};

// The copies of B by this thread.
struct BCopy {
  Places<BLayout, kBChunks> places;
  static constexpr int kRowStep = decltype(places)::kRowStep;
  static_assert(kSlotRows % kRowStep == 0, "rows divide among the threads");

  const char* src;              // row row0 of B
  int64_t block_bytes;          // from a block of rows to the next one
  int whole_blocks, rows_left;  // blocks of rows that end within B, and the rows behind them
  int valid_columns;            // valid columns among the chunk's eight; the others become zero
  int row_offset;    // to the rows of a stage from those of this thread; all are past the end
                     // where no column is valid
  bool by_elements;  // whether the chunk is not copied as a whole, since it is not aligned or C
                     // ends within it

  __device__ __forceinline__ BCopy(const blockflash_bsr_matmul_params& p, int64_t first_column) {
    const int64_t column = first_column + places.chunk * 8;
    valid_columns =
        static_cast<int>(max(min(p.n - column, static_cast<int64_t>(8)), static_cast<int64_t>(0)));
    src = reinterpret_cast<const char*>(static_cast<const Element*>(p.b) + places.row0 * p.ldb +
                                        (valid_columns > 0 ? column : 0));
    block_bytes = kBlock * p.ldb * 2;
    whole_blocks = static_cast<int>(p.k / kBlock), rows_left = static_cast<int>(p.k % kBlock);
    row_offset = ptx::opaque(valid_columns > 0 ? -places.row0 : -kBlock);
    by_elements = !p.b_vectorized || valid_columns % 8 != 0;
  }

  // Calls `copy(slot, from, valid_rows)` for each slot of a stage with the first row of the slot
  // that this thread copies, and how many of the slot's rows are within B. Lane s of each warp
  // holds the block column of slot s, -1 past the end of the row; k0 is the depth of the stage
  // within its first block.
  template <class Copy>
  __device__ __forceinline__ void each_slot(const blockflash_bsr_matmul_params& p, int columns,
                                            int k0, const Copy& copy) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int column = kSlots == 1 ? columns : __shfl_sync(~0u, columns, slot);
      const int behind = column == whole_blocks ? rows_left - k0 : 0;
      const int valid_rows = static_cast<uint32_t>(column) < static_cast<uint32_t>(whole_blocks)
                                 ? kBlock - k0
                                 : behind;
      const char* from = src + column * block_bytes;
      if (Config::block_k < kBlock) from += k0 * p.ldb * 2;
      copy(slot, from, valid_rows);
    }
  }

  // Starts a part of the copies of a stage, without a branch. Rows past the end become zero.
  __device__ __forceinline__ void start(const blockflash_bsr_matmul_params& p, bool active,
                                        uint32_t b_tile, int columns, int k0, int part) const {
    const int64_t step_bytes = kRowStep * p.ldb * 2;
    each_slot(p, columns, k0, [&](int slot, const char* from, int valid_rows) {
      const int rows = valid_rows + row_offset;
#pragma unroll
      for (int row = 0; row < kSlotRows; row += kRowStep, from += step_bytes)
        if (is_of_part(kACopies + (slot * kSlotRows + row) / kRowStep, part))
          ptx::cp_async_cg_16_if(active && !by_elements, b_tile + places.at(slot * kSlotRows + row),
                                 from, row < rows ? 16 : 0);
    });
  }

  // Copies what is not copied as a whole chunk. The barrier before its use makes it visible.
  __device__ __forceinline__ void copy_elements(const blockflash_bsr_matmul_params& p,
                                                unsigned char* b_tile, int columns, int k0) const {
    const int64_t step_bytes = kRowStep * p.ldb * 2;
    each_slot(p, columns, k0, [&](int slot, const char* from, int valid_rows) {
#pragma unroll 1
      for (int row = places.row0; by_elements && row < kSlotRows;
           row += kRowStep, from += step_bytes) {
        uint16_t* const dst = reinterpret_cast<uint16_t*>(
            b_tile + BLayout::offset(slot * kSlotRows + row, places.chunk));
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          dst[i] = row < valid_rows && i < valid_columns
                       ? reinterpret_cast<const uint16_t*>(from)[i]
                       : 0;
      }
    });
  }
};

// acc += A·B for one stage and the rows and columns of one warp.
__device__ __forceinline__ void multiply(float (&acc)[kMTiles][kNTiles][4],
                                         const LaneAddress<kAChunks>& a_lane,
                                         const LaneAddress<kBChunks>& b_lane, uint32_t stage) {
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
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

// What the MMAs of a warp read for a depth of 16.
struct Fragments {
  uint32_t a[kMTiles][4], b[kNTiles / 2][4];

  __device__ __forceinline__ void load(const LaneAddress<kAChunks>& a_lane,
                                       const LaneAddress<kBChunks>& b_lane, int k, uint32_t stage) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(a[m], a_lane.at(m * 16, k) + stage);
#pragma unroll
    for (int n = 0; n < kNTiles / 2; ++n)
      ptx::ldmatrix_x4_trans(b[n], b_lane.at(k * 16, n) + stage);
  }

  // acc += A·B
  __device__ __forceinline__ void multiply(float (&acc)[kMTiles][kNTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
        ptx::mma_m16n8k16<Element>(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
};

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
  const auto start_a = [&](int step, bool active, uint32_t stage, int part) {
    a_copy.start(active, smem_base + stage, step * Config::block_k, depth, part);
  };
  // The pattern was complete before the host had it and never changes (`BsrIndices`), so it may be
  // read while the predecessors in the stream are still running, and so may values that are
  // settled; everything else may not.
  int first_of_a = 0;     // the first step whose A is copied behind the predecessors
#if __CUDA_ARCH__ >= 900  // other GPUs start no launch before its predecessors are complete
  if (params.values_settled) {
    first_of_a = min(Config::stages - 1, steps);
#  pragma unroll 1
    for (int step = 0; step < first_of_a; ++step)
      start_a(step, true, step * kStageBytes, kAllParts);
  }
#endif
  const bool some_by_elements = __any_sync(~0u, b_copy.by_elements);
  ptx::wait_for_predecessors();
  const auto next_stage = [](uint32_t stage) {
    return stage + kStageBytes == Config::stages * kStageBytes ? 0 : stage + kStageBytes;
  };
  uint32_t filled = 0;  // the stage that is filled next
  const auto depth_in_block = [](int step) {
    return kSlots == 1 ? step * Config::block_k % kBlock : 0;
  };
  const auto start_part = [&](int step, bool active, int part) {
    start_a(step, active && step >= first_of_a, filled, part);
    b_copy.start(p, active, smem_base + filled + kABytes, columns, depth_in_block(step), part);
  };
  // Copies the rest of a stage and moves on to the next one.
  const auto finish_stage = [&](int step) {
    if (step < steps) {
      if (some_by_elements)
        b_copy.copy_elements(p, smem + filled + kABytes, columns, depth_in_block(step));
      columns = fetch_columns(step + 1);
      filled = next_stage(filled);
    }
    ptx::cp_async_commit_group();  // also past the end: the group of a step must be the oldest of
                                   // stages - 1
  };
  const auto start_stage = [&](int step) {
    if (step < steps) start_part(step, true, kAllParts);
    finish_stage(step);
  };
#pragma unroll 1
  for (int step = 0; step < Config::stages - 1; ++step) start_stage(step);

  const LaneCoords coords = lane_row_major(lane);
  LaneAddress<kAChunks> a_lane(smem_base, warp_m * kWarpM + coords.row, coords.chunk);
  LaneAddress<kBChunks> b_lane(smem_base + kABytes, coords.row, warp_n * kWarpN / 8 + coords.chunk);
  // In registers: the compiler would compute them anew in each step.
#pragma unroll
  for (uint32_t& address : a_lane.step) address = ptx::opaque(address);
#pragma unroll
  for (uint32_t& address : b_lane.step) address = ptx::opaque(address);
  float acc[kMTiles][kNTiles][4] = {};
  // The next stage is visible to all, and all have read the one before it, which is refilled.
  const auto await_stage = [] {
    ptx::cp_async_wait_group<Config::stages - 2>();
    __syncthreads();
  };
  uint32_t stage = 0;
  Fragments fragments[2];
  if constexpr (kAhead) {
    await_stage();
    fragments[0].load(a_lane, b_lane, 0, stage);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int started = step + Config::stages - 1;
    if constexpr (kAhead) {
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) {
        if (k == kKSteps - 1) {
          await_stage();
          stage = next_stage(stage);
        }
        fragments[(k + 1) % 2].load(a_lane, b_lane, (k + 1) % kKSteps, stage);
        if (k < kParts) start_part(started, started < steps, k);
        fragments[k % 2].multiply(acc);
        if (k + 1 == kParts) finish_stage(started);
      }
    } else {
      await_stage();
      start_stage(started);
      multiply(acc, a_lane, b_lane, stage);
      stage = next_stage(stage);
    }
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

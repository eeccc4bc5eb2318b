// Block-sparse (BSR) times dense with few columns: A is streamed through registers.
//
// With few columns the blocks of A are nearly all that is read. A CTA computes a strip of up to 64
// rows of a block row; its warps share the depth, each with sums of its own, which are added in the
// order of the warps. Blocks go from memory straight into the fragments of MMA, 16 bytes a lane,
// and so do rows of B, which `movmatrix` transposes. A long strip is shared by the CTAs of a
// cluster.
#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/cluster.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/movmatrix.cuh"

namespace blockflash {
namespace {

using Config = BsrMatmulNarrowConfig;
using Element = Config::Element;
using Params = blockflash_bsr_matmul_narrow_params;

constexpr int kBlock = Config::block_size, kN = Config::block_n, kWarps = Config::warps;
constexpr int kRows = kBlock < 64 ? kBlock : 64, kStrips = kBlock / kRows;  // strips of a block row
constexpr int kMTiles = kRows / 16, kNTiles = kN / 8;
constexpr int kPerLane = kN / 4;  // columns of a row of B that a lane loads

// The depth is walked in windows of 32, of two blocks where they are that small. A lane loads 16
// bytes of each of its rows of A: in window w the depths 8 t to 8 t + 7, where t = lane % 4. MMA
// does not care which depth is which, so registers of A are fragments, and rows of B follow.
constexpr int kWindow = 32;
constexpr int kBlocksInWindow = kBlock < kWindow ? kWindow / kBlock : 1;
constexpr int kWindowsInBlock = kBlock < kWindow ? 1 : kBlock / kWindow;
// Windows that a warp loads at a time, so that enough of A, or of A and B, is on its way.
constexpr int kTogether = kRows < 64 ? (kN == 8 ? 64 : 32) / kRows : 1;

// Rows of sums in shared memory are padded, so that neighbouring rows are in different banks.
constexpr int kStride = kN + 4;
static_assert(Config::smem_bytes == kWarps * kRows * kStride * 4,
              "manifest and kernel disagree on smem");
static_assert(kBlocksInWindow <= 2 && kN % 8 == 0 && (kPerLane == 2 || kPerLane == 8),
              "a lane loads a word or 16 bytes of a row of B");

// Where this warp works: windows first, first + step, … of a strip.
struct Work {
  int block_row, strip, first_block, blocks, batch, batches;
  int rank, ctas;  // of the strip; rank 0 stores C
  int64_t first_column;

  __device__ __forceinline__ Work(const Params& params, int warp) {
    const blockflash_bsr_matmul_params& p = params.base;
    const int tiles_n = static_cast<int>((p.n + kN - 1) / kN);
    const int positions = static_cast<int>((p.m + kBlock - 1) / kBlock) * kStrips;
    rank = 0, ctas = 1;
    int cluster = blockIdx.x;
#if __CUDA_ARCH__ >= 900
    ctas = ptx::cluster_size(), rank = ptx::cluster_rank();
    cluster = blockIdx.x / ctas;
#endif
    first_column = static_cast<int64_t>(cluster % tiles_n) * kN;
    int position = cluster / tiles_n;
    if (position >= params.long_strips) {
      // The CTAs of other clusters have a strip each.
      position = params.long_strips + (position - params.long_strips) * ctas + rank;
      rank = 0, ctas = 1;
    }
    strip = position % kStrips;
    int4 row = make_int4(-1, 0, 0, 0);
    if (position < positions)
      row = __ldg(reinterpret_cast<const int4*>(params.rows) + position / kStrips);
    block_row = row.x, first_block = row.y, blocks = row.z - row.y;
    batch = rank * kWarps + warp, batches = ctas * kWarps;
  }

  __device__ __forceinline__ int windows() const {
    return kBlock < kWindow ? (blocks + kBlocksInWindow - 1) / kBlocksInWindow
                            : blocks * kWindowsInBlock;
  }
};

// A lane's part of a few windows of A: of each tile of 16 rows the rows lane / 4 and 8 below.
struct ABatch {
  uint4 rows[kTogether][kMTiles][2];

  __device__ __forceinline__ void load(const Params& params, const Work& work, int batch,
                                       int lane) {
    const int row = work.strip * kRows + lane / 4, chunk = lane % 4;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int window = batch * kTogether + i;
      const int in_window = chunk * 8 / kBlock;  // the block, where a window has several
      const int block = window / kWindowsInBlock * kBlocksInWindow + in_window;
      const int column = window % kWindowsInBlock * kWindow + (chunk * 8 - in_window * kBlock);
      const Element* const from =
          static_cast<const Element*>(params.base.values) +
          (static_cast<int64_t>(work.first_block + block) * kBlock + row) * kBlock + column;
      const bool exists = block < work.blocks;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          rows[i][m][half] =
              exists ? __ldcg(reinterpret_cast<const uint4*>(from + (m * 16 + half * 8) * kBlock))
                     : make_uint4(0, 0, 0, 0);
    }
  }
};

// A lane's part of the rows of B that meet a few windows: four rows of each, in the order in which
// `movmatrix` makes fragments of them for the registers of A.
struct BLoader {
  const uint16_t* base;  // this lane's first column of row 0
  int64_t k, ldb;
  int valid;         // columns of the lane that exist
  bool by_elements;  // rows are not aligned, or C ends within the lane's columns

  __device__ __forceinline__ BLoader(const blockflash_bsr_matmul_params& p, int64_t first_column,
                                     int lane) {
    const int64_t column = first_column + lane % 4 * kPerLane;
    valid = static_cast<int>(
        max(min(p.n - column, static_cast<int64_t>(kPerLane)), static_cast<int64_t>(0)));
    base = static_cast<const uint16_t*>(p.b) + (valid > 0 ? column : 0);
    k = p.k, ldb = p.ldb;
    by_elements = !p.b_vectorized || valid % kPerLane != 0;
  }

  // The block column of this lane's rows in a window; -1 past the end of the strip.
  __device__ __forceinline__ int column(const Params& params, const Work& work, int window,
                                        int lane) const {
    const int block = window / kWindowsInBlock * kBlocksInWindow +
                      (kBlocksInWindow > 1 ? lane / 4 / (8 / kBlocksInWindow) : 0);
    return block < work.blocks ? __ldg(params.base.col_idx + work.first_block + block) : -1;
  }

  __device__ __forceinline__ void load(uint32_t (&words)[4][kNTiles], int column, int window,
                                       int lane) const {
    // Of the window: the lane's rows are this one and those 2, 4 and 6 below.
    const int depth = lane / 8 * 8 + lane / 4 % 2;
    const int in_block =
        kBlock < kWindow ? depth % kBlock : window % kWindowsInBlock * kWindow + depth;
    const int64_t row = static_cast<int64_t>(column) * kBlock + in_block;
    const int64_t left = column >= 0 && valid > 0 ? k - row : 0;  // rows of B from this one on
    const uint16_t* const from = base + row * ldb;
    if (by_elements)
      load_elements(words, from, left);
    else
      load_words(words, from, left);
  }

 private:
  __device__ __forceinline__ void load_words(uint32_t (&words)[4][kNTiles], const uint16_t* from,
                                             int64_t left) const {
#pragma unroll
    for (int j = 0; j < 4; ++j, from += 2 * ldb) {
      const bool exists = 2 * j < left;
      if constexpr (kPerLane == 8) {
        const uint4 x = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        words[j][0] = x.x, words[j][1] = x.y, words[j][2] = x.z, words[j][3] = x.w;
      } else {
        words[j][0] = exists ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
    }
  }

  __device__ __forceinline__ void load_elements(uint32_t (&words)[4][kNTiles], const uint16_t* from,
                                                int64_t left) const {
#pragma unroll
    for (int j = 0; j < 4; ++j, from += 2 * ldb)
#pragma unroll
      for (int i = 0; i < kNTiles; ++i) {
        const bool exists = 2 * j < left;
        const uint32_t low = exists && 2 * i < valid ? from[2 * i] : 0,
                       high = exists && 2 * i + 1 < valid ? from[2 * i + 1] : 0;
        words[j][i] = low | high << 16;
      }
  }
};

__device__ __forceinline__ void multiply(float (&acc)[kMTiles][kNTiles][4],
                                         const uint4 (&a)[kMTiles][2], uint32_t (&b)[4][kNTiles]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) b[j][n] = ptx::movmatrix_trans(b[j][n]);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    const uint4 up = a[m][0], down = a[m][1];
    const uint32_t first[4] = {up.x, down.x, up.y, down.y},
                   second[4] = {up.z, down.z, up.w, down.w};
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
      ptx::mma_m16n8k16<Element>(acc[m][n], first, b[0][n], b[1][n]);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
      ptx::mma_m16n8k16<Element>(acc[m][n], second, b[2][n], b[3][n]);
  }
}

// Leaves the sums of a warp in shared memory. Word n of a lane's columns of B holds its columns 2 n
// and 2 n + 1, so they are those of its accumulators, too.
__device__ __forceinline__ void leave(const float (&acc)[kMTiles][kNTiles][4], float* sums,
                                      int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const to = sums + (m * 16 + half * 8 + lane / 4) * kStride + lane % 4 * kPerLane;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
        *reinterpret_cast<float2*>(to + 2 * n) =
            make_float2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
    }
}

__device__ __forceinline__ void add(float (&x)[8], const float4& low, const float4& high) {
  x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
  x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
}

// Calls `each(at, row, column)` for each eight neighbouring sums of the strip: where they are in
// those of a warp, and in the strip.
template <class Each>
__device__ __forceinline__ void each_piece(const Each& each) {
#pragma unroll 1
  for (int piece = threadIdx.x; piece < kRows * kNTiles; piece += Config::threads) {
    const int row = piece / kNTiles, column = piece % kNTiles * 8;
    each(row * kStride + column, row, column);
  }
}

// The sums of all warps of this CTA.
__device__ __forceinline__ void add_warps(float (&x)[8], const float* sums) {
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float* const from = sums + warp * kRows * kStride;
    add(x, *reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + 4));
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_narrow_params params) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  float* const sums = reinterpret_cast<float*>(smem);
  const blockflash_bsr_matmul_params& p = params.base;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  const Work work(params, warp);
  const int windows = work.windows();
  const BLoader b(p, work.first_column, lane);
  int columns[kTogether];
  const auto fetch_columns = [&](int batch) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      columns[i] = b.column(params, work, batch * kTogether + i, lane);
  };
  fetch_columns(work.batch);
  // The pattern was complete before the host had it and never changes (`BsrIndices`), so it may be
  // read while the predecessors in the stream are still running, and so may values that are
  // settled; everything else may not.
  ABatch a;
  if (params.values_settled) a.load(params, work, work.batch, lane);
  ptx::wait_for_predecessors();
  if (!params.values_settled) a.load(params, work, work.batch, lane);

  float acc[kMTiles][kNTiles][4] = {};
#pragma unroll 1
  for (int batch = work.batch; batch * kTogether < windows;) {
    uint32_t words[kTogether][4][kNTiles];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) b.load(words[i], columns[i], batch * kTogether + i, lane);
    const int next = batch + work.batches;
    fetch_columns(next);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) multiply(acc, a.rows[i], words[i]);
    batch = next;
    if (batch * kTogether < windows) a.load(params, work, batch, lane);
  }
  ptx::launch_dependents();

  leave(acc, sums + warp * kRows * kStride, lane);
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (work.ctas > 1) {
    each_piece([&](int at, int, int) {
      float x[8] = {};
      add_warps(x, sums + at);
      *reinterpret_cast<float4*>(sums + at) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(sums + at + 4) = make_float4(x[4], x[5], x[6], x[7]);
    });
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
  const int64_t first_row = static_cast<int64_t>(work.block_row) * kBlock + work.strip * kRows;
  if (work.block_row >= 0 && work.rank == 0)
    each_piece([&](int at, int in_row, int in_column) {
      const int64_t row = first_row + in_row, column = work.first_column + in_column;
      if (row >= p.m || column >= p.n) return;
      float x[8] = {};
#if __CUDA_ARCH__ >= 900
      if (work.ctas > 1) {
        const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(sums + at));
#  pragma unroll 1
        for (int rank = 0; rank < work.ctas; ++rank) {
          const uint32_t there = ptx::map_shared(here, rank);
          add(x, ptx::load_cluster_float4(there), ptx::load_cluster_float4(there + 16));
        }
      } else
#endif
        add_warps(x, sums + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= p.alpha;
      const int count = static_cast<int>(min(p.n - column, static_cast<int64_t>(8)));
      const int64_t to = row * p.ldc + column;
      if (p.beta != 0.f || p.bias != nullptr || p.activation != BLOCKFLASH_ACTIVATION_NONE)
        apply_epilogue(p, x, to, p.bias_per_row ? row : column, !p.bias_per_row, count);
      store_piece(p, x, to, count);
    });
#if __CUDA_ARCH__ >= 900
  if (work.ctas > 1) {
    // Shared memory stays until the first CTA has read it.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
}

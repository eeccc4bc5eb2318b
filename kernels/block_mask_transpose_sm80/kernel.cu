// The transpose of a block mask, for sm_80 and newer: for each block column the block rows that
// visit it, ascending, in two launches.
//
// In the first launch a CTA has a slab of neighbouring rows of one head. It reads their lists along
// the columns and gathers, for 32 rows at a time, a word of bits per column. In the second launch a
// CTA has a strip of 32 columns, reads their words and lists the rows. A head has as many blocks in
// the transpose as in the mask, so its part of the arrays begins at the same place, and only blocks
// of the same head have to be counted. Results do not depend on the order of CTAs or lanes.
//
// The lists may change meanwhile, so nothing here relies on their order or on equal sums: every
// access is bounded by sizes that are parameters, or by an entry that is read once.
#include "blockflash/config/block_mask.cuh"
#include "blockflash/params/block_mask_build.h"

namespace blockflash {
namespace {

using Params = blockflash_block_mask_transpose_params;
using Config = BlockMaskTransposeConfig;
constexpr int kThreads = Config::threads;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kWord = 32;   // rows per word of bits
constexpr int kStrip = 32;  // columns per CTA of the second launch
constexpr int kLoads = 4;   // loads in flight per thread while rows are read
constexpr int kVector = 4;  // words of 16 bytes
constexpr int kVectors = Config::chunk_cols / (kVector * kThreads);  // of each thread
constexpr int kTileRows = kWarpSize * kWord;                         // of a strip, read at a time
constexpr int kShare = kStrip / kWarps;  // words of a tile, and columns, of each warp
constexpr unsigned kAllLanes = 0xFFFFFFFF;
static_assert(Config::slab_rows % kWord == 0, "a slab consists of whole words");
static_assert(Config::chunk_cols % (kVector * kThreads) == 0,
              "the threads share the columns of a chunk evenly");
static_assert(kVector * kThreads % kStrip == 0, "eight neighbouring lanes have a strip");
static_assert(kStrip == kWarpSize && kStrip % kWarps == 0, "warps share a strip evenly");
static_assert(kShare <= 2 && kTileRows < 1 << 16,
              "the rows of a warp's columns in a tile are counted in halves of a register");
static_assert(kWarps * kTileRows * sizeof(uint16_t) <= Config::chunk_cols * sizeof(uint32_t),
              "the rows of the second launch fit where the first one has its words");

// Sizes that follow from the parameters.
struct Sizes {
  int words, slabs, strips;  // of one head
  int64_t pitch;             // words from 32 rows to the next 32

  __device__ __forceinline__ explicit Sizes(const Params& p)
      : words((p.rows + kWord - 1) / kWord),
        slabs((p.rows + Config::slab_rows - 1) / Config::slab_rows),
        strips((p.cols + kStrip - 1) / kStrip),
        pitch(static_cast<int64_t>(strips) * kStrip) {}

  // The words of one head.
  __device__ __forceinline__ uint32_t* bits(const Params& p, int head) const {
    return p.bits + head * words * pitch;
  }
  // The numbers of blocks of one head, those of a strip next to each other.
  __device__ __forceinline__ int32_t* counts(const Params& p, int head) const {
    return p.counts + static_cast<int64_t>(head) * strips * slabs;
  }
};

__device__ __forceinline__ void gather(const Params& p, uint32_t* words) {
  const Sizes sizes(p);
  const int chunks = (p.cols + Config::chunk_cols - 1) / Config::chunk_cols;
  const int slab = blockIdx.x % sizes.slabs;
  const int chunk = blockIdx.x / sizes.slabs % chunks;
  const int head = blockIdx.x / sizes.slabs / chunks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;

  const int first_col = chunk * Config::chunk_cols;
  const uint32_t cols = min(p.cols - first_col, Config::chunk_cols);
  const int first_row = slab * Config::slab_rows;
  const int end_row = min(p.rows - first_row, Config::slab_rows) + first_row;
  uint4* const own = reinterpret_cast<uint4*>(words) + threadIdx.x;  // every kThreads-th
  const auto each_vector = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if ((i * kThreads + threadIdx.x) * kVector < cols) visit(i);
  };
  int blocks[kVectors] = {};  // in the columns of each vector

  each_vector([&](int i) { own[i * kThreads] = make_uint4(0, 0, 0, 0); });
  __syncthreads();
  for (int row_of_word = first_row; row_of_word < end_row; row_of_word += kWord) {
    for (int bit = warp; bit < min(end_row - row_of_word, kWord); bit += kWarps) {
      const int32_t* const ends =
          p.row_ptr + static_cast<int64_t>(head) * (p.rows + 1) + row_of_word + bit;
      // Unsigned, because a position past the end may exceed 31 bits.
      const uint32_t end = ends[1];
      for (uint32_t at = ends[0] + lane; at < end; at += kLoads * kWarpSize) {
        uint32_t cols_of_chunk[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const uint32_t place = at + i * kWarpSize;
          cols_of_chunk[i] = place < end ? p.col_idx[place] - first_col : UINT32_MAX;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (cols_of_chunk[i] < cols) atomicOr(words + cols_of_chunk[i], 1u << bit);
      }
    }
    __syncthreads();
    uint4* const out = reinterpret_cast<uint4*>(sizes.bits(p, head) +
                                                row_of_word / kWord * sizes.pitch + first_col) +
                       threadIdx.x;
    each_vector([&](int i) {
      const uint4 word = own[i * kThreads];
      own[i * kThreads] = make_uint4(0, 0, 0, 0);
      out[i * kThreads] = word;
      blocks[i] += __popc(word.x) + __popc(word.y) + __popc(word.z) + __popc(word.w);
    });
    __syncthreads();
  }
  constexpr int kLanes = kStrip / kVector;  // that have a strip
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int sum = blocks[i];
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    const int strip = (first_col + (i * kThreads + threadIdx.x) * kVector) / kStrip;
    if (lane % kLanes == 0 && strip < sizes.strips)
      sizes.counts(p, head)[static_cast<int64_t>(strip) * sizes.slabs + slab] = sum;
  }
}

// The sum of the first `count` numbers, for all threads.
__device__ __forceinline__ int64_t sum_of(const int32_t* numbers, int64_t count) {
  __shared__ long long sums[kWarps];
  const int32_t* const end = numbers + count;
  long long sum = 0;
#pragma unroll 4
  for (const int32_t* at = numbers + threadIdx.x; at < end; at += kThreads) sum += *at;
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i];
  return sum;
}

// The sum over this lane and the lanes before it.
__device__ __forceinline__ uint32_t inclusive_sum(uint32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// `staged` has room for the rows of a tile, for each warp.
__device__ __forceinline__ void list(const Params& p, uint16_t* staged) {
  __shared__ int lengths[kWarps][kStrip];           // of the columns, as far as each warp counts
  __shared__ uint32_t tile[kWarpSize][kStrip + 1];  // [words][columns]
  const Sizes sizes(p);
  const int strip = blockIdx.x % sizes.strips, head = blockIdx.x / sizes.strips;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_col = strip * kStrip;
  const uint32_t* const column = sizes.bits(p, head) + first_col + lane;

  int length = 0;
#pragma unroll 8
  for (int word = warp; word < sizes.words; word += kWarps)
    length += __popc(column[word * sizes.pitch]);
  lengths[warp][lane] = length;
  const int first = p.row_ptr[static_cast<int64_t>(head) * (p.rows + 1)];
  // Its barrier also completes the lengths.
  const int64_t before = sum_of(sizes.counts(p, head), static_cast<int64_t>(strip) * sizes.slabs);

  // Each lane has the range of its column, the same in every warp.
  length = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) length += lengths[i][lane];
  const int64_t end = first + before + inclusive_sum(length, lane);
  const auto cut = [&](int64_t at) {
    return static_cast<uint32_t>(min(at, static_cast<int64_t>(p.capacity)));
  };
  const uint32_t start = cut(end - length);
  if (warp == 0 && lane < p.cols - first_col) {
    int32_t* const out = p.row_ptr_t + static_cast<int64_t>(head) * (p.cols + 1) + first_col + lane;
    out[0] = start;
    if (first_col + lane + 1 == p.cols) out[1] = cut(end);
  }

  uint32_t at[kShare];  // where the next row of each of the warp's columns goes
#pragma unroll
  for (int i = 0; i < kShare; ++i) at[i] = __shfl_sync(kAllLanes, start, warp + i * kWarps);
  staged += warp * kTileRows;
  uint32_t loaded[kShare];  // words of the next tile
  const auto load = [&](int first_word) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int word = first_word + warp + i * kWarps;
      loaded[i] = word < sizes.words ? column[word * sizes.pitch] : 0;
    }
  };
  load(0);
  for (int first_word = 0; first_word < sizes.words; first_word += kWarpSize) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) tile[warp + i * kWarps][lane] = loaded[i];
    __syncthreads();
    load(first_word + kWarpSize);
    uint32_t words[kShare], rows = 0;  // 16 bits per column
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      words[i] = tile[lane][warp + i * kWarps];
      rows += __popc(words[i]) << 16 * i;
    }
    const uint32_t up_to = inclusive_sum(rows, lane);
    const uint32_t all = __shfl_sync(kAllLanes, up_to, kWarpSize - 1);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      int place = (up_to - rows) >> 16 * i & 0xFFFF;
      for (uint32_t word = words[i]; word != 0; word &= word - 1)
        staged[place++] = lane * kWord + __ffs(word) - 1;
      __syncwarp();
      // Positions are at most the capacity plus the number of rows, which fits into 32 bits.
      const uint32_t count = all >> 16 * i & 0xFFFF;
      for (uint32_t row = lane; row < count; row += kWarpSize)
        if (at[i] + row < static_cast<uint32_t>(p.capacity))
          p.col_idx_t[at[i] + row] = first_word * kWord + staged[row];
      at[i] += count;
      __syncwarp();  // the next column takes the same place
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_block_mask_transpose_params p) {
  using namespace blockflash;
  __shared__ __align__(16) uint32_t words[Config::chunk_cols];
  if (p.step == BLOCKFLASH_BLOCK_MASK_GATHER)
    gather(p, words);
  else
    list(p, reinterpret_cast<uint16_t*>(words));
}

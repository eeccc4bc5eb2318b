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
#include "blockflash/config.cuh"

namespace blockflash {
namespace {

using Params = blockflash_block_mask_transpose_params;
using Config = BlockMaskTransposeConfig;
constexpr int kThreads = Config::threads;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kWord = 32;  // rows per word of bits
constexpr int kLoads = 4;  // loads in flight per thread
constexpr unsigned kAllLanes = 0xFFFFFFFF;
static_assert(Config::slab_rows % kWord == 0, "a slab consists of whole words");
static_assert(Config::chunk_cols % kWarpSize == 0, "a chunk consists of whole strips");
static_assert(kWord == kWarpSize && kWarpSize % kWarps == 0,
              "warps share the columns of a strip and the words of a tile evenly");

// Sizes that follow from the parameters.
struct Sizes {
  int words, slabs, strips;  // of one head

  __device__ __forceinline__ explicit Sizes(const Params& p)
      : words((p.rows + kWord - 1) / kWord),
        slabs((p.rows + Config::slab_rows - 1) / Config::slab_rows),
        strips((p.cols + kWarpSize - 1) / kWarpSize) {}

  // The words of one head.
  __device__ __forceinline__ uint32_t* bits(const Params& p, int head) const {
    return p.bits + static_cast<int64_t>(head) * words * p.cols;
  }
  // The numbers of blocks of one head, those of a strip next to each other.
  __device__ __forceinline__ int32_t* counts(const Params& p, int head) const {
    return p.counts + static_cast<int64_t>(head) * strips * slabs;
  }
};

__device__ __forceinline__ void gather(const Params& p) {
  __shared__ uint32_t words[Config::chunk_cols];  // the word of each column
  __shared__ int counts[Config::chunk_cols / kWarpSize];
  const Sizes sizes(p);
  const int chunks = (p.cols + Config::chunk_cols - 1) / Config::chunk_cols;
  const int slab = blockIdx.x % sizes.slabs;
  const int chunk = blockIdx.x / sizes.slabs % chunks;
  const int head = blockIdx.x / sizes.slabs / chunks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;

  const int first_col = chunk * Config::chunk_cols;
  const int cols = min(p.cols - first_col, Config::chunk_cols);
  const int first_row = slab * Config::slab_rows;
  const int end_row = min(p.rows - first_row, Config::slab_rows) + first_row;
  for (int col = threadIdx.x; col < cols; col += kThreads) words[col] = 0;
  for (int strip = threadIdx.x; strip * kWarpSize < cols; strip += kThreads) counts[strip] = 0;
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
          if (cols_of_chunk[i] < static_cast<uint32_t>(cols))
            atomicOr(words + cols_of_chunk[i], 1u << bit);
      }
    }
    __syncthreads();
    uint32_t* const out =
        sizes.bits(p, head) + static_cast<int64_t>(row_of_word / kWord) * p.cols + first_col;
    for (int strip = warp; strip * kWarpSize < cols; strip += kWarps) {
      const int col = strip * kWarpSize + lane;
      uint32_t word = 0;
      if (col < cols) {
        out[col] = word = words[col];
        words[col] = 0;
      }
      const int blocks = __reduce_add_sync(kAllLanes, __popc(word));
      if (lane == 0) counts[strip] += blocks;
    }
    __syncthreads();
  }
  int32_t* const out =
      sizes.counts(p, head) + static_cast<int64_t>(first_col / kWarpSize) * sizes.slabs + slab;
  for (int strip = threadIdx.x; strip * kWarpSize < cols; strip += kThreads)
    out[static_cast<int64_t>(strip) * sizes.slabs] = counts[strip];
}

// The sum of the first `count` numbers, for all threads.
__device__ __forceinline__ int64_t sum_of(const int32_t* numbers, int64_t count) {
  __shared__ long long sums[kWarps];
  long long sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += numbers[i];
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
__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

__device__ __forceinline__ void list(const Params& p) {
  __shared__ int lengths[kWarpSize];                   // of the columns of the strip
  __shared__ uint32_t tile[kWarpSize][kWarpSize + 1];  // [words][columns]
  const Sizes sizes(p);
  const int strip = blockIdx.x % sizes.strips, head = blockIdx.x / sizes.strips;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_col = strip * kWarpSize;
  const bool exists = lane < p.cols - first_col;
  const uint32_t* const column = sizes.bits(p, head) + first_col + lane;

  if (warp == 0) lengths[lane] = 0;
  const int64_t before = sum_of(sizes.counts(p, head), static_cast<int64_t>(strip) * sizes.slabs);
  int length = 0;
#pragma unroll 4
  for (int word = warp; word < sizes.words; word += kWarps)
    length += exists ? __popc(column[static_cast<int64_t>(word) * p.cols]) : 0;
  atomicAdd(lengths + lane, length);
  __syncthreads();

  // Each lane has the range of its column, the same in every warp.
  length = lengths[lane];
  const int64_t end =
      p.row_ptr[static_cast<int64_t>(head) * (p.rows + 1)] + before + inclusive_sum(length, lane);
  const auto cut = [&](int64_t at) {
    return static_cast<uint32_t>(min(at, static_cast<int64_t>(p.capacity)));
  };
  const uint32_t start = cut(end - length);
  if (warp == 0 && exists) {
    int32_t* const out = p.row_ptr_t + static_cast<int64_t>(head) * (p.cols + 1) + first_col + lane;
    out[0] = start;
    if (first_col + lane + 1 == p.cols) out[1] = cut(end);
  }

  constexpr int kColumns = kWarpSize / kWarps;  // of each warp
  uint32_t at[kColumns];                        // where the next row of each of them goes
#pragma unroll
  for (int i = 0; i < kColumns; ++i) at[i] = __shfl_sync(kAllLanes, start, warp + i * kWarps);
  for (int first_word = 0; first_word < sizes.words; first_word += kWarpSize) {
    for (int w = warp; w < kWarpSize; w += kWarps) {
      const bool read = exists && w < sizes.words - first_word;
      tile[w][lane] = read ? column[static_cast<int64_t>(first_word + w) * p.cols] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      uint32_t word = tile[lane][warp + i * kWarps];
      const int rows = __popc(word), last = inclusive_sum(rows, lane);
      // At most the capacity plus the number of rows, which fits into 32 bits.
      for (uint32_t place = at[i] + last - rows; word != 0; word &= word - 1, ++place)
        if (place < static_cast<uint32_t>(p.capacity))
          p.col_idx_t[place] = (first_word + lane) * kWord + __ffs(word) - 1;
      at[i] += __shfl_sync(kAllLanes, last, kWarpSize - 1);
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_block_mask_transpose_params p) {
  using namespace blockflash;
  if (p.step == BLOCKFLASH_BLOCK_MASK_GATHER)
    gather(p);
  else
    list(p);
}

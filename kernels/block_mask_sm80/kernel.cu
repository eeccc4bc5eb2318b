// Block masks built on the GPU, for sm_80 and newer: the chosen blocks become the index arrays that
// attention walks, in two launches.
//
// A CTA has a slab of neighbouring rows of one head of the mask, one row per warp. The first launch
// chooses: the source's columns become bits, the columns that are always visited are added, the
// columns that the token mask hides are removed, and the rest is counted. The second launch lists:
// it adds up the counts before its slab and writes the columns of each row, the row's start and its
// place in the order of lengths. Results do not depend on the order of CTAs or lanes.
#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/config/block_mask.cuh"
#include "blockflash/params/block_mask_build.h"
#include "blockflash/score_order.cuh"

namespace blockflash {
namespace {

using Params = blockflash_block_mask_build_params;
constexpr int kSlabRows = BlockMaskConfig::slab_rows;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

// Block columns [begin, end).
struct ColumnRange {
  int begin, end;
};

// The row of a warp. Its columns are held in words of 32 bits, the first column in the lowest bit.
struct Row {
  int lane;
  int group, row;  // the group is batch·heads + head
  int64_t index;   // among the rows of all groups
  int words;
  uint32_t* bits;  // [words]

  __device__ __forceinline__ explicit Row(const Params& p) {
    const int slabs = (p.rows + kSlabRows - 1) / kSlabRows;
    group = blockIdx.x / slabs;
    lane = threadIdx.x % kWarpSize;
    // Shuffled, so that the compiler knows that all lanes have the same row and stay converged.
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
    row = static_cast<int>(blockIdx.x % slabs) * kSlabRows + warp;
    index = static_cast<int64_t>(group) * p.rows + row;
    words = (p.cols + 31) / 32;
    bits = p.bits + index * words;
  }
};

// Keeps the problem of the first row and of its first position, in whatever order they are
// reported.
__device__ __forceinline__ void report(const Params& p, int64_t row_index, int64_t position,
                                       int problem) {
  const uint64_t code = static_cast<uint64_t>(row_index) << 33 |
                        static_cast<uint64_t>(position) << 2 | static_cast<uint64_t>(problem);
  atomicMin(reinterpret_cast<unsigned long long*>(p.problems),
            static_cast<unsigned long long>(code));
}

// Columns of which some query of the row sees a key.
__device__ __forceinline__ ColumnRange visible_columns(const Params& p, int row) {
  const AttentionMask mask = AttentionMask::of(p.window, p.seqlen_q, p.seqlen_kv);
  const int first_query = row * p.block_q;
  const KeyRange keys = mask.keys_of_any(first_query, min(first_query + p.block_q, p.seqlen_q) - 1);
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / p.block_kv, (keys.end + p.block_kv - 1) / p.block_kv};
}

__device__ __forceinline__ void choose_true(const Params& p, const Row& row) {
  const uint8_t* const blocks = static_cast<const uint8_t*>(p.source) + row.index * p.cols;
#pragma unroll 4
  for (int w = 0; w < row.words; ++w) {
    const int col = w * 32 + row.lane;
    const unsigned word = __ballot_sync(kAllLanes, col < p.cols && blocks[col] != 0);
    if (row.lane == 0) row.bits[w] = word;
  }
}

// Takes 32 positions of the list at a time, which decides which of two equal columns comes first.
__device__ __forceinline__ void choose_listed(const Params& p, const Row& row) {
  const int32_t* const list = static_cast<const int32_t*>(p.source) + row.index * p.k;
  for (int w = row.lane; w < row.words; w += kWarpSize) row.bits[w] = 0;
  __syncwarp();
  bool reported = false;
  for (int first = 0; first < p.k; first += kWarpSize) {
    const int col = row.lane < p.k - first ? list[first + row.lane] : -1;
    const bool exists = col >= 0 && col < p.cols;
    const unsigned equal = __match_any_sync(kAllLanes, col);
    const bool leads = exists && __ffs(equal) - 1 == row.lane;
    const uint32_t before = leads ? atomicOr(row.bits + col / 32, 1u << col % 32) : 0;
    const bool twice = exists && (!leads || (before >> col % 32 & 1) != 0);
    const unsigned missing = __ballot_sync(kAllLanes, col != -1 && !exists);
    const unsigned wrong = missing | __ballot_sync(kAllLanes, twice);
    if (wrong != 0 && !reported) {
      reported = true;
      const int at = __ffs(wrong) - 1;
      const bool is_missing = (missing >> at & 1) != 0;
      if (row.lane == 0)
        report(p, row.index, first + at,
               is_missing ? BLOCKFLASH_BLOCK_PROBLEM_NO_COLUMN : BLOCKFLASH_BLOCK_PROBLEM_TWICE);
    }
    __syncwarp();  // the next 32 positions see these bits
  }
}

// The k largest scores among the visible columns, the first ones among equal scores. Their
// threshold, the largest key that at least k candidates reach, is found bit by bit from the highest
// one.
__device__ __forceinline__ void choose_largest(const Params& p, const Row& row,
                                               ColumnRange visible) {
  constexpr int kHeld =
      16;  // words whose keys stay in registers; keys of later words are recomputed for every bit
  const float* const scores = static_cast<const float*>(p.source) + row.index * p.cols;
  int first_nan = p.cols;
  // 0 for a column that is no candidate: hidden, beyond the last one, or NaN.
  const auto key_in = [&](int w) -> uint32_t {
    const int col = w * 32 + row.lane;
    if (col >= p.cols) return 0;
    const float score = scores[col];
    if (isnan(score)) first_nan = min(first_nan, col);
    return col >= visible.begin && col < visible.end && !isnan(score) ? key_of(score) : 0;
  };
  uint32_t held[kHeld];
#pragma unroll
  for (int w = 0; w < kHeld; ++w) held[w] = w < row.words ? key_in(w) : 0;
  const auto each_word = [&](auto visit) {
#pragma unroll
    for (int w = 0; w < kHeld; ++w)
      if (w < row.words) visit(w, held[w]);
#pragma unroll 4
    for (int w = kHeld; w < row.words; ++w) visit(w, key_in(w));
  };
  const auto count_from = [&](uint32_t threshold) -> int {
    int count = 0;
    each_word([&](int, uint32_t key) { count += key >= threshold; });
    return __reduce_add_sync(kAllLanes, count);
  };

  uint32_t threshold = 1;
  int reached = count_from(threshold);  // number of candidates that reach it
  if (reached > p.k) {
    threshold = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
      const int count = count_from(threshold | bit);
      if (count < p.k) continue;
      threshold |= bit;
      reached = count;
      if (reached == p.k) break;
    }
  }
  // More than k only where several candidates have the threshold's own key.
  int equal_left = reached > p.k ? p.k - count_from(threshold + 1) : INT32_MAX;
  each_word([&](int w, uint32_t key) {
    const unsigned equal = __ballot_sync(kAllLanes, key == threshold);
    const bool in_time = __popc(equal & ((1u << row.lane) - 1)) < equal_left;
    equal_left -= __popc(equal);
    const unsigned word =
        __ballot_sync(kAllLanes, key > threshold || (key == threshold && in_time));
    if (row.lane == 0) row.bits[w] = word;
  });
  first_nan = __reduce_min_sync(kAllLanes, first_nan);
  if (first_nan < p.cols && row.lane == 0)
    report(p, row.index, first_nan, BLOCKFLASH_BLOCK_PROBLEM_NAN);
}

__device__ __forceinline__ void add_always(const Params& p, const Row& row) {
  const int32_t* const ends =
      p.always.row_ptr +
      group_offset(p.always, p.rows + 1, row.group / p.heads, row.group % p.heads) + row.row;
  for (int at = ends[0] + row.lane; at < ends[1]; at += kWarpSize) {
    const int col = p.always.col_idx[at];
    atomicOr(row.bits + col / 32, 1u << col % 32);
  }
}

// The lowest `count` bits; none below 0, all from 32 on.
__device__ __forceinline__ uint32_t lowest_bits(int count) {
  return count <= 0 ? 0 : count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
}

// Removes the columns outside of a range and counts the others.
__device__ __forceinline__ int keep_and_count(const Row& row, ColumnRange range) {
  int count = 0;
  for (int w = row.lane; w < row.words; w += kWarpSize) {
    const uint32_t word =
        row.bits[w] & lowest_bits(range.end - w * 32) & ~lowest_bits(range.begin - w * 32);
    row.bits[w] = word;
    count += __popc(word);
  }
  return __reduce_add_sync(kAllLanes, count);
}

__device__ __forceinline__ void choose(const Params& p, const Row& row) {
  __shared__ int lengths[kSlabRows];
  int length = 0;
  if (row.row < p.rows) {
    const ColumnRange visible = visible_columns(p, row.row);
    if (p.source_kind == BLOCKFLASH_BLOCK_SOURCE_BOOL) choose_true(p, row);
    if (p.source_kind == BLOCKFLASH_BLOCK_SOURCE_LISTS) choose_listed(p, row);
    if (p.source_kind == BLOCKFLASH_BLOCK_SOURCE_SCORES) choose_largest(p, row, visible);
    __syncwarp();  // lanes now change words that others have written
    if (p.always.row_ptr != nullptr) add_always(p, row);
    __syncwarp();
    length = keep_and_count(row, visible);
    if (row.lane == 0) p.lengths[row.index] = length;
  }
  if (row.lane == 0) lengths[threadIdx.x / kWarpSize] = length;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kSlabRows; ++i) sum += lengths[i];
    p.slab_lengths[blockIdx.x] = sum;
  }
}

// The sum over all slabs before this CTA's.
__device__ __forceinline__ int64_t length_before_slab(const Params& p) {
  __shared__ long long sums[kSlabRows];
  long long sum = 0;
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += BlockMaskConfig::threads)
    sum += p.slab_lengths[i];
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < kSlabRows; ++i) sum += sums[i];
  return sum;
}

// Writes the columns of the row from place `at` on, as far as there is room.
__device__ __forceinline__ void write_columns(const Params& p, const Row& row, int64_t at) {
  for (int first = 0; first < row.words; first += kWarpSize) {
    const uint32_t own = row.lane < row.words - first ? row.bits[first + row.lane] : 0;
    for (int i = 0; i < min(kWarpSize, row.words - first); ++i) {
      const uint32_t word = __shfl_sync(kAllLanes, own, i);
      const int64_t place = at + __popc(word & ((1u << row.lane) - 1));
      if ((word >> row.lane & 1) != 0 && place < p.capacity)
        p.col_idx[place] = (first + i) * 32 + row.lane;
      at += __popc(word);
    }
  }
}

// The number of rows of the same head that come before this one in the order. It stays below the
// number of rows whatever the lengths are: another launch may change them meanwhile, so the row
// must not compare with itself.
__device__ __forceinline__ int rows_before(const Params& p, const Row& row, int length) {
  const int32_t* const lengths = p.lengths + (row.index - row.row);
  int count = 0;
#pragma unroll 4
  for (int other = row.lane; other < p.rows; other += kWarpSize)
    count += other != row.row &&
             (lengths[other] > length || (lengths[other] == length && other > row.row));
  return __reduce_add_sync(kAllLanes, count);
}

__device__ __forceinline__ void list(const Params& p, const Row& row) {
  int64_t start = length_before_slab(p);
  if (row.row >= p.rows) return;
  const int earlier = row.row % kSlabRows;  // rows of the slab before this one
  start += __reduce_add_sync(kAllLanes,
                             row.lane < earlier ? p.lengths[row.index - earlier + row.lane] : 0);
  const int length = p.lengths[row.index];
  const int64_t end = start + length, capacity = p.capacity;
  write_columns(p, row, start);
  const int place = rows_before(p, row, length);
  if (row.lane != 0) return;
  p.row_order[row.index - row.row + place] = row.row;
  int32_t* const row_ptr =
      p.row_ptr + row.index + row.group;  // each group has one entry more than rows
  row_ptr[0] = static_cast<int32_t>(min(start, capacity));
  const bool is_last = row.row + 1 == p.rows;
  if (is_last) row_ptr[1] = static_cast<int32_t>(min(end, capacity));
  if (start <= capacity && end > capacity)
    report(p, row.index, capacity - start, BLOCKFLASH_BLOCK_PROBLEM_CAPACITY);
  if (is_last && row.group + 1 == p.batch * p.heads && end > capacity)
    atomicMin(reinterpret_cast<unsigned long long*>(p.problems) + 1,
              ~static_cast<unsigned long long>(end));
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_block_mask_build_params p) {
  using namespace blockflash;
  const Row row(p);
  if (p.step == BLOCKFLASH_BLOCK_MASK_CHOOSE)
    choose(p, row);
  else
    list(p, row);
}

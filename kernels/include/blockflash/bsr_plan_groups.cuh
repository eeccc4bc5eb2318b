// Groups of block rows that need much the same columns: each begins with the longest row that is left and takes those that add the fewest
// columns to it.
#pragma once

#include "bsr_plan.cuh"

namespace blockflash {

constexpr int kChunkWords = 8;  // of bits, which are counted together
constexpr int kHeldChunks = 2;  // of a candidate, kept in registers: 512 columns
constexpr int kMostWords = BLOCKFLASH_BSR_PLAN_LIMIT / 32;
constexpr unsigned kTaken = 0xFFFF;  // no rank, and more columns than there are
static_assert(BLOCKFLASH_BSR_PLAN_LIMIT < kTaken, "ranks and columns take 16 bits each of a key");

// Eight words, as two loads.
struct Chunk {
  uint4 low, high;
};

__device__ __forceinline__ Chunk chunk_of(const uint32_t* words, int chunk) {
  const uint4* const quads = reinterpret_cast<const uint4*>(words) + 2 * chunk;
  return {quads[0], quads[1]};
}

// Three words as one of their lowest bits and one of their carries.
__device__ __forceinline__ void add_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t& ones, uint32_t& carries) {
  ones = a ^ b ^ c;
  carries = (a & b) | (c & (a | b));
}

// Ones in both chunks. Adders first: logic has four times the rate of counting.
__device__ __forceinline__ int ones_in_both(const Chunk& a, const Chunk& b) {
  uint32_t ones_a, ones_b, ones, carries_a, carries_b, carries_c, twos, fours;
  add_bits(a.low.x & b.low.x, a.low.y & b.low.y, a.low.z & b.low.z, ones_a, carries_a);
  add_bits(a.low.w & b.low.w, a.high.x & b.high.x, a.high.y & b.high.y, ones_b, carries_b);
  add_bits(ones_a, ones_b, a.high.z & b.high.z, ones, carries_c);
  add_bits(carries_a, carries_b, carries_c, twos, fours);
  return __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours) + __popc(a.high.w & b.high.w);
}

// Columns that a rank has and the group does not, from a chunk on.
__device__ __forceinline__ int added_from(const PlanParams& p, int chunk, int rank, const uint32_t* missing) {
  const uint32_t* const bits = bits_of(p, rank);
  int added = 0;
#pragma unroll 1  // registers are few
  for (; chunk < p.row_words / kChunkWords; ++chunk) added += ones_in_both(chunk_of(bits, chunk), chunk_of(missing, chunk));
  return added;
}

// Removes the first of the `left` and those that are taken, and says how many stay.
__device__ __forceinline__ int keep_others(uint16_t* left, int count, int* sums) {
  int kept = 0;
  for (int chunk = 1; chunk < count; chunk += kPlanThreads) {
    const int slot = chunk + static_cast<int>(threadIdx.x);
    const unsigned rank = slot < count ? left[slot] : kTaken;
    const Sum sum = sum_of_block(rank != kTaken, sums);
    // All have read their slots; places are never beyond these.
    if (rank != kTaken) left[kept + sum.before] = static_cast<uint16_t>(rank);
    kept += sum.all;
    __syncthreads();
  }
  return kept;
}

// Columns of all groups if rows are taken by length.
__device__ __forceinline__ int columns_by_length(const PlanParams& p, int* sums) {
  int own = 0;
  for (int64_t at = threadIdx.x; at < static_cast<int64_t>(groups(p)) * p.row_words; at += kPlanThreads) {
    const int first = static_cast<int>(at / p.row_words) * p.group_rows, word = static_cast<int>(at % p.row_words);
    uint32_t any = 0;
#pragma unroll 4
    for (int rank = first; rank < min(first + p.group_rows, p.rows); ++rank) any |= bits_of(p, rank)[word];
    own += __popc(any);
  }
  const int all = sum_of_block(own, sums).all;
  __syncthreads();  // `sums` are read
  return all;
}

// What a warp knows of the group.
struct __align__(16) WarpState {
  uint32_t missing[kMostWords];  // columns that the group does not have yet
  unsigned keys[2];              // the least of the warp's, of turns that follow one another
};

// The least key of a candidate is the choice: the columns that it adds, those of rows that are too short being the most, and its rank.
//
// Forms all groups and returns the columns of all of them. A thread holds the bits of one candidate, and looks those of others up. Each
// choice waits for the one before, so there is one barrier per choice: all warps find it, and each knows what is missing for itself.
__device__ __forceinline__ int form(const PlanParams& p, uint16_t* left, int* sums) {
  __shared__ WarpState states[kPlanWarps];
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int chunks = p.row_words / kChunkWords;
  const int32_t* const length = lengths(p);
  WarpState& state = states[warp];
  uint32_t* const missing = state.missing;
  int count = p.rows, total = 0;
  for (int rank = thread; rank < count; rank += kPlanThreads) left[rank] = static_cast<uint16_t>(rank);
  __syncthreads();
  for (int group = 0; count > 0; ++group) {
    const int first = left[0], least = __double2int_ru(p.least_length * length[first]);
    unsigned own = thread + 1 < count ? left[thread + 1] : kTaken;
    const bool own_may = own != kTaken && length[own] >= least;
    Chunk held[kHeldChunks] = {};  // zeros count nothing, whatever is missing
#pragma unroll
    for (int chunk = 0; chunk < kHeldChunks; ++chunk)
      if (own_may && chunk < chunks) held[chunk] = chunk_of(bits_of(p, own), chunk);
    const bool has_candidates = warp == 0 || thread - lane + 1 < count;  // the warp
    for (int word = lane; word < p.row_words; word += kWarpSize) missing[word] = ~bits_of(p, first)[word];
    if (lane == 0) state.keys[0] = state.keys[1] = ~0u;
    int32_t* const formed = p.formed + group * p.group_rows;
    if (thread == 0) formed[0] = first;
    __syncthreads();
    for (int taken = 1; taken < min(p.group_rows, count); ++taken) {
      if (has_candidates) {
        unsigned mine = own == kTaken ? ~0u : kTaken << 16 | own;
        if (own != kTaken && own_may) {
          int added = added_from(p, kHeldChunks, own, missing);
#pragma unroll
          for (int chunk = 0; chunk < kHeldChunks; ++chunk) added += ones_in_both(held[chunk], chunk_of(missing, chunk));
          mine = static_cast<unsigned>(added) << 16 | own;
        }
#pragma unroll 1
        for (int slot = thread + 1 + kPlanThreads; slot < count; slot += kPlanThreads) {
          const unsigned rank = left[slot];
          if (rank == kTaken) continue;
          const unsigned added = length[rank] >= least ? added_from(p, 0, rank, missing) : kTaken;
          mine = min(mine, added << 16 | rank);
        }
        const unsigned of_warp = __reduce_min_sync(kAllLanes, mine);
        if (lane == 0) state.keys[taken % 2] = of_warp;
      }
      __syncthreads();
      if (!has_candidates) continue;
      const unsigned best = __reduce_min_sync(kAllLanes, states[lane].keys[taken % 2]) & kTaken;
#pragma unroll 1  // one turn for most patterns
      for (int word = lane; word < p.row_words; word += kWarpSize) missing[word] &= ~p.bits[best * p.row_words + word];
      if (thread == 0) formed[taken] = best;
      if (own == best) own = left[thread + 1] = kTaken;
#pragma unroll 1
      for (int slot = thread + 1 + kPlanThreads; slot < count; slot += kPlanThreads)
        if (left[slot] == best) left[slot] = kTaken;
      __syncwarp();  // the warp's `missing`
    }
    if (warp == 0) {
      int columns = 0;
      for (int word = lane; word < p.row_words; word += kWarpSize) columns += __popc(~missing[word]);
      columns = __reduce_add_sync(kAllLanes, columns);
      if (lane == 0) p.group_columns[group] = columns;
      total += columns;
    }
    __syncthreads();  // all have marked what is taken
    count = keep_others(left, count, sums);
  }
  if (thread == 0) sums[0] = total;
  __syncthreads();
  return sums[0];
}

// Where a group comes: those with the most columns first, then those that were formed first; the last one, if it is not full, last.
__device__ __forceinline__ int place_of(const PlanParams& p, int group) {
  const int full = p.rows / p.group_rows, columns = p.group_columns[group];
  if (group == full) return group;
  int before = 0;
#pragma unroll 4
  for (int other = 0; other < full; ++other) {
    const int other_columns = p.group_columns[other];
    before += other_columns > columns || (other_columns == columns && other < group);
  }
  return before;
}

__device__ __forceinline__ void group(const PlanParams& p, uint16_t* left) {
  __shared__ int sums[kPlanWarps];
  bool by_columns = false;
  if (p.rows > p.group_rows) {
    const double before = columns_by_length(p, sums);
    by_columns = form(p, left, sums) <= before * p.most_kept;
  }
  for (int at = threadIdx.x; at < p.rows; at += kPlanThreads) {
    const int group = at / p.group_rows;
    const int rank = by_columns ? p.formed[at] : at;
    const int place = by_columns ? place_of(p, group) * p.group_rows + at % p.group_rows : at;
    ranks(p)[place] = rank;
    p.row_order[place] = p.by_length[rank];
  }
}

}  // namespace blockflash

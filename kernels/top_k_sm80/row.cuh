// A row of scores: which columns are to be chosen from, and where.
#pragma once

#include <math_constants.h>

#include "blockflash/config/index_choice.cuh"
#include "blockflash/index_rows.cuh"
#include "blockflash/score_order.cuh"

namespace blockflash {
namespace {

using Config = TopKConfig;
using Params = blockflash_top_k_params;

// Columns are chosen always in [begin, free_begin) and [free_end, end), and by their scores in
// between, up to `wanted`.
struct Row {
  const float* scores;
  int32_t* chosen;
  int begin, free_begin, free_end, end;
  int wanted;

  // Row `index` of those of all groups.
  static __device__ __forceinline__ Row of(const Params& p, int index) {
    const int group = index / p.rows.rows, row = index - group * p.rows.rows;
    const KeyRange keys = IndexRow::of(p.rows, row).keys(p.rows);
    const int shift = __ffs(p.granularity) - 1;
    Row r;
    r.scores = p.scores + group * p.scores_stride_group + row * p.scores_stride_row;
    r.chosen = p.chosen + group * p.chosen_stride_group + row * p.chosen_stride_row;
    r.end = 0;
    if (keys.begin < keys.end) r.end = min((keys.end - 1 >> shift) + 1, p.blocks);
    r.begin = min(keys.begin >> shift, r.end);
    r.free_begin = max(r.begin, min(p.first, r.end));
    r.free_end = max(r.free_begin, r.end - p.last);
    r.wanted = p.k - (r.free_begin - r.begin) - (r.end - r.free_end);
    return r;
  }
  __device__ __forceinline__ int free() const { return free_end - free_begin; }

  // Writes what is around the chosen columns, of which there are `count` at list().
  __device__ __forceinline__ void write_rest(const Params& p, int count, int thread,
                                             int threads) const {
    const int firsts = free_begin - begin, lasts = end - free_end;
    for (int i = thread; i < firsts; i += threads) chosen[i] = begin + i;
    const int behind = firsts + count;
    for (int i = behind + thread; i < p.k; i += threads)
      chosen[i] = i < behind + lasts ? free_end + i - behind : -1;
  }
  __device__ __forceinline__ int32_t* list() const { return chosen + (free_begin - begin); }
};

// The key of a score, 0 for -inf and NaN, which are never chosen.
__device__ __forceinline__ uint32_t valid_key_of(float score) {
  return score > -CUDART_INF_F ? key_of(score) : 0;
}
__device__ __forceinline__ float score_of_key(uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key);
}

}  // namespace
}  // namespace blockflash

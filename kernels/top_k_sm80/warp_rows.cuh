// Short rows, one for each warp, whose keys are in shared memory. The k-th largest key is found bit
// by bit, by counting. Loops are short: a launch may be so, too, and then instructions that are
// fetched for the first time take longer than anything else.
#pragma once

#include "row.cuh"

namespace blockflash {
namespace {

// `keys` has room for Config::held, of the warp.
__device__ __forceinline__ void choose_with_warp(const Params& p, const Row& row, uint32_t* keys,
                                                 int lane) {
  const int columns = min(row.free(), Config::held);
  const int words = (columns + kWarpSize - 1) / kWarpSize;
  uint32_t largest = 0, least = ~0u;
  int valid = 0;
#pragma unroll 8
  for (int w = 0; w < words; ++w) {
    const int at = w * kWarpSize + lane;
    const uint32_t key = at < columns ? valid_key_of(row.scores[row.free_begin + at]) : 0;
    keys[at] = key;
    if (key == 0) continue;
    largest = max(largest, key), least = min(least, key), ++valid;
  }
  __syncwarp();
  const auto count_from = [&](uint32_t threshold) {
    int count = 0;
#pragma unroll 8
    for (int w = 0; w < words; ++w) count += keys[w * kWarpSize + lane] >= threshold;
    return __reduce_add_sync(~0u, count);
  };
  uint32_t threshold = 1;
  int reached = __reduce_add_sync(~0u, valid);
  // Fewer of those that have the threshold's own key are to be chosen only if there are too many.
  int equal_left = INT32_MAX;
  if (reached > row.wanted) {
    // All keys have the bits above the first one in which the largest and the least differ.
    largest = __reduce_max_sync(~0u, largest), least = __reduce_min_sync(~0u, least);
    const int same = __clz(static_cast<int>(largest ^ least));
    threshold = same == 0 ? 0 : largest & ~(~0u >> (same < 32 ? same : 31));
    if (same == 32) threshold = largest;
    int larger = 0;  // that are larger than all that have the bits of the threshold
    for (uint32_t bit = same == 32 ? 0 : 0x80000000u >> same; bit != 0; bit >>= 1) {
      const int count = count_from(threshold | bit);
      if (count < row.wanted) {
        larger = count;
        continue;
      }
      threshold |= bit, reached = count;
      if (reached == row.wanted) break;
    }
    if (reached > row.wanted) equal_left = row.wanted - larger;
  }
  int place = 0;
  int32_t* const list = row.list();
  const unsigned lower_lanes = (1u << lane) - 1;
#pragma unroll 2
  for (int w = 0; w < words; ++w) {
    const uint32_t key = keys[w * kWarpSize + lane];
    const unsigned equal = __ballot_sync(~0u, key == threshold);
    const bool in_time = __popc(equal & lower_lanes) < equal_left;
    equal_left -= __popc(equal);
    const bool is_chosen = key > threshold || (key == threshold && in_time);
    const unsigned all = __ballot_sync(~0u, is_chosen);
    if (is_chosen) list[place + __popc(all & lower_lanes)] = row.free_begin + w * kWarpSize + lane;
    place += __popc(all);
  }
  row.write_rest(p, place, lane, kWarpSize);
}

}  // namespace
}  // namespace blockflash

// Short rows, one for each warp, whose keys stay in registers. The k-th largest key is found bit by
// bit, by counting.
#pragma once

#include "row.cuh"

namespace blockflash {
namespace {

__device__ __forceinline__ void choose_with_warp(const Params& p, const Row& row, int lane) {
  constexpr int kHeld = Config::held;
  const int words = (row.free() + kWarpSize - 1) / kWarpSize;
  uint32_t keys[kHeld];
#pragma unroll
  for (int w = 0; w < kHeld; ++w) {
    const int column = row.free_begin + w * kWarpSize + lane;
    keys[w] = column < row.free_end ? valid_key_of(row.scores[column]) : 0;
  }
  const auto count_from = [&](uint32_t threshold) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kHeld; ++w)
      if (w < words) count += keys[w] >= threshold;
    return __reduce_add_sync(~0u, count);
  };
  uint32_t threshold = 1;
  int reached = count_from(threshold);
  if (reached > row.wanted) {
    // All keys have the bits above the first one in which the largest and the least differ.
    uint32_t largest = 0, least = ~0u;
#pragma unroll
    for (int w = 0; w < kHeld; ++w)
      if (keys[w] != 0) largest = max(largest, keys[w]), least = min(least, keys[w]);
    largest = __reduce_max_sync(~0u, largest), least = __reduce_min_sync(~0u, least);
    const int same = __clz(static_cast<int>(largest ^ least));
    threshold = same == 0 ? 0 : largest & ~(~0u >> same);
    for (uint32_t bit = same == 32 ? 0 : 0x80000000u >> same; bit != 0; bit >>= 1) {
      const int count = count_from(threshold | bit);
      if (count < row.wanted) continue;
      threshold |= bit, reached = count;
      if (reached == row.wanted) break;
    }
  }
  // Fewer of those that have the threshold's own key are to be chosen only if there are too many.
  int equal_left = INT32_MAX;
  if (reached > row.wanted)
    equal_left = row.wanted - (threshold == ~0u ? 0 : count_from(threshold + 1));
  int place = 0;
  int32_t* const list = row.list();
#pragma unroll
  for (int w = 0; w < kHeld; ++w) {
    if (w >= words) continue;
    const unsigned lower_lanes = (1u << lane) - 1;
    const unsigned equal = __ballot_sync(~0u, keys[w] == threshold);
    const bool in_time = __popc(equal & lower_lanes) < equal_left;
    equal_left -= __popc(equal);
    const bool is_chosen = keys[w] > threshold || (keys[w] == threshold && in_time);
    const unsigned all = __ballot_sync(~0u, is_chosen);
    if (is_chosen) list[place + __popc(all & lower_lanes)] = row.free_begin + w * kWarpSize + lane;
    place += __popc(all);
  }
  row.write_rest(p, place, lane, kWarpSize);
}

}  // namespace
}  // namespace blockflash

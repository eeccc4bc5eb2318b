// The choice of the pages with the largest scores, by a CTA.
#pragma once

#include <stdint.h>

#include "blockflash/config/page_choice.cuh"
#include "blockflash/score_order.cuh"

namespace blockflash {

// Keys of the scores of columns [0, columns). The first and the last column have none, and so key
// 0, which no score has.
struct ScoreKeys {
  const float* scores;
  int columns;
  uint32_t* held;  // in shared memory, the first ones

  __device__ __forceinline__ uint32_t load(int column) const {
    // Other CTAs have just written it.
    return column > 0 && column < columns - 1 ? key_of(__ldcg(scores + column)) : 0;
  }
  __device__ __forceinline__ uint32_t operator[](int column) const {
    return column < PageChoiceConfig::held ? held[column] : load(column);
  }
};

// A threshold such that all larger keys and `equal` keys of its value are the largest ones.
struct Threshold {
  uint32_t key;
  int equal;
};

constexpr int kChoiceThreads = PageChoiceConfig::threads;
constexpr int kChoiceWarps = kChoiceThreads / kWarpSize;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr unsigned kEveryLane = 0xFFFFFFFF;
static_assert(kDigits == kChoiceThreads, "each thread clears the count of one digit");

// The digit of the k-th largest of the counted keys, and the keys to take among those that have it.
__device__ __forceinline__ Threshold kth_digit(const int* counts, int k, int lane) {
  constexpr int kOwn = kDigits / kWarpSize;  // digits of a lane, the largest ones in lane 0
  const int last = kDigits - 1 - lane * kOwn;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += counts[last - i];
  int reached = sum;  // keys of this lane's digits and of larger ones
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int others = __shfl_up_sync(kEveryLane, reached, distance);
    if (lane >= distance) reached += others;
  }
  const unsigned enough = __ballot_sync(kEveryLane, reached >= k);
  const int owner = enough == 0 ? kWarpSize - 1 : __ffs(static_cast<int>(enough)) - 1;
  int left = k - (reached - sum), digit = last;
#pragma unroll
  for (int i = 0; i < kOwn - 1; ++i) {
    if (digit != last - i || left <= counts[digit]) continue;
    left -= counts[digit];
    --digit;
  }
  return {static_cast<uint32_t>(__shfl_sync(kEveryLane, digit, owner)),
          __shfl_sync(kEveryLane, left, owner)};
}

// Finds the k-th largest key digit by digit; k is at least 1 and below the number of scores.
__device__ __forceinline__ Threshold kth_largest(const ScoreKeys& keys, int k) {
  __shared__ int counts[kDigits];
  __shared__ Threshold found;
  Threshold threshold{0, k};
  uint32_t known = 0;  // bits of the threshold
#pragma unroll 1
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int column = threadIdx.x; column < keys.columns; column += kChoiceThreads) {
      const uint32_t key = keys[column];
      if ((key & known) == threshold.key) atomicAdd(counts + (key >> shift) % kDigits, 1);
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
      const Threshold digit = kth_digit(counts, threshold.equal, threadIdx.x);
      if (threadIdx.x == 0) found = {threshold.key | digit.key << shift, digit.equal};
    }
    __syncthreads();
    threshold = found;
    known |= static_cast<uint32_t>(kDigits - 1) << shift;
  }
  return threshold;
}

// Writes the first and the last of more than `capacity` columns, and between them the ones with the
// largest scores, the first ones among equal scores, in ascending order.
__device__ __forceinline__ void choose_pages(const float* scores, int columns, int32_t* list,
                                             int capacity) {
  __shared__ uint32_t held[PageChoiceConfig::held];
  __shared__ int larger_of[kChoiceWarps], equal_of[kChoiceWarps];
  if (threadIdx.x == 0) list[0] = 0, list[capacity - 1] = columns - 1;
  if (capacity == 2) return;
  const ScoreKeys keys{scores, columns, held};
#pragma unroll 4
  for (int column = threadIdx.x; column < min(columns, PageChoiceConfig::held);
       column += kChoiceThreads)
    held[column] = keys.load(column);
  __syncthreads();
  const Threshold threshold = kth_largest(keys, capacity - 2);

  // Each warp takes neighbouring columns, so it needs to know only how many are chosen before them.
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int words = (columns + kWarpSize - 1) / kWarpSize;
  const int words_of_warp = (words + kChoiceWarps - 1) / kChoiceWarps;
  const int begin = warp * words_of_warp * kWarpSize;
  const int end = min(begin + words_of_warp * kWarpSize, words * kWarpSize);
  int larger = 0, equal = 0;
  for (int column = begin + lane; column < min(end, columns); column += kWarpSize) {
    const uint32_t key = keys[column];
    larger += key > threshold.key;
    equal += key == threshold.key;
  }
  larger = __reduce_add_sync(kEveryLane, larger);
  equal = __reduce_add_sync(kEveryLane, equal);
  if (lane == 0) larger_of[warp] = larger, equal_of[warp] = equal;
  __syncthreads();
  int place = 1, equal_before = 0;
  for (int other = 0; other < warp; ++other) {
    place += larger_of[other];
    equal_before += equal_of[other];
  }
  place += min(equal_before, threshold.equal);
  const unsigned lower_lanes = (1u << lane) - 1;
  for (int first = begin; first < end; first += kWarpSize) {
    const int column = first + lane;
    const uint32_t key = column < columns ? keys[column] : 0;
    const unsigned same = __ballot_sync(kEveryLane, key == threshold.key);
    const bool in_time = equal_before + __popc(same & lower_lanes) < threshold.equal;
    const bool chosen = key > threshold.key || (key == threshold.key && in_time);
    const unsigned all = __ballot_sync(kEveryLane, chosen);
    const int at = place + __popc(all & lower_lanes);
    // Nothing is written behind the list, whatever the scores are.
    if (chosen && at < capacity - 1) list[at] = column;
    place += __popc(all);
    equal_before += __popc(same);
  }
}

}  // namespace blockflash

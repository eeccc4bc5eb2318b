// Which CTA is the last of those that share a result, counted in a workspace that launches use one
// after another.
//
// Counts do not have to be left at zero: each word carries the number of the launch that counted in
// it last, and what an earlier launch left does not count. So lengths that change while a launch
// runs, and make its CTAs disagree about how many they are, spoil no later launch.
//
// Words 0 and 1 number the launches. The CTAs of a launch add 2^24 in all to one of them, each its
// share when it has read both: to word 0 if both have the same multiple of 2^24, else to word 1. So
// the multiples stay as they are until the last CTA has read them, and their sum is the number.
// Nobody waits for an answer.
#pragma once

#include <stdint.h>

#include "blockflash/ptx/counter.cuh"

namespace blockflash {

// What a CTA reads of words 0 and 1.
struct alignas(16) LaunchWords {
  uint64_t of[2];

  static __device__ __forceinline__ LaunchWords load(const uint64_t* words) {
    const ulonglong2 both = __ldcg(reinterpret_cast<const ulonglong2*>(words));
    return {{both.x, both.y}};
  }
};

// A word: 24 bits that count, below the 40 bits of the launch.
struct Arrivals {
  static constexpr int kCountBits = 24;
  static constexpr uint64_t kCount = (1u << kCountBits) - 1;

  uint64_t* words;  // [slots]
  uint64_t launch;  // its number, where the words have it

  // By one thread of each CTA of the launch, once. The words were read when predecessors of the
  // launch were complete.
  static __device__ __forceinline__ Arrivals begin(uint64_t* words, const LaunchWords& read) {
    const uint64_t first = read.of[0] >> kCountBits, second = read.of[1] >> kCountBits;
    const uint64_t share = blockIdx.x == 0 ? kCount + 2 - static_cast<uint64_t>(gridDim.x) : 1;
    ptx::add_relaxed(words + (first == second ? 0 : 1), share);
    return {words + 2, (first + second) << kCountBits};
  }

  // Whether the calling CTA is the last of `count` that arrive. The CTA has met at a barrier since
  // it stored its results, and after another one its threads see those of the others.
  __device__ __forceinline__ bool are_complete_with_this(int slot, int count) const {
    if (count == 1) return true;
    ptx::max_relaxed(words + slot, launch);
    const uint64_t before = ptx::atomic_add_acq_rel(words + slot, 1);
    return (before & kCount) + 1 == static_cast<uint64_t>(count);
  }

  // Whether all of `count` CTAs, of which the calling one is one, have arrived.
  __device__ __forceinline__ bool are_complete(int slot, int count) const {
    return ptx::load_acquire(words + slot) == (launch | static_cast<uint64_t>(count));
  }

  // Leaves a word that is not 0 in a slot, and returns what this launch left there before, or 0.
  __device__ __forceinline__ uint32_t exchange(int slot, uint32_t word) const {
    const uint64_t before = ptx::atomic_exchange(words + slot, launch | word);
    return (before & ~kCount) == launch ? static_cast<uint32_t>(before & kCount) : 0;
  }
};

}  // namespace blockflash

// NaN and infinities among values, for warpgroups that multiply panels of 64 columns by WGMMA.
#pragma once

#include <stdint.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/barrier_vote.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {

// A NaN or infinity in a value reaches all rows of a product, also those whose probability for its
// key is 0. Such values are therefore added here to the rows that see them, and then removed.
//
// `values` are 64 keys of panels with rows of 128 bytes. `seen_by(half)` are the keys that a lane's
// row sees; `sum_of(j, i)` is the accumulator i of columns 8 j to 8 j + 7. All threads of a
// warpgroup call it, which meet at a named barrier.
template <class Element, int panels, int barrier, class SeenBy, class SumOf>
__device__ __forceinline__ void take_out_nonfinite(uint32_t values, const SeenBy& seen_by,
                                                   const SumOf& sum_of) {
  using Traits = ElementTraits<Element>;
  constexpr int kKeys = 64, kPanelBytes = kKeys * 128, kBytes = panels * kPanelBytes;
  const int thread = threadIdx.x % 128;
  uint32_t sums = 0;
#pragma unroll 1
  for (int at = thread * 16; at < kBytes; at += 128 * 16) {
    const int4 words = ptx::load_shared_int4(values + at);
    for (int word : {words.x, words.y, words.z, words.w})
      sums = Traits::zero_times_plus(word, sums);
  }
  if (!ptx::named_barrier_or(barrier, 128, sums != 0)) return;
  const KeyRange rows[2] = {seen_by(0), seen_by(1)};
  const int column = accumulator_column(threadIdx.x % 32, 0);
#pragma unroll 1
  for (int key = 0; key < kKeys; ++key) {
    const bool sees[2] = {key >= rows[0].begin && key < rows[0].end,
                          key >= rows[1].begin && key < rows[1].end};
#pragma unroll
    for (int j = 0; j < 8 * panels; ++j) {
      const uint32_t pair = ptx::load_shared(values + j / 8 * kPanelBytes + key * 128 +
                                             ((j % 8 ^ key % 8) * 16) + column * 2);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint16_t bits = static_cast<uint16_t>(pair >> (16 * e));
        const float value = is_nonfinite<Element>(bits) ? Traits::to_float(bits) : 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) sum_of(j, 2 * half + e) += sees[half] ? value : 0.f;
      }
    }
  }
  ptx::named_barrier_sync(barrier, 128);  // all have read the values before they are changed
#pragma unroll 1
  for (int at = thread * 4; at < kBytes; at += 128 * 4) {
    uint32_t pair = ptx::load_shared(values + at);
    if (is_nonfinite<Element>(pair)) pair &= 0xFFFF0000;
    if (is_nonfinite<Element>(pair >> 16)) pair &= 0xFFFF;
    ptx::store_shared(values + at, pair);
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(barrier, 128);
}

}  // namespace blockflash

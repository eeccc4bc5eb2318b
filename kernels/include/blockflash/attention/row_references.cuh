// The references of rows of a softmax, for a lane that has scores of two rows as WGMMA leaves them.
#pragma once

#include "blockflash/attention/exponent.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/scores.h"

namespace blockflash {

// Moves the references of rows whose largest score is ahead by more than `slack` powers of two,
// each row for itself. `subtract` takes the place of the reference in the exponents, where large
// scores are changed.
template <int n>
__device__ __forceinline__ void move_references(float (&s)[n], float (&reference)[2],
                                                float (&subtract)[2], float slack,
                                                const blockflash_scores& scores) {
  float largest[2] = {s[0], s[2]};
#pragma unroll
  for (int i = 0; i < n; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
  bool grew = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] *= scores.scale_log2;
    subtract[half] = reference[half];
    grew |= largest[half] > subtract[half] + slack || may_be_beyond_fused(subtract[half]);
  }
  if (!__any_sync(~0u, grew)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float all = quad_max(largest[half]);
    if (all > reference[half] + slack) reference[half] = all;
    subtract[half] = reference[half];
  }
  if (!is_beyond_fused(reference[0]) && !is_beyond_fused(reference[1])) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!is_beyond_fused(reference[half])) continue;
    subtract[half] = 0.f;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i / 2 % 2 == half)
        s[i] = with_rounded_product(s[i], scores.scale_log2, scores.inverse_scale_log2,
                                    reference[half], 0.f);
  }
}

}  // namespace blockflash

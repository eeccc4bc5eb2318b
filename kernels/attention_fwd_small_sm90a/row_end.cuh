// The end of rows of attention forward.
#pragma once

#include "blockflash/attention/scores.cuh"
#include "blockflash/ptx/math.cuh"

namespace blockflash {

// Ends rows of a head, whose `denominator` sums 2^(score - reference): the sink joins them. `scale`
// is what the sums over values are to be multiplied by. A row without keys has the sum 0 and the
// output 0. NaN is not equal to 0 and passes through.
template <int rows>
__device__ __forceinline__ void end_rows(const blockflash_scores& scores, int head,
                                         float (&reference)[rows], float (&denominator)[rows],
                                         float (&scale)[rows]) {
#pragma unroll
  for (int r = 0; r < rows; ++r) scale[r] = 1.f;
  if (scores.sink != nullptr) {
    const float sink = Log2Units::sink(scores, head);
#pragma unroll
    for (int r = 0; r < rows; ++r) scale[r] = join_sink(reference[r], denominator[r], sink);
  }
#pragma unroll
  for (int r = 0; r < rows; ++r)
    scale[r] = denominator[r] == 0.f ? 0.f : scale[r] * ptx::rcp_approx(denominator[r]);
}

}  // namespace blockflash

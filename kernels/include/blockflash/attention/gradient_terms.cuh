// The gradients of scores with score terms, in accumulators of mma.sync.
#pragma once

#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/terms.cuh"

namespace blockflash {

// Turns scores s = q·k into probabilities and dp = dO·v into their gradients: with respect to the
// scaled score, or, with `of_bias`, to what the bias is added to. `logs(m, n, x)` and `deltas(m, n,
// x)` give the statistics of an MMA tile's two queries of the lane; `large`: one of the queries may
// be beyond `kFusedLimit`. Pairs whose bits are 0 get zeros.
template <bool transposed, bool of_bias, int m_tiles, int n_tiles, class Logs, class Deltas>
__device__ __forceinline__ void differentiate_with_terms(
    float (&s)[m_tiles][n_tiles][4], float (&dp)[m_tiles][n_tiles][4],
    const blockflash_scores& scores, const blockflash_score_terms& terms, int batch, int head,
    const TileAxes<transposed>& axes, const PairBits (&bits)[m_tiles], bool large, const Logs& logs,
    const Deltas& deltas, int lane) {
  const auto each = [&](const auto& statistics, const auto& change) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        float of_queries[2];
        statistics(m, n, of_queries);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          change(s[m][n][i], dp[m][n][i], of_queries[transposed ? i % 2 : i / 2],
                 is_visible(bits[m], n, i));
      }
  };
  const bool capped = is_capped(scores);
  each(deltas, [](float&, float& dp, float delta, bool) { dp -= delta; });
  if (capped)
    each([](int, int, float(&)[2]) {},
         [&](float& s, float& dp, float, bool) {
           if constexpr (!of_bias) dp *= soft_cap_slope(s, scores);
           s = soft_cap(s, scores);
         });
  if (adds(terms)) add_terms(s, terms, factor_before_terms(scores), batch, head, axes, lane);
  const auto exponentiate = [&](const auto& exponent) {
    each(logs, [&](float& s, float& dp, float negative_log, bool visible) {
      const float p = ptx::ex2_approx(exponent(s, scores.scale_log2, negative_log));
      s = visible ? p : 0.f;
      dp = visible ? p * dp : 0.f;
    });
  };
  if (!capped && large)
    exponentiate(ExponentOfLarge{});
  else
    exponentiate(FusedExponent{});
}

}  // namespace blockflash

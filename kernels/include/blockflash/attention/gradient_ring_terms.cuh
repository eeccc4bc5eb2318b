// Score terms in the Hopper kernels of the attention backward: ALiBi, and the bits of partial
// blocks. The producer finds the bits of a tile where it walks the lists, and publishes their place
// beside the tile. A lane loads the word of each 64 × 64 pairs from there when the tile arrives,
// and needs it when the scores and dp are complete.
#pragma once

#include "blockflash/attention/gradient_ring.cuh"
#include "blockflash/attention/terms.cuh"
#include "blockflash/ptx/permute.cuh"
#include "blockflash/ptx/readonly.cuh"

namespace blockflash {
namespace {

using TermsParams = blockflash_attention_bwd_tma_terms_params;

// The parameters of a kernel with terms begin with those of one without.
__device__ __forceinline__ const Params& base_of(const Params& params) { return params; }
__device__ __forceinline__ const Params& base_of(const TermsParams& params) { return params.bwd; }
__device__ __forceinline__ const TermsParams& terms_of(const Params& params) {
  static_assert(offsetof(TermsParams, bwd) == 0);
  return reinterpret_cast<const TermsParams&>(params);
}

// What is published beside the tile of a stage: its first 64 × 64 bits, or -1 if all pairs of its
// block are visible; and the slope of its head.
constexpr int kTermsOffset = kPageEnd;
static_assert(!kHasTerms || kTermsOffset + 8 * kStages <= kPageLimit, "the page is too small");
static_assert(!kHasTerms || !Config::dq, "dq has a kernel of its own, and this place in the page");

struct TileTerms {
  int bits;
  float slope;

  __device__ __forceinline__ void publish(uint32_t smem, int stage) const {
    const uint32_t at = page_base(smem) + kTermsOffset + 8 * stage;
    ptx::store_shared(at, static_cast<uint32_t>(bits));
    ptx::store_shared(at + 4, __float_as_uint(slope));
  }
};
__device__ __forceinline__ int published_bits(uint32_t smem, int stage) {
  return static_cast<int>(ptx::load_shared(page_base(smem) + kTermsOffset + 8 * stage));
}
__device__ __forceinline__ float published_slope(uint32_t smem, int stage) {
  return __uint_as_float(ptx::load_shared(page_base(smem) + kTermsOffset + 8 * stage + 4));
}

__device__ __forceinline__ float slope_of(const blockflash_score_terms& terms, int batch,
                                          int head) {
  if (terms.alibi == nullptr) return 0.f;
  return terms.alibi[batch * terms.alibi_stride_batch + head * terms.alibi_stride_head];
}

// The visible pairs of a lane in 64 rows and `tiles` times 64 columns, if not all of them are.
template <int tiles>
struct VisiblePairs {
  PairBits words[tiles];
  bool masked;

  // Those of a warpgroup's rows: `bits` is the first of the CTA's tiles of bits in `words`, where
  // the rows of the next warpgroup follow after `tiles_per_row` tiles.
  __device__ __forceinline__ static VisiblePairs load(const uint32_t* words, int bit_tiles,
                                                      int bits, int warpgroup, int tiles_per_row) {
    VisiblePairs pairs;
    pairs.masked = bits >= 0;
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      const uint32_t tile = min(static_cast<uint32_t>(bits) + warpgroup * tiles_per_row + i,
                                static_cast<uint32_t>(bit_tiles - 1));
      pairs.words[i] = kAllVisible;
      if (pairs.masked)
        pairs.words[i] = ptx::load_readonly(
            words + static_cast<int64_t>(tile) * BLOCKFLASH_BIT_TILE_WORDS + threadIdx.x % 128);
    }
    return pairs;
  }

  // Without those that the window hides.
  __device__ __forceinline__ void restrict(const Visible& by_window) {
    if (!by_window.masked) return;
    masked = true;
#pragma unroll
    for (int i = 0; i < tiles; ++i)
      words[i] &=
          ptx::permute_bytes(by_window.bits[0], by_window.bits[1], i == 0 ? 0x5410 : 0x7632);
  }

  // Zeros in pairs of rounded numbers: hidden ones are selected away, since 0·NaN is NaN. Bits
  // become the signs of bytes, and signs masks of numbers.
  template <int n>
  __device__ __forceinline__ void clear(uint32_t (&x)[n]) const {
    static_assert(n == 16 * tiles, "two numbers in each");
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int pair = i / 2 % 8;  // of columns; both rows alternate
      const uint32_t word = words[i / 16], byte = 8 | (i % 2 * 2 + pair / 4);
      const uint32_t selector = (byte | byte << 4) | (byte + 4 | byte + 4 << 4) << 8;
      x[i] &= ptx::permute_bytes(word << (7 - pair % 4 * 2), word << (6 - pair % 4 * 2), selector);
    }
  }
};

// Those of a tile that passes through.
using StreamPairs = VisiblePairs<kStreamRows / 64>;

// ALiBi of a lane: scores become s·scale - slope·|distance - column|, where a distance counts from
// the lane's first column; the second row of the lane is 8 further.
struct LaneAlibi {
  float slope, distance, factor;

  // The lane's first row and first column in their sequences, which have `rows` and `cols`: queries
  // and keys, or the other way round.
  __device__ __forceinline__ LaneAlibi(float slope, const blockflash_scores& scores, int row,
                                       int rows, int first_col, int cols)
      : slope(slope),
        distance(static_cast<float>(row + cols - rows - first_col)),
        factor(factor_before_terms(scores)) {}

  __device__ __forceinline__ float add(float x, int i) const {
    const float column = static_cast<float>(i / 4 * 8 + i % 2) - (i / 2 % 2 ? 8.f : 0.f);
    return fmaf(-slope, fabsf(distance - column), x * factor);
  }
};

// ALiBi that is added where there are slopes. `of_lane()` is the lane's, found out where it is
// needed, since registers are scarce.
template <class OfLane>
struct AddedAlibi {
  bool adds;
  OfLane of_lane;

  template <int n>
  __device__ __forceinline__ void scale_and_add(float (&s)[n]) const {
    if (!adds) return;
    const LaneAlibi alibi = of_lane();
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = alibi.add(s[i], i);
  }
  // As the function of this name of gradient.cuh, for the four elements from `first` on; `of(i)`
  // is the statistic of element i. Hidden pairs are left to others.
  template <Pairs pairs, class Of>
  __device__ __forceinline__ void differentiate(float* s, float* dp,
                                                const blockflash_scores& scores,
                                                const float (&negative_log)[2],
                                                const float (&delta)[2], int first,
                                                const Of& of) const {
    constexpr bool kCapped = pairs == Pairs::kCapped;
    using Exponent = std::conditional_t<kCapped, FusedExponent, ExponentOfLarge>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dp[i] -= delta[of(i)];
      if constexpr (kCapped) dp[i] *= soft_cap_slope(s[i], scores), s[i] = soft_cap(s[i], scores);
    }
    if (adds) {
      const LaneAlibi alibi = of_lane();
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = alibi.add(s[i], first + i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = ptx::ex2_approx(Exponent{}(s[i], scores.scale_log2, negative_log[of(i)]));
      dp[i] *= s[i];
    }
  }
};
template <class OfLane>
AddedAlibi(bool, OfLane) -> AddedAlibi<OfLane>;

// As `differentiate_scores`, with terms: what is added to scores, and the visible pairs, of which
// the hidden ones are cleared.
template <bool by_row, int n, class Logs, class Deltas, class Read, class Added>
__device__ __forceinline__ void differentiate_with_terms(
    float (&s)[n], float (&dp)[n], uint32_t (&p16)[n / 2], uint32_t (&ds16)[n / 2],
    const blockflash_scores& scores, bool large, const Added& added,
    const VisiblePairs<n / 32>& visible, const Logs& logs, const Deltas& deltas, const Read& read) {
  const auto of = [](int i) { return by_row ? i / 2 % 2 : i % 2; };
  float negative_log[2], delta[2];
  const auto at_once = [&](auto pairs) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s), ptx::wgmma_pin(dp);
    read();
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      logs(j, negative_log), deltas(j, delta);
      if (j >= 2) delay(s + 4 * j, ds16 + 2 * j - 4);
      added.template differentiate<decltype(pairs)::value>(s + 4 * j, dp + 4 * j, scores,
                                                           negative_log, delta, 4 * j, of);
      round(s + 4 * j, p16 + 2 * j), round(dp + 4 * j, ds16 + 2 * j);
    }
    visible.clear(p16), visible.clear(ds16);
  };
  if (is_capped(scores)) return at_once(PairsAre<Pairs::kCapped>{});
  if (large) return at_once(PairsAre<Pairs::kLarge>{});
  ptx::wgmma_wait_group<1>();
  ptx::wgmma_pin(s);
  added.scale_and_add(s);
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    logs(j, negative_log);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i)
      s[i] = ptx::ex2_approx(FusedExponent{}(s[i], scores.scale_log2, negative_log[of(i)]));
    round(s + 4 * j, p16 + 2 * j);
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dp);
  read();
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    deltas(j, delta);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) dp[i] = s[i] * (dp[i] - delta[of(i)]);
    round(dp + 4 * j, ds16 + 2 * j);
  }
  visible.clear(p16), visible.clear(ds16);
}

}  // namespace
}  // namespace blockflash

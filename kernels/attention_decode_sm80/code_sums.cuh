// The steps of a warp over a cache of codes. Products are in f16, to which codes are widened in
// registers; scales of K multiply scores, those of V probabilities or the sums.
#pragma once

#include <type_traits>

#include "code_queries.cuh"

namespace blockflash {
namespace {

// Log2 of the weight of a row that has none yet. Finite, as `kNoReference`.
constexpr float kNoWeight = -1e30f;

// Lane (g, t) holds the keys g and g + 8, or the columns 2g and 2g + 1 of 16, of the rows 2t and
// 2t + 1 of each row tile.
//
// Where keys have scales of V of their own, a probability times such a scale may be any number. The
// sums of a row then have a reference of their own, the largest such weight: they are those of
// 2^(score - reference + log2|scale| - weight)·v with weights of at most 1.
template <int codes>
struct CodeSums : WarpSums {
  using Type = Codes<codes>;

  CodesShared& shared;         // registers are short
  float weight[kRowTiles][2];  // log2 units, above the reference
  bool has_weights;            // whether keys have scales of V, or theirs is not finite

  __device__ __forceinline__ CodeSums(uint32_t ring_smem, int lane, CodesShared& shared)
      : WarpSums(ring_smem, lane, shared), shared(shared) {}

  // By all threads, where the queries of an item are visible to all, with the scales of K and V
  // in `shared.scales[slot]`.
  __device__ __forceinline__ void begin_item(const blockflash_attention_decode_params& p,
                                             uint32_t q_smem, unsigned char* q_tile, int slot,
                                             int lane) {
    const blockflash_cache_scales& scales = with_scales(p).scales;
    const bool has_k_scale = scales.k != nullptr && !are_k_scales_of_keys(scales);
    const bool of_keys = are_v_scales_of_keys(scales);
    if (threadIdx.x == 0)
      shared.v_scale = scales.v != nullptr && !of_keys ? shared.scales[slot].y : 1.f;
    convert_queries<codes>(p, q_tile, has_k_scale ? shared.scales[slot].x : 1.f, shared.factor);
    __syncthreads();
    WarpSums::begin_item(q_smem, lane);
    has_weights = of_keys || !isfinite(shared.v_scale);
  }

  __device__ __forceinline__ void begin_split() {
    WarpSums::begin_split();
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) weight[n][0] = weight[n][1] = kNoWeight;
  }

  template <class Terms>
  __device__ __forceinline__ void add_step(const blockflash_attention_decode_params& p,
                                           const DecodeItem& item, unsigned char* ring, int stage,
                                           int first_key, const Terms&, int lane) {
    if (kHasIndex && first_key == 0) return;
    const uint32_t offset = stage * kStageBytes;
    const float* const scales = reinterpret_cast<const float*>(ring + offset + kScalesOffset);
    float s[kRowTiles][4] = {};
    multiply_keys(s, offset, lane);
    if (are_k_scales_of_keys(with_scales(p).scales)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = nan_unless_finite(scales[lane / 4 + half * 8]);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) s[n][2 * half] *= scale, s[n][2 * half + 1] *= scale;
      }
    }
    cap_scores(s, p.scores);
    if (kHasIndex) hide_keys(s, first_key, lane);
    const bool is_masked =
        !kHasIndex && (first_key < item.all.begin || first_key + kStepKeys > item.all.end);
    if (is_masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t see = rows_that_see(p, item, first_key + lane / 4 + half * 8, lane);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(see >> (2 * n + e) & 1)) s[n][2 * half + e] = -CUDART_INF_F;
      }
    }
    float subtract[kRowTiles][2];
    move_references(s, p.scores, subtract, [&](int n, int e, float rescale, float moved) {
      // Sums with a reference of their own stay as they are.
      if (has_weights) {
        weight[n][e] = fmaxf(weight[n][e] - moved, kNoWeight);
      } else {
#pragma unroll
        for (int d = 0; d < kDSteps; ++d) o[d][n][e] *= rescale, o[d][n][e + 2] *= rescale;
      }
    });
    float v_scales[2] = {1.f, 1.f};
    if (has_weights) {
      const bool of_keys = are_v_scales_of_keys(with_scales(p).scales);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        v_scales[half] = of_keys ? scales[kStepKeys + lane / 4 + half * 8] : shared.v_scale;
    }
    unsigned char* const v_tile = ring + offset + kTileBytes;
    const bool may_be_hidden = is_masked && Type::kHasNonfinite && !Type::kHidesNan;
    if (may_be_hidden || has_weights) {
      bool special = !isfinite(v_scales[0]) || !isfinite(v_scales[1]);
      if (may_be_hidden) special |= has_nonfinite(v_tile, lane);
      if (__any_sync(~0u, special)) add_nonfinite(p, item, v_tile, scales, first_key, lane);
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = fmaf(s[n][i], p.scores.scale_log2, -subtract[n][i % 2]);
    uint32_t probabilities[kRowTiles][2];
    if (has_weights) {
      add_denominators(s);
      weigh(s, v_scales);
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      if (!has_weights) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = ptx::ex2_approx(s[n][i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) denominator[n][e] += s[n][e] + s[n][e + 2];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        probabilities[n][half] =
            ptx::movmatrix_trans(ElementTraits<__half>::pack(s[n][2 * half], s[n][2 * half + 1]));
    }
    const uint32_t nan = add_values(probabilities, offset);
    if constexpr (Type::kHidesNan)
      if (__any_sync(~0u, nan != 0)) add_nonfinite(p, item, v_tile, scales, first_key, lane);
  }

  // s = the scores of a step, times the factors of the rows.
  __device__ __forceinline__ void multiply_keys(float (&s)[kRowTiles][4], uint32_t offset,
                                                int lane) {
    uint32_t nan[2] = {};
#pragma unroll
    for (int d = 0; d < kDSteps / 2; ++d) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, k_lane.at(0, d) + offset);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (Type::kHidesNan) nan[i % 2] |= nan_bits_e4m3(k[i]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t a[4];
        Type::template widen<CodeOrder::kAdjacent>(k[2 * c], a[0], a[2]);
        Type::template widen<CodeOrder::kAdjacent>(k[2 * c + 1], a[1], a[3]);
        if constexpr (!kQInRegisters) load_queries(q[0], 2 * d + c, lane);
        const QFragments& q_step = q[kQInRegisters ? 2 * d + c : 0];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
          ptx::mma_m16n8k16<__half>(s[n], a, q_step[n][0], q_step[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(shared.factor + n * 8 + lane % 4 * 2);
      s[n][0] *= factor.x, s[n][1] *= factor.y, s[n][2] *= factor.x, s[n][3] *= factor.y;
    }
    if constexpr (Type::kHidesNan) {
      if (!__any_sync(~0u, (nan[0] | nan[1]) != 0)) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned lanes = __ballot_sync(~0u, nan[half] != 0);
        if (!(lanes >> (lane & ~3) & 15)) continue;
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) s[n][2 * half] = s[n][2 * half + 1] = CUDART_NAN_F;
      }
    }
  }

  // Adds p·v. Returns bits of NaN that `widen` hides.
  __device__ __forceinline__ uint32_t add_values(const uint32_t (&probabilities)[kRowTiles][2],
                                                 uint32_t offset) {
    uint32_t nan = 0;
#pragma unroll
    for (int d = 0; d < kDSteps / 2; ++d) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, v_lane.at(0, d) + offset);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (Type::kHidesNan) nan |= nan_bits_e4m3(v[i]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t a[4];
        Type::template widen<CodeOrder::kAlternate>(v[2 * c], a[0], a[1]);
        Type::template widen<CodeOrder::kAlternate>(v[2 * c + 1], a[2], a[3]);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
          ptx::mma_m16n8k16<__half>(o[2 * d + c][n], a, probabilities[n][0], probabilities[n][1]);
      }
    }
    return nan;
  }

  __device__ __forceinline__ void add_denominators(const float (&exponents)[kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        denominator[n][e] +=
            ptx::ex2_approx(exponents[n][e]) + ptx::ex2_approx(exponents[n][e + 2]);
  }

  // Turns exponents into probabilities times scales, relative to the weights of the rows. Scales
  // that are not finite have been taken care of.
  __device__ __forceinline__ void weigh(float (&s)[kRowTiles][4], const float (&v_scales)[2]) {
    float log2[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      log2[half] =
          isfinite(v_scales[half]) ? ptx::lg2_approx(fabsf(v_scales[half])) : -CUDART_INF_F;
    bool grew = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += log2[i / 2];
#pragma unroll
      for (int e = 0; e < 2; ++e) grew |= fmaxf(s[n][e], s[n][e + 2]) > weight[n][e];
    }
    if (__any_sync(~0u, grew)) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float moved = fmaxf(column_max(fmaxf(s[n][e], s[n][e + 2])), weight[n][e]);
          // Not 0, which would make NaN of an infinity.
          const float rescale = ptx::ex2_approx(fmaxf(weight[n][e] - moved, -126.f));
          weight[n][e] = moved;
#pragma unroll
          for (int d = 0; d < kDSteps; ++d) o[d][n][e] *= rescale, o[d][n][e + 2] *= rescale;
        }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[n][i] = copysignf(ptx::ex2_approx(s[n][i] - weight[n][i % 2]), v_scales[i / 2]);
  }

  // A code of a tile of V.
  static __device__ __forceinline__ uint8_t& code(unsigned char* v_tile, int key, int column) {
    return v_tile[TileLayout::offset(key, column / 16) + column % 16];
  }

  // Whether this lane finds a code that is not finite.
  static __device__ __forceinline__ bool has_nonfinite(unsigned char* v_tile, int lane) {
    bool found = false;
#pragma unroll 1
    for (int i = lane; i < kTileBytes; i += kWarpSize) found |= Type::is_nonfinite(v_tile[i]);
    return found;
  }

  // A value that is not finite, because of its code or its scale, reaches all rows of an MMA, also
  // those that do not see its key. It is added here to the rows that see it, and its code is
  // removed; `weigh` gives the keys of such scales no weight. Rare, so small code.
  __device__ __forceinline__ void add_nonfinite(const blockflash_attention_decode_params& p,
                                                const DecodeItem& item, unsigned char* v_tile,
                                                const float* scales, int first_key, int lane) {
    const bool of_keys = are_v_scales_of_keys(with_scales(p).scales);
#pragma unroll 1
    for (int key = 0; key < kStepKeys; ++key) {
      const uint32_t see = rows_that_see_of(p, item, first_key, key, lane);
      // A finite scale of all keys multiplies the sums in the end.
      const float scale = !has_weights ? 1.f : of_keys ? scales[kStepKeys + key] : shared.v_scale;
#pragma unroll
      for (int d = 0; d < kDSteps; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint8_t x = code(v_tile, key, d * 16 + lane / 4 * 2 + half);
          const float value =
              Type::is_nonfinite(x) || !isfinite(scale) ? code_to_float<Type>(x) * scale : 0.f;
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              o[d][n][2 * half + e] += see >> (2 * n + e) & 1 ? value : 0.f;
        }
    }
    __syncwarp();  // all have read the tile before it is changed
#pragma unroll 1
    for (int i = lane; i < kTileBytes; i += kWarpSize)
      if (Type::is_nonfinite(v_tile[i])) v_tile[i] = 0;
    __syncwarp();
  }

  // Stores the sums of a row tile, relative to the reference, times their scale. A row that has
  // seen no key has zeros, which the bound leaves as they are.
  template <class Place>
  __device__ __forceinline__ void stage(float* staging, int row_tile, int lane,
                                        const Place& place_of) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float scale =
          Type::kUnit *
          (has_weights ? ptx::ex2_approx(fmaxf(weight[row_tile][e], -126.f)) : shared.v_scale);
#pragma unroll
      for (int d = 0; d < kDSteps; ++d)
        *reinterpret_cast<float2*>(staging + place_of(lane % 4 * 2 + e, d * 16 + lane / 4 * 2)) =
            make_float2(o[d][row_tile][e] * scale, o[d][row_tile][e + 2] * scale);
    }
  }
};

using Sums = std::conditional_t<kHasCodes, CodeSums<kCacheCodes>, WarpSums>;

// Begins an item whose queries are visible to all threads.
template <class AnySums>
__device__ __forceinline__ void begin_item(AnySums& sums,
                                           const blockflash_attention_decode_params& p,
                                           uint32_t q_smem, unsigned char* q_tile, int slot,
                                           int lane) {
  if constexpr (kHasCodes)
    sums.begin_item(p, q_smem, q_tile, slot, lane);
  else
    sums.begin_item(q_smem, lane);
}

}  // namespace
}  // namespace blockflash

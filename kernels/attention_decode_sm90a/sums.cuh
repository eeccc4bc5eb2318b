// The online softmax of a warpgroup over tiles of 64 keys, for 64 rows.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/decode/tail_mask.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "loader.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;

// How far a score may exceed the reference of its row, in powers of two.
constexpr float kAhead = 4.f;

// Of the 16 rows of a warp, a lane holds the columns 8 j + 2 (lane % 4) + e of the rows g and g + 8
// (g = lane / 4), in o[4 j + 2 half + e].
__device__ __forceinline__ int first_row() {
  return threadIdx.x / kWarpSize * 16 + accumulator_row(threadIdx.x % kWarpSize, 0);
}

// What belongs to a whole row: the reference in powers of two, and the sum of
// 2^(score - reference).
struct Totals {
  float reference[2], denominator[2];
};

// With the sums of 2^(score - reference)·v, over the keys of a split or of several.
struct Sums {
  float o[kD / 2];
  Totals total;

  // Puts the sums over earlier keys before these: for each row, `earlier(i)` is what o[i] is of
  // these. The same arithmetic as `combine` of four columns in output.cuh.
  template <class Earlier>
  __device__ __forceinline__ void join_after(const Totals& before, const Earlier& earlier) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float moved = fmaxf(before.reference[half], total.reference[half]);
      const float its = ptx::ex2_approx(before.reference[half] - moved),
                  mine = ptx::ex2_approx(total.reference[half] - moved);
      total.reference[half] = moved;
      total.denominator[half] = fmaf(mine, total.denominator[half], its * before.denominator[half]);
#pragma unroll
      for (int i = 0; i < kD / 2; ++i)
        if (i / 2 % 2 == half) o[i] = fmaf(mine, o[i], its * earlier(i));
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      total.reference[half] = kNoReference, total.denominator[half] = 0.f;
  }

  // Denominators are this lane's share until here.
  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      total.denominator[half] = quad_sum(total.denominator[half]);
  }

  // All threads have met since the tile arrived. `meanwhile` runs beside the first product.
  template <class Meanwhile>
  __device__ __forceinline__ void add_tile(const Params& params, const DecodeRun& item,
                                           uint32_t q_smem, uint32_t stage_smem, int first_key,
                                           const Meanwhile& meanwhile) {
    const blockflash_attention_decode_params& p = params.base;
    float s[kTileKeys / 2];
    // In uniform registers, where descriptors are, so that they take no vector instructions.
    q_smem = __shfl_sync(~0u, q_smem, 0), stage_smem = __shfl_sync(~0u, stage_smem, 0);
    const uint64_t q = ptx::wgmma_descriptor(q_smem), k = ptx::wgmma_descriptor(stage_smem);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kD / 16; ++d) {
      using Product = ptx::Wgmma<kTileKeys, Element>;
      const uint64_t step = (d / 4 * kPanelBytes + d % 4 * 32) >> 4;
      if (d == 0)
        Product::template ss<false>(s, q + step, k + step);
      else
        Product::template ss<true>(s, q + step, k + step);
    }
    ptx::wgmma_commit_group();
    meanwhile();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s);
    cap_scores(s, p.scores);
    if (first_key < item.all.begin || first_key + kTileKeys > item.all.end)
      mask_tile(params, item, s, stage_smem + kTileBytes, first_key);
    float subtract[2];
    move_references(s, p.scores, subtract);
    uint32_t probabilities[kTileKeys / 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] =
              ptx::ex2_approx(fmaf(s[4 * j + 2 * half + e], p.scores.scale_log2, -subtract[half]));
          sum += x[e];
        }
        probabilities[2 * j + half] = Traits::pack(x[0], x[1]);
      }
      total.denominator[half] += sum;
    }
    const uint64_t v = ptx::wgmma_descriptor_mn(stage_smem + kTileBytes, kPanelBytes, 1024);
    ptx::wgmma_pin(o), ptx::wgmma_pin(probabilities);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      ptx::Wgmma<kD, Element>::template rs<true, true>(o, probabilities + 4 * step,
                                                       v + step * (16 * 128 >> 4));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(o);
  }

  // A reference follows the largest score of its row when that is ahead by more than kAhead, so
  // that sums are rarely scaled: exponentials of up to 2^kAhead fit into any element type. It is
  // independent of the other rows. `subtract` takes its place in the exponents, where large scores
  // are changed.
  __device__ __forceinline__ void move_references(float (&s)[kTileKeys / 2],
                                                  const blockflash_scores& scores,
                                                  float (&subtract)[2]) {
    float largest[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] *= scores.scale_log2;
      subtract[half] = total.reference[half];
      grew |= largest[half] > subtract[half] + kAhead || may_be_beyond_fused(subtract[half]);
    }
    if (!__any_sync(~0u, grew)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_max(largest[half]);
      const float before = total.reference[half];
      const float moved = all > before + kAhead ? all : before;
      const float rescale = ptx::ex2_approx(total.reference[half] - moved);
      total.reference[half] = subtract[half] = moved;
      total.denominator[half] *= rescale;
#pragma unroll
      for (int i = 0; i < kD / 2; ++i)
        if (i / 2 % 2 == half) o[i] *= rescale;
    }
    if (!is_beyond_fused(total.reference[0]) && !is_beyond_fused(total.reference[1])) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_beyond_fused(total.reference[half])) continue;
      subtract[half] = 0.f;
#pragma unroll
      for (int i = 0; i < kTileKeys / 2; ++i)
        if (i / 2 % 2 == half)
          s[i] = with_rounded_product(s[i], scores.scale_log2, scores.inverse_scale_log2,
                                      total.reference[half], 0.f);
    }
  }

  // What a row of this lane sees.
  struct VisibleRow {
    KeyRange keys;  // in the window, relative to the first key of a tile
    TailRow tail;

    // Half 0 or 1.
    __device__ __forceinline__ VisibleRow(const Params& params, const DecodeRun& item, int half,
                                          int first_key) {
      const blockflash_attention_decode_params& p = params.base;
      const int query =
          small_quotient(item.row_tile * Config::rows + first_row() + 8 * half, p.group);
      keys = DecodeSequence::mask(p, item.q_length, item.kv_length).keys_of(query);
      keys.begin -= first_key, keys.end -= first_key;
      tail = TailRow::of(params.tail_mask, item, query);
    }
  };

  // Hides keys from rows. A NaN or infinity in V reaches all rows of a product, also those whose
  // probability for its key is 0, so such values are added here to the rows that attend to them,
  // and then removed. All threads take part.
  __device__ __forceinline__ void mask_tile(const Params& params, const DecodeRun& item,
                                            float (&s)[kTileKeys / 2], uint32_t v_smem,
                                            int first_key) {
    const int column = accumulator_column(threadIdx.x % kWarpSize, 0);
    const VisibleRow rows[2] = {{params, item, 0, first_key}, {params, item, 1, first_key}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleRow& row = rows[half];
      uint32_t visible = visible_keys(row.keys.begin - column, row.keys.end - column);
      if (row.tail.first < first_key + kTileKeys)
#pragma unroll
        for (int i = 0; i < kTileKeys / 4; ++i)
          if (!row.tail.shows(first_key + column + i / 2 * 8 + i % 2)) visible &= ~(1u << i);
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i)
        if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -CUDART_INF_F;
    }
    uint32_t sums = 0;
#pragma unroll 1
    for (int at = threadIdx.x * 16; at < kTileBytes; at += Config::threads * 16) {
      const int4 words = ptx::load_shared_int4(v_smem + at);
      for (int word : {words.x, words.y, words.z, words.w})
        sums = Traits::zero_times_plus(word, sums);
    }
    if (!__syncthreads_or(sums != 0)) return;
#pragma unroll 1
    for (int key = 0; key < kTileKeys; ++key) {
      const auto is_visible = [&](const VisibleRow& row) {
        return key >= row.keys.begin && key < row.keys.end && row.tail.shows(first_key + key);
      };
      const bool sees[2] = {is_visible(rows[0]), is_visible(rows[1])};
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        const uint32_t pair = ptx::load_shared(v_smem + tile_offset(key, j) + column * 2);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint16_t bits = static_cast<uint16_t>(pair >> (16 * e));
          const float value = is_nonfinite<Element>(bits) ? Traits::to_float(bits) : 0.f;
#pragma unroll
          for (int half = 0; half < 2; ++half) o[4 * j + 2 * half + e] += sees[half] ? value : 0.f;
        }
      }
    }
    __syncthreads();  // all have read the tile before it is changed
#pragma unroll 1
    for (int at = threadIdx.x * 4; at < kTileBytes; at += Config::threads * 4) {
      uint32_t pair = ptx::load_shared(v_smem + at);
      if (is_nonfinite<Element>(pair)) pair &= 0xFFFF0000;
      if (is_nonfinite<Element>(pair >> 16)) pair &= 0xFFFF;
      ptx::store_shared(v_smem + at, pair);
    }
    ptx::fence_proxy_async();
    __syncthreads();
  }
};

}  // namespace
}  // namespace blockflash

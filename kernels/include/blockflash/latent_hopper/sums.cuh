// What a consumer warpgroup does with the tiles of an item: the scores of every second tile, and
// its 256 columns of the sums over all of them.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/nonfinite_values.cuh"
#include "blockflash/attention/row_references.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/latent_hopper/layout.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "blockflash/ptx/wgmma.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;
using ScoresProduct = ptx::Wgmma<kKeys, Element>;
using ValuesProduct = ptx::Wgmma<256, Element>;

// How far a score may exceed the reference of its row, in powers of two.
constexpr float kAhead = 4.f;

// Of the 16 rows of a warp, a lane holds rows g and g + 8 (g = lane / 4): columns 8 j +
// 2 (lane % 4) + e of its warpgroup in o[4 j + 2 half + e]. Each warpgroup has code of its own,
// since WGMMAs across a branch would be serialised.
template <int warpgroup>
struct Sums {
  const blockflash_attention_decode_params& p;
  Shared& shared;
  const Barriers& barriers;
  const uint32_t smem;
  float o[128];
  float reference[2], denominator[2];  // of this warpgroup's tiles

  __device__ __forceinline__ int first_row() const {
    return threadIdx.x / kWarpSize % 4 * 16 + accumulator_row(threadIdx.x % kWarpSize, 0);
  }
  __device__ __forceinline__ bool is_first_of_row() const { return threadIdx.x % 4 == 0; }
  // Of a stage, the values of this warpgroup.
  __device__ __forceinline__ uint32_t values_at(int stage) const {
    return smem + stage * kTileBytes + warpgroup * (kValuePanels / 2 * kPanelBytes);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = kNoReference, denominator[half] = 0.f;
  }

  // Starts the products with the keys of the own tile, a group for each of its parts.
  __device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], int pair) const {
    const uint64_t q = ptx::wgmma_descriptor(__shfl_sync(~0u, smem + kQOffset, 0)),
                   k = ptx::wgmma_descriptor(__shfl_sync(~0u, smem + warpgroup * kTileBytes, 0));
    constexpr int kPartSteps = kValuePanels / 2 * 4, kSteps = kPanels * 4;
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      if (d == 0 || d == kPartSteps) {
        ptx::mbarrier_wait(barrier_of(barriers.full, 2 * warpgroup + d / kPartSteps), pair & 1);
        // Rows that threads have copied.
        if constexpr (Config::has_lists) ptx::fence_proxy_async();
        ptx::wgmma_fence();
      }
      const uint64_t step = (d / 4 * kPanelBytes + d % 4 * 32) >> 4;
      if (d == 0)
        ScoresProduct::template ss<false>(s, q + step, k + step);
      else
        ScoresProduct::template ss<true>(s, q + step, k + step);
      if (d == kPartSteps - 1 || d == kSteps - 1) ptx::wgmma_commit_group();
    }
  }
  __device__ __forceinline__ void finish_scores(float (&s)[kKeys / 2]) const {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s);
  }

  // With the probabilities that this warpgroup has computed, or with those of the other one.
  __device__ __forceinline__ void start_values(uint32_t (&probabilities)[kKeys / 4], int stage) {
    const uint64_t v =
        ptx::wgmma_descriptor_mn(__shfl_sync(~0u, values_at(stage), 0), kPanelBytes, 1024);
    ptx::wgmma_pin(o), ptx::wgmma_pin(probabilities);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      ValuesProduct::template rs<true, true>(o, probabilities + 4 * step,
                                             v + step * (16 * 128 >> 4));
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void start_values(int stage) {
    const uint64_t v = ptx::wgmma_descriptor_mn(__shfl_sync(~0u, values_at(stage), 0), kPanelBytes,
                                                1024),
                   p = ptx::wgmma_descriptor(__shfl_sync(~0u, smem + probabilities_at(stage), 0));
    ptx::wgmma_pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      ValuesProduct::template ss<true, true>(o, p + (step * 32 >> 4), v + step * (16 * 128 >> 4));
    ptx::wgmma_commit_group();
  }

  // Waits for the product with the values of a tile, and releases its columns.
  __device__ __forceinline__ void finish_values(int stage) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(o);
    if (threadIdx.x % kWarpSize == 0)
      ptx::mbarrier_arrive(barrier_of(barriers.empty, 2 * stage + warpgroup));
  }

  // Whether some row does not see all keys of a tile, or some are those of another split.
  static __device__ __forceinline__ bool is_masked(const DecodeRun& item, int first_key) {
    return first_key < max(item.all.begin, item.keys.begin) ||
           first_key + kKeys > min(item.all.end, item.keys.end);
  }

  // The keys of the item that a row sees, relative to the first key of a tile.
  __device__ __forceinline__ KeyRange visible_to(const DecodeRun& item, int row,
                                                 int first_key) const {
    const int query = small_quotient(item.row_tile * kRows + row, p.group);
    const KeyRange keys = DecodeSequence::mask(p, item.q_length, item.kv_length).keys_of(query);
    return {max(keys.begin, item.keys.begin) - first_key, min(keys.end, item.keys.end) - first_key};
  }

  // Hides the keys of the own tile that are not listed or not seen from all rows. Their values are
  // zeros, and all rows see the others, so nothing is to be done about NaN.
  __device__ __forceinline__ void hide_unlisted(float (&s)[kKeys / 2], int pair) const {
    const uint16_t* const words = shared.listed.of[pair % 2][warpgroup];
    if (*reinterpret_cast<const uint64_t*>(words) == ~uint64_t{0}) return;
    const int thread = threadIdx.x % 4;
    const uint32_t listed[2] = {words[thread / 2], words[2 + thread / 2]};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(listed[j % 2] >> (j / 2 * 4 + thread % 2 * 2 + e) & 1))
          s[4 * j + e] = s[4 * j + 2 + e] = -CUDART_INF_F;
  }

  __device__ __forceinline__ void mask_scores(const DecodeRun& item, float (&s)[kKeys / 2],
                                              int first_key) const {
    const int column = accumulator_column(threadIdx.x % kWarpSize, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = visible_to(item, first_row() + 8 * half, first_key);
      const uint32_t visible = visible_keys(keys.begin - column, keys.end - column);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i)
        if (!(visible >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -CUDART_INF_F;
    }
  }

  // Takes what is not finite out of the values of a tile with a mask. Scores of the tile are
  // complete.
  __device__ __forceinline__ void clean_values(const DecodeRun& item, int first_key, int stage) {
    if (Config::has_lists || !is_masked(item, first_key)) return;
    take_out_nonfinite<Element, kValuePanels / 2, kWarpgroupBarrier + warpgroup>(
        values_at(stage),
        [&](int half) { return visible_to(item, first_row() + 8 * half, first_key); },
        [&](int j, int i) -> float& { return o[4 * j + i]; });
  }

  // From scores to the references of the rows, which the other warpgroup learns. `subtract` takes
  // their place in exponents.
  __device__ __forceinline__ void share_references(const DecodeRun& item, float (&s)[kKeys / 2],
                                                   float (&subtract)[2], int first_key, int pair) {
    const blockflash_scores& scores = p.scores;
    cap_scores(s, scores);
    if constexpr (Config::has_lists)
      hide_unlisted(s, pair);
    else if (is_masked(item, first_key))
      mask_scores(item, s, first_key);
    const float before[2] = {reference[0], reference[1]};
    move_references(s, reference, subtract, kAhead, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator[half] *= ptx::ex2_approx(before[half] - reference[half]);
      if (is_first_of_row()) shared.references[first_row() + 8 * half] = reference[half];
    }
    ptx::named_barrier_arrive(kReferencesReady + warpgroup, Team::threads);
  }

  // From scores to probabilities, for this warpgroup and in shared memory for the other one.
  __device__ __forceinline__ void share_probabilities(const float (&s)[kKeys / 2],
                                                      const float (&subtract)[2],
                                                      uint32_t (&probabilities)[kKeys / 4]) {
    const float scale = p.scores.scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = ptx::ex2_approx(fmaf(s[4 * j + 2 * half + e], scale, -subtract[half]));
          sum += x[e];
        }
        probabilities[2 * j + half] = Traits::pack(x[0], x[1]);
      }
      denominator[half] += sum;
    }
    const int lane = threadIdx.x % kWarpSize, row = lane / 8 % 2 * 8 + lane % 8;
    const uint32_t rows =
        smem + probabilities_at(warpgroup) + (threadIdx.x / kWarpSize % 4 * 16 + row) * 128;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint32_t words[4] = {probabilities[4 * step], probabilities[4 * step + 1],
                                 probabilities[4 * step + 2], probabilities[4 * step + 3]};
      ptx::stmatrix_x4(rows + ((2 * step + lane / 16) ^ row % 8) * 16, words);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive(kProbabilitiesReady + warpgroup, Team::threads);
  }

  // Scales the sums from some references to others. Nothing is in flight.
  __device__ __forceinline__ void rescale(const float (&from)[2], const float (&to)[2]) {
    if (!__any_sync(~0u, from[0] != to[0] || from[1] != to[1])) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = ptx::ex2_approx(from[half] - to[half]);
#pragma unroll
      for (int i = 0; i < 128; ++i)
        if (i / 2 % 2 == half) o[i] *= factor;
    }
  }

  // Takes over the references of the other warpgroup.
  __device__ __forceinline__ void follow() {
    ptx::named_barrier_sync(kReferencesReady + 1 - warpgroup, Team::threads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = reference[half];
      reference[half] = shared.references[first_row() + 8 * half];
      denominator[half] *= ptx::ex2_approx(before - reference[half]);
    }
  }

  // The first warpgroup has the scores of the first tile of a pair, the second one those of the
  // second. `pair` counts pairs of all items.
  __device__ __forceinline__ void add_pair(const DecodeRun& item, int first_key, int pair) {
    const int second_key = first_key + kKeys;
    float s[kKeys / 2], subtract[2];
    uint32_t probabilities[kKeys / 4];
    const float before[2] = {reference[0], reference[1]};
    start_scores(s, pair);
    if constexpr (warpgroup == 0) {
      finish_scores(s);
      share_references(item, s, subtract, first_key, pair);
      const float own[2] = {reference[0], reference[1]};
      share_probabilities(s, subtract, probabilities);
      rescale(before, own);
      clean_values(item, first_key, 0);
      start_values(probabilities, 0);
      follow();
      finish_values(0);
      ptx::named_barrier_sync(kProbabilitiesReady + 1, Team::threads);
      rescale(own, reference);
      clean_values(item, second_key, 1);
      start_values(1);
    } else {
      follow();
      const float others[2] = {reference[0], reference[1]};
      finish_scores(s);
      share_references(item, s, subtract, second_key, pair);
      ptx::named_barrier_sync(kProbabilitiesReady, Team::threads);
      rescale(before, others);
      clean_values(item, first_key, 0);
      start_values(0);
      // Under the product with the values of the first tile.
      share_probabilities(s, subtract, probabilities);
      finish_values(0);
      rescale(others, reference);
      clean_values(item, second_key, 1);
      start_values(probabilities, 1);
    }
    finish_values(1);
  }

  // With lists: passes a pair of tiles without listed keys, and returns true, or returns false.
  __device__ __forceinline__ bool pass_pair(int pair) const {
    ptx::mbarrier_wait(barrier_of(barriers.full, 2 * warpgroup), pair & 1);
    const uint64_t* const words = reinterpret_cast<const uint64_t*>(shared.listed.of[pair % 2]);
    if ((words[0] | words[1]) != 0) return false;
    __syncwarp();  // all have read the words
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_wait(barrier_of(barriers.full, 2 * stage + warpgroup), pair & 1);
      if (threadIdx.x % kWarpSize == 0)
        ptx::mbarrier_arrive(barrier_of(barriers.empty, 2 * stage + warpgroup));
    }
    return true;
  }

  // The denominators of all tiles, in the order of the warpgroups. The team meets.
  __device__ __forceinline__ void join_denominators() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator[half] = quad_sum(denominator[half]);
      if (is_first_of_row())
        shared.denominators[warpgroup][first_row() + 8 * half] = denominator[half];
    }
    Team::sync();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + 8 * half;
      denominator[half] = shared.denominators[0][row] + shared.denominators[1][row];
    }
  }
};

}  // namespace
}  // namespace blockflash

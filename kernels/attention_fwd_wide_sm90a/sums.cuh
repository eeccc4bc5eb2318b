// What a consumer warpgroup does: the scores of every second key tile, and its 256 columns of the
// output over all of them.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/nonfinite_values.cuh"
#include "blockflash/attention/row_references.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "layout.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;
using ScoresProduct = ptx::Wgmma<kKeys, Element>;
using ValuesProduct = ptx::Wgmma<128, Element>;

// How far a score may exceed the reference of its row, in powers of two.
constexpr float kSlack = 8.f;

// Chunks of keys of the next own tile that are multiplied before the values of the other
// warpgroup's tile, and so between two products with values.
constexpr int kScoresBefore = 1;

// Of the 16 rows of a warp, a lane holds rows g and g + 8 (g = lane / 4): columns 8 j +
// 2 (lane % 4) + e of a chunk in o[chunk][4 j + 2 half + e]. Each warpgroup has code of its own,
// since WGMMAs across a branch would be serialised.
template <int warpgroup>
struct Sums {
  const Params& params;
  const Work& work;
  Shared& shared;
  const Barriers& barriers;
  const uint32_t smem;
  KeyRange visible[2];  // keys that the rows of this lane see
  float o[kParts][64];
  uint32_t p[kKeys / 4];               // probabilities of the own tile
  float reference[2], denominator[2];  // of own tiles
  float others[2];                     // references of the tile before the last own one

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int first_row() {
    return threadIdx.x / kWarpSize % 4 * 16 + accumulator_row(lane(), 0);
  }
  static __device__ __forceinline__ bool is_first_of_row() { return threadIdx.x % 4 == 0; }
  static __device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }
  __device__ __forceinline__ uint32_t values_at(int part) const {
    return smem + kVOffset + (kParts * warpgroup + part) * kChunkBytes;
  }
  __device__ __forceinline__ uint32_t probabilities_at(int t) const {
    return smem + kProbabilitiesOffset + (t + kProbabilityTiles) % kProbabilityTiles * kPanelBytes;
  }

  __device__ __forceinline__ void begin() {
    const AttentionMask mask = work.tile.mask(params.base);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible[half] = mask.keys_of<int>(work.tile.q_begin + first_row() + 8 * half);
      reference[half] = others[half] = kNoReference, denominator[half] = 0.f;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 64; ++i) o[part][i] = 0.f;
  }

  __device__ __forceinline__ void release(uint32_t empty, int chunk) const {
    if (lane() == 0) ptx::mbarrier_arrive(barrier_of(empty, chunk));
  }
  __device__ __forceinline__ void wait_values(int t, int part) const {
    ptx::mbarrier_wait(barrier_of(barriers.v_full, kParts * warpgroup + part), t & 1);
  }
  __device__ __forceinline__ void pin_output() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::wgmma_pin(o[part]);
  }

  // Starts the products with some chunks of keys, a group for each.
  template <int begin, int end>
  __device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], int t) const {
    const uint64_t q = ptx::wgmma_descriptor(uniform(smem + kQOffset)),
                   k = ptx::wgmma_descriptor(uniform(smem + kKOffset));
    constexpr int kSteps = kChunkPanels * 4;  // of a chunk
#pragma unroll
    for (int chunk = begin; chunk < end; ++chunk) {
      ptx::mbarrier_wait(barrier_of(barriers.k_full, warpgroup * kChunks + chunk), t / 2 & 1);
      ptx::wgmma_fence();
#pragma unroll
      for (int d = chunk * kSteps; d < (chunk + 1) * kSteps; ++d) {
        const uint64_t step = (d / 4 * kPanelBytes + d % 4 * 32) >> 4;
        if (d == 0)
          ScoresProduct::template ss<false>(s, q + step, k + step);
        else
          ScoresProduct::template ss<true>(s, q + step, k + step);
      }
      ptx::wgmma_commit_group();
    }
  }
  // Waits until only `pending` groups are in flight, and releases a chunk of keys.
  template <int pending>
  __device__ __forceinline__ void finish_keys(int chunk) const {
    ptx::wgmma_wait_group<pending>();
    release(barriers.k_empty, chunk);
  }
  // The same of values.
  template <int pending>
  __device__ __forceinline__ void finish_values(int part, bool exists = true) const {
    ptx::wgmma_wait_group<pending>();
    if (exists) release(barriers.v_empty, kParts * warpgroup + part);
  }

  // Starts the products with the chunks of values, a group for each: with the probabilities that
  // this warpgroup has computed, or with those of the other one. Before the first tile there are
  // zeros.
  template <bool own>
  __device__ __forceinline__ void start_values(int t) {
    pin_output();
    if constexpr (own) ptx::wgmma_pin(p);
    const uint32_t of_others = uniform(probabilities_at(t));
    const bool exists = own || warpgroup == 1 || t >= 0;
    const int step_bytes = exists ? 16 * 128 : 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (exists) wait_values(t, part);
      const uint64_t v = ptx::wgmma_descriptor_mn(uniform(exists ? values_at(part) : of_others),
                                                  exists ? kPanelBytes : 0, exists ? 1024 : 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        const uint64_t v_step = v + (step * step_bytes >> 4);
        if constexpr (own)
          ValuesProduct::template rs<true, true>(o[part], p + 4 * step, v_step);
        else
          ValuesProduct::template ss<true, true>(
              o[part], ptx::wgmma_descriptor(of_others) + (step * 32 >> 4), v_step);
      }
      ptx::wgmma_commit_group();
    }
  }

  __device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], int first_key) const {
    const int first = first_key + accumulator_column(lane(), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t seen = visible_keys(visible[half].begin - first, visible[half].end - first);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i)
        if (!(seen >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = -CUDART_INF_F;
    }
  }

  // Takes what is not finite out of the values of a tile with a mask. No product with values is in
  // flight.
  __device__ __forceinline__ void clean_values(int t) {
    if (t < 0 || !work.is_masked(work.first_tile + t)) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) wait_values(t, part);
    const int first_key = (work.first_tile + t) * kKeys;
    take_out_nonfinite<Element, kPanels / 2, kWarpgroupBarrier + warpgroup>(
        values_at(0),
        [&](int half) {
          return KeyRange{visible[half].begin - first_key, visible[half].end - first_key};
        },
        [&](int j, int i) -> float& { return o[j / 16][j % 16 * 4 + i]; });
  }

  // From scores to probabilities, in registers and in shared memory for the other warpgroup, which
  // also learns the references. `meanwhile` is called when only exponentials are left.
  template <class Meanwhile>
  __device__ __forceinline__ void share_probabilities(float (&s)[kKeys / 2],
                                                      uint32_t (&probabilities)[kKeys / 4], int t,
                                                      const Meanwhile& meanwhile) {
    const blockflash_scores& scores = params.base.scores;
    cap_scores(s, scores);
    const int key_tile = work.first_tile + t;
    if (work.is_masked(key_tile)) mask_scores(s, key_tile * kKeys);
    float subtract[2];
    const float before[2] = {reference[0], reference[1]};
    move_references(s, reference, subtract, kSlack, scores);
    meanwhile();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator[half] *= ptx::ex2_approx(before[half] - reference[half]);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = ptx::ex2_approx(fmaf(s[4 * j + 2 * half + e], scores.scale_log2, -subtract[half]));
          sum += x[e];
        }
        probabilities[2 * j + half] = Traits::pack(x[0], x[1]);
      }
      denominator[half] += sum;
      if (is_first_of_row()) shared.references[first_row() + 8 * half] = reference[half];
    }
    const int row = lane() / 8 % 2 * 8 + lane() % 8;
    const uint32_t rows = probabilities_at(t) + (threadIdx.x / kWarpSize % 4 * 16 + row) * 128;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint32_t words[4] = {probabilities[4 * step], probabilities[4 * step + 1],
                                 probabilities[4 * step + 2], probabilities[4 * step + 3]};
      ptx::stmatrix_x4(rows + ((2 * step + lane() / 16) ^ row % 8) * 16, words);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive(kProbabilitiesReady + warpgroup, kConsumers);
  }

  // Scales the sums from some references to others. Nothing is in flight.
  __device__ __forceinline__ void rescale(const float (&from)[2], const float (&to)[2]) {
    if (!__any_sync(~0u, from[0] != to[0] || from[1] != to[1])) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = ptx::ex2_approx(from[half] - to[half]);
#pragma unroll
      for (int i = 0; i < 128; ++i)
        if (i / 2 % 2 == half) o[i / 64][i % 64] *= factor;
    }
  }

  // Waits for the probabilities of the other warpgroup and takes over its references.
  __device__ __forceinline__ void follow() {
    ptx::named_barrier_sync(kProbabilitiesReady + 1 - warpgroup, kConsumers);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      others[half] = shared.references[first_row() + 8 * half];
      denominator[half] *= ptx::ex2_approx(reference[half] - others[half]);
      reference[half] = others[half];
    }
  }

  // The first tile of this warpgroup. Nothing has been multiplied with values.
  __device__ __forceinline__ void begin_tiles() {
    float s[kKeys / 2];
    ptx::mbarrier_wait(barriers.q_full, 0);
    start_scores<0, kChunks>(s, warpgroup);
    finish_keys<3>(0), finish_keys<2>(1), finish_keys<1>(2), finish_keys<0>(3);
    ptx::wgmma_pin(s);
    if constexpr (warpgroup == 0) {
      // In place of the probabilities of a tile before the first one.
      for (int at = threadIdx.x * 16; at < kPanelBytes; at += 128 * 16)
        ptx::store_shared_int4(probabilities_at(-1) + at, make_int4(0, 0, 0, 0));
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(kWarpgroupBarrier, 128);
    } else {
      follow();
    }
    share_probabilities(s, p, warpgroup, [] {});
  }

  // The product of own tile t, those of the tile before it, and the scores of own tile t + 2 up to
  // its probabilities. Products of a warpgroup with values are apart from each other, with scores
  // or a softmax between them, so that the next values arrive meanwhile.
  __device__ __forceinline__ void round(int t) {
    float s[kKeys / 2];
    const bool exists = warpgroup == 1 || t > 0;
    clean_values(t - 1);
    start_scores<0, kScoresBefore>(s, t + 2);
    start_values<false>(t - 1);
    start_scores<kScoresBefore, kChunks>(s, t + 2);
    if constexpr (kScoresBefore > 0) finish_keys<5>(0);
    if constexpr (kScoresBefore > 1) finish_keys<4>(1);
    finish_values<kChunks - kScoresBefore + 1>(0, exists);
    finish_values<kChunks - kScoresBefore>(1, exists);
    if constexpr (kScoresBefore < 1) finish_keys<3>(0);
    if constexpr (kScoresBefore < 2) finish_keys<2>(1);
    finish_keys<1>(2), finish_keys<0>(3);
    pin_output(), ptx::wgmma_pin(s);
    rescale(others, reference);
    clean_values(t);
    start_values<true>(t);
    const float before[2] = {reference[0], reference[1]};
    uint32_t probabilities[kKeys / 4];
    follow();
    share_probabilities(s, probabilities, t + 2, [&] { finish_values<1>(0); });
    finish_values<0>(1);
    pin_output(), ptx::wgmma_pin(p);
    rescale(before, others);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = probabilities[i];
  }

  // The products of the last tiles, the last own one of which is t.
  __device__ __forceinline__ void end_tiles(int t) {
    add_others(t - 1);
    rescale(others, reference);
    clean_values(t);
    start_values<true>(t);
    finish_values<1>(0), finish_values<0>(1);
    pin_output(), ptx::wgmma_pin(p);
    if constexpr (warpgroup == 0) {
      const float before[2] = {reference[0], reference[1]};
      follow();
      rescale(before, others);
      add_others(t + 1);
    }
  }
  __device__ __forceinline__ void add_others(int t) {
    clean_values(t);
    start_values<false>(t);
    const bool exists = warpgroup == 1 || t >= 0;
    finish_values<1>(0, exists), finish_values<0>(1, exists);
    pin_output();
  }

  // The first warpgroup has the scores of even tiles, the second one those of odd ones.
  __device__ __forceinline__ void run() {
    begin_tiles();
    int t = warpgroup;
#pragma unroll 1
    for (; t + 2 < 2 * work.pairs; t += 2) round(t);
    end_tiles(t);
  }

  // The denominators of all tiles, in the order of the warpgroups.
  __device__ __forceinline__ void join_denominators() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      denominator[half] = quad_sum(denominator[half]);
      if (is_first_of_row())
        shared.denominators[warpgroup][first_row() + 8 * half] = denominator[half];
    }
    ptx::named_barrier_sync(kConsumerBarrier, kConsumers);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + 8 * half;
      denominator[half] = shared.denominators[0][row] + shared.denominators[1][row];
    }
  }
};

}  // namespace
}  // namespace blockflash

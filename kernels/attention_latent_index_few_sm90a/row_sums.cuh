// The products and the online softmax of a CTA over steps of 64 keys, for 16 rows.
//
// A warp multiplies all columns of the queries, which are in its registers, with 8 of the keys.
// Probabilities go through shared memory, and each warp multiplies all of them with an eighth of
// the columns of the values.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/barrier_vote.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/shared.cuh"
#include "rows.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;

constexpr int kRows = Config::rows, kDepth = Config::columns / 16;
// How far a score may exceed the reference of its row, in powers of two.
constexpr float kAhead = 4.f;
constexpr int kVote = 1;  // named barrier
static_assert(kRows == 16 && Config::warps * 8 == kKeys, "a warp has the scores of 8 keys");
static_assert(Config::values == Config::warps * 64, "and 64 columns of the output");

struct Exchange {
  alignas(128) uint8_t probabilities[kRows * kKeys * 2];  // rows of 128 bytes, swizzled
  float maxima[Config::warps][kRows], denominators[Config::warps][kRows];
};

// Lane (g, t) = (lane / 4, lane % 4) holds the columns 8 j + 2 t + e of the rows g and g + 8, in
// o[j][2 half + e].
struct RowSums {
  static constexpr bool kHasCodes = false;
  static constexpr int kTiles = Config::values / Config::warps / 8;

  uint32_t q[kDepth][4];
  float o[kTiles][4];
  float reference[2];    // log2 units, of a row; all warps have the same
  float denominator[2];  // this lane's share, of the keys of its warp
  Exchange& exchange;
  uint32_t k_lane[2];  // in a stage: of the 8 keys of this warp at steps 0 and 2 of the columns,
  LaneAddress<kChunks> v_lane;  // and of its values

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }

  __device__ __forceinline__ explicit RowSums(Exchange& exchange)
      : exchange(exchange),
        v_lane(warp() * kTiles * 16, lane_row_major(lane()).row, lane_row_major(lane()).chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      k_lane[i] = TileLayout::offset(warp() * 8 + lane() % 8, 4 * i + lane() / 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = kNoReference, denominator[half] = 0.f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = 0.f;
  }

  __device__ __forceinline__ void load_queries(uint32_t smem) {
    const LaneCoords at = lane_row_major(lane());
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      ptx::ldmatrix_x4(q[d], smem + TileLayout::offset(at.row, 2 * d + at.chunk));
  }

  // Adds the step in a stage that all threads see. `listed` is the word of its keys. Calls
  // `meanwhile` when the scores are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void add_step(const blockflash_scores& scores, uint32_t stage_smem,
                                           uint64_t listed, const Meanwhile& meanwhile) {
    float s[4];
    multiply(s, stage_smem);
    meanwhile();
    cap_scores(s, scores);
    if (listed != ~uint64_t{0}) hide(s, listed);
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(s[2 * half], s[2 * half + 1]) * scores.scale_log2;
      grew |= largest > reference[half] + kAhead || may_be_beyond_fused(reference[half]);
    }
    float sums[2], subtract[2] = {reference[0], reference[1]};
    store_probabilities(s, scores.scale_log2, subtract, sums);
    if (ptx::named_barrier_or(kVote, Config::threads, grew)) {
      move_references(s, scores, subtract);
      store_probabilities(s, scores.scale_log2, subtract, sums);
      __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) denominator[half] += sums[half];
    add_values(stage_smem);
  }

  // The denominators of all keys, in the order of the warps, with the first lane of each row.
  __device__ __forceinline__ void join_denominators() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_warp = quad_sum(denominator[half]);
      if (lane() % 4 == 0) exchange.denominators[warp()][row(half)] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < Config::warps; ++w) all += exchange.denominators[w][row(half)];
      denominator[half] = lane() % 4 == 0 ? all : 0.f;
    }
  }

 private:
  static __device__ __forceinline__ int row(int half) { return lane() / 4 + 8 * half; }

  // The scores of this warp's keys. Four chains of products, since one after another they would
  // take longer than anything else.
  __device__ __forceinline__ void multiply(float (&s)[4], uint32_t stage_smem) const {
    float chains[4][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; d += 2) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, stage_smem + k_lane[d / 2 % 2] + d / 4 * 128);
      ptx::mma_m16n8k16<Element>(chains[d % 4], q[d], k[0], k[1]);
      ptx::mma_m16n8k16<Element>(chains[d % 4 + 1], q[d + 1], k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }

  // Hides the keys that are not listed or not seen from all rows. Their values are zeros, and all
  // rows see the others, so nothing is to be done about NaN.
  __device__ __forceinline__ void hide(float (&s)[4], uint64_t listed) const {
    const int thread = lane() % 4;
    const int byte = warp() % 4 * 2 + thread / 2, bit = warp() / 4 * 4 + thread % 2 * 2;
    const uint32_t bits = static_cast<uint32_t>(listed >> (byte * 8 + bit));
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(bits >> e & 1)) s[e] = s[2 + e] = -CUDART_INF_F;
  }

  // Probabilities of this warp's keys, and this lane's share of their sums.
  __device__ __forceinline__ void store_probabilities(const float (&s)[4], float scale_log2,
                                                      const float (&subtract)[2],
                                                      float (&sums)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[e] = ptx::ex2_approx(fmaf(s[2 * half + e], scale_log2, -subtract[half]));
      sums[half] = x[0] + x[1];
      uint8_t* const at =
          exchange.probabilities + row(half) * 128 + (warp() ^ row(half) % 8) * 16 + lane() % 4 * 4;
      *reinterpret_cast<uint32_t*>(at) = Traits::pack(x[0], x[1]);
    }
  }

  // Moves the references of rows whose largest score is ahead, each row for itself. `subtract`
  // takes the place of the reference in the exponents, where large scores are changed.
  __device__ __forceinline__ void move_references(float (&s)[4], const blockflash_scores& scores,
                                                  float (&subtract)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(fmaxf(s[2 * half], s[2 * half + 1]));
      if (lane() % 4 == 0) exchange.maxima[warp()][row(half)] = largest * scores.scale_log2;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = exchange.maxima[0][row(half)];
#pragma unroll
      for (int w = 1; w < Config::warps; ++w)
        largest = fmaxf(largest, exchange.maxima[w][row(half)]);
      const float moved = largest > reference[half] + kAhead ? largest : reference[half];
      const float rescale = ptx::ex2_approx(reference[half] - moved);
      reference[half] = subtract[half] = moved;
      denominator[half] *= rescale;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) o[j][2 * half] *= rescale, o[j][2 * half + 1] *= rescale;
      if (!is_beyond_fused(moved)) continue;
      subtract[half] = 0.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[2 * half + e];
        x = with_rounded_product(x, scores.scale_log2, scores.inverse_scale_log2, moved, 0.f);
      }
    }
  }

  // Adds p·v for the columns of this warp.
  __device__ __forceinline__ void add_values(uint32_t stage_smem) {
    const uint32_t p_smem = static_cast<uint32_t>(__cvta_generic_to_shared(exchange.probabilities));
    const LaneCoords at = lane_row_major(lane());
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t p[4];
      ptx::ldmatrix_x4(p, p_smem + at.row * 128 + ((2 * step + at.chunk) ^ at.row % 8) * 16);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, stage_smem + v_lane.at(step * 16, j / 2));
        ptx::mma_m16n8k16<Element>(o[j], p, v[0], v[1]);
        ptx::mma_m16n8k16<Element>(o[j + 1], p, v[2], v[3]);
      }
    }
  }
};

}  // namespace
}  // namespace blockflash

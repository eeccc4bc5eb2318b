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
static_assert(kRows == 16 && Config::values == kWarps * 64, "a warp has 64 columns of 16 rows");

// Probabilities are in rows of 128 bytes, swizzled. Beside codes there are those times the scales
// of each part of the values.
constexpr int kParts = kHasCodes ? CodeRow::codes / CodeRow::of_scale : 1;
constexpr int kCodeSteps = kHasCodes ? CodeRow::codes / 16 : 0;  // of the columns
struct Exchange {
  alignas(128) uint8_t probabilities[2][kParts][kRows * kKeys * 2];  // two steps take turns
  float maxima[kWarps][kRows], denominators[kWarps][kRows];
};

// Lane (g, t) = (lane / 4, lane % 4) holds the columns 8 j + 2 t + e of the rows g and g + 8, in
// o[j][2 half + e]; of codes, the columns 16 (j / 2) + 4 t + 2 e + j % 2.
struct RowSums {
  static constexpr bool kHasCodes = blockflash::kHasCodes;
  static constexpr int kTiles = Config::values / kWarps / 8;

  uint32_t q[kDepth][4];
  float o[kTiles][4];
  float reference[2];    // log2 units, of a row; all warps have the same
  float denominator[2];  // this lane's share, of the keys of its warp
  Exchange& exchange;
  int turn = 0;  // of the probabilities
  // In a stage: of the 8 keys of this warp at steps 0 and 2 of the columns, and of its values.
  uint32_t k_lane[2];
  std::conditional_t<kHasCodes, CodeLane, LaneAddress<Config::columns / 8>> v_lane;

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
    // A lane has the columns 4 t to 4 t + 3 of 16 codes, which are a word.
#pragma unroll
    for (int d = 0; d < kCodeSteps; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at =
            smem + QueryLayout::offset(row(half), 2 * d + lane() % 4 / 2) + lane() % 2 * 8;
        q[d][half] = ptx::load_shared(at), q[d][2 + half] = ptx::load_shared(at + 4);
      }
    const LaneCoords at = lane_row_major(lane());
#pragma unroll
    for (int d = kCodeSteps; d < kDepth; ++d)
      ptx::ldmatrix_x4(q[d], smem + QueryLayout::offset(at.row, 2 * d + at.chunk));
  }

  // Adds a step in a stage that is full. `listed` is the word of its keys.
  __device__ __forceinline__ void add_step(const blockflash_scores& scores, uint32_t stage_smem,
                                           uint64_t listed) {
    turn ^= 1;
    float s[4];
    if constexpr (kHasCodes)
      multiply_codes(s, stage_smem);
    else
      multiply(s, stage_smem);
    cap_scores(s, scores);
    if (listed != ~uint64_t{0}) hide(s, listed);
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(s[2 * half], s[2 * half + 1]) * scores.scale_log2;
      grew |= largest > reference[half] + kAhead || may_be_beyond_fused(reference[half]);
    }
    float sums[2], subtract[2] = {reference[0], reference[1]};
    store_probabilities(s, stage_smem, scores.scale_log2, subtract, sums);
    if (ptx::named_barrier_or(Team::vote, Team::threads, grew)) {
      move_references(s, scores, subtract);
      store_probabilities(s, stage_smem, scores.scale_log2, subtract, sums);
      Team::sync();
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
    Team::sync();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += exchange.denominators[w][row(half)];
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

  // The same of codes: a chain for each part of the columns that has a scale.
  __device__ __forceinline__ void multiply_codes(float (&s)[4], uint32_t stage_smem) const {
    constexpr int kPartSteps = kCodeSteps / kParts;
    const uint32_t keys = stage_smem + k_lane[0];
    float parts[kParts][4] = {}, turned[4] = {};
    uint32_t nan = 0;
    // Two chains at a time: registers hold no more keys.
#pragma unroll
    for (int first = 0; first < kParts; first += 2)
#pragma unroll
      for (int d = 0; d < kPartSteps; d += 4) {
        uint32_t k[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
          ptx::ldmatrix_x4(k[n], keys + ((first + n) * kPartSteps + d) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            uint32_t b[2];
            nan |= nan_bits_e4m3(k[n][i]);
            widen_to_bf16<CodeOrder::kAdjacent>(k[n][i], b[0], b[1]);
            ptx::mma_m16n8k16<Element>(parts[first + n], q[(first + n) * kPartSteps + d + i], b[0],
                                       b[1]);
          }
      }
#pragma unroll
    for (int d = kCodeSteps; d < kDepth; d += 2) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, keys + CodeRow::turned_at + (d - kCodeSteps) * 32);
      ptx::mma_m16n8k16<Element>(turned, q[d], k[0], k[1]);
      ptx::mma_m16n8k16<Element>(turned, q[d + 1], k[2], k[3]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float scales[kParts];
      load_scales(scales, stage_smem, e);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = turned[2 * half + e];
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          sum = fmaf(parts[part][2 * half + e], nan_unless_finite(scales[part]), sum);
        s[2 * half + e] = sum;
      }
    }
    if (!__any_sync(~0u, nan != 0)) return;
    // The lanes 4 g to 4 g + 3 have read key g.
    const unsigned lanes = __ballot_sync(~0u, nan != 0);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (lanes >> (lane() % 4 * 8 + e * 4) & 15) s[e] = s[2 + e] = CUDART_NAN_F;
  }

  // The scales of this lane's key 2 t + e.
  static __device__ __forceinline__ void load_scales(float (&scales)[kParts], uint32_t stage_smem,
                                                     int e) {
    static_assert(!kHasCodes || kParts == 4, "the scales of a key are 16 bytes");
    const int4 words = ptx::load_shared_int4(
        stage_smem + CodeRow::scales_at + (warp() * 8 + lane() % 4 * 2 + e) * CodeRow::row_bytes);
    const int all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int part = 0; part < kParts; ++part) scales[part] = __int_as_float(all[part]);
  }

  // Hides the keys that are not listed or not seen from all rows. Their values are zeros, and all
  // rows see the others, so nothing is to be done about NaN.
  __device__ __forceinline__ void hide(float (&s)[4], uint64_t listed) const {
    const int thread = lane() % 4;
    // The keys 8 w + 2 t + e of warp w.
    const int loader = warp() % 2 * 2 + thread / 2, bit = warp() / 2 * 4 + thread % 2 * 2;
    const uint32_t bits = static_cast<uint32_t>(listed >> (loader * 16 + bit));
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(bits >> e & 1)) s[e] = s[2 + e] = -CUDART_INF_F;
  }

  // Probabilities of this warp's keys, and this lane's share of their sums.
  __device__ __forceinline__ void store_probabilities(const float (&s)[4], uint32_t stage_smem,
                                                      float scale_log2, const float (&subtract)[2],
                                                      float (&sums)[2]) const {
    float x[2][2], scales[2][kParts];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[half][e] = ptx::ex2_approx(fmaf(s[2 * half + e], scale_log2, -subtract[half]));
      sums[half] = x[half][0] + x[half][1];
    }
    if constexpr (kHasCodes)
#pragma unroll
      for (int e = 0; e < 2; ++e) load_scales(scales[e], stage_smem, e);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // A key without weight has none whatever its scale.
        const auto weight = [&](int e) {
          const float probability = x[half][e];
          return kHasCodes && probability > 0.f ? probability * scales[e][part] : probability;
        };
        uint8_t* const at = exchange.probabilities[turn][part] + row(half) * 128 +
                            (warp() ^ row(half) % 8) * 16 + lane() % 4 * 4;
        *reinterpret_cast<uint32_t*>(at) = Traits::pack(weight(0), weight(1));
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
    Team::sync();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = exchange.maxima[0][row(half)];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, exchange.maxima[w][row(half)]);
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
    const int part = warp() * kParts / kWarps;
    const uint32_t p_smem =
        static_cast<uint32_t>(__cvta_generic_to_shared(exchange.probabilities[turn][part]));
    const LaneCoords at = lane_row_major(lane());
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t p[4];
      ptx::ldmatrix_x4(p, p_smem + at.row * 128 + ((2 * step + at.chunk) ^ at.row % 8) * 16);
      multiply_values(p, stage_smem, step, v_lane);
    }
  }
  template <int chunks>
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[4], uint32_t stage_smem,
                                                  int step, const LaneAddress<chunks>& v_lane) {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, stage_smem + v_lane.at(step * 16, j / 2));
      ptx::mma_m16n8k16<Element>(o[j], p, v[0], v[1]);
      ptx::mma_m16n8k16<Element>(o[j + 1], p, v[2], v[3]);
    }
  }
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[4], uint32_t stage_smem,
                                                  int step, const CodeLane& v_lane) {
    add_code_values<Element>(o, p, stage_smem + step * 16 * CodeRow::row_bytes, v_lane);
  }
};

}  // namespace
}  // namespace blockflash

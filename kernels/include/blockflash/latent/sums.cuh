// The products and the online softmax of a CTA over steps of 16 keys, for 16 rows.
//
// A warp multiplies half of the columns of the queries with half of the keys, and the scores of all
// warps go through shared memory. Each warp then has all of them, and a quarter of the columns of
// the output.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/latent/code_products.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;

constexpr int kHalves = Config::warps / kSlices;             // of 8 keys each
constexpr int kWarpValues = Config::values / Config::warps;  // columns of the output of a warp
constexpr int kTiles = kWarpValues / 8;                      // and MMA tiles along them
static_assert(kHalves * 8 == kStepKeys, "a warp multiplies 8 keys");
static_assert(kWarpValues % 64 == 0, "LaneAddress repeats from the first column of a warp on");
static_assert(!kHasCodes || kWarpValues == CodeRow::of_scale, "values of a warp have one scale");

// Scores of a step, as each warp leaves them: of the four elements of a lane the rows g, g, g + 8
// and g + 8, with g = lane / 4. Two steps take turns.
using Exchange = float4[2][kSlices][kHalves][kWarpSize];

// Which keys of a step are listed and seen: a bit for each of the four rows that a warp copies, in
// a byte for each warp. Hides the others from all rows. Their values are zeros, and all rows see
// the keys that remain, so nothing else is to be done about NaN.
__device__ __forceinline__ void hide_unlisted(float (&s)[kHalves][4], uint32_t listed, int lane) {
  if (listed == 0x0f0f0f0f) return;
#pragma unroll
  for (int keys = 0; keys < kHalves; ++keys)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = keys * 8 + lane % 4 * 2 + e;
      if (!(listed >> (key / 4 * 8 + key % 4) & 1)) s[keys][e] = s[keys][2 + e] = -CUDART_INF_F;
    }
}

// Adds p·v for the columns of a warp.
template <int chunks>
__device__ __forceinline__ void add_values(float (&o)[kTiles][4],
                                           const uint32_t (&probabilities)[4], uint32_t stage_smem,
                                           const LaneAddress<chunks>& v_lane) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) {
    uint32_t v[4];
    ptx::ldmatrix_x4_trans(v, stage_smem + v_lane.at(0, j / 2));
    ptx::mma_m16n8k16<Element>(o[j], probabilities, v[0], v[1]);
    ptx::mma_m16n8k16<Element>(o[j + 1], probabilities, v[2], v[3]);
  }
}

// Lane (g, t) = (lane / 4, lane % 4) holds the columns 8 j + 2 t + e of the rows g and g + 8, in
// o[j][2 half + e]; of codes, the columns 16 (j / 2) + 4 t + 2 e + j % 2.
struct Sums {
  static constexpr bool kHasCodes = blockflash::kHasCodes;
  static constexpr int kTiles = blockflash::kTiles;

  uint32_t q[kSliceSteps][4];
  float o[kTiles][4];
  float reference[2];    // log2 units, of a row; all warps have the same
  float denominator[2];  // this lane's share
  // In a stage: of the 8 keys of this warp at steps 0 and 2 of its columns, and of its values.
  uint32_t k_lane[2];
  std::conditional_t<kHasCodes, CodeLane, LaneAddress<kHasCodes ? 4 : kChunks>> v_lane;

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int slice() { return warp() / kHalves; }
  static __device__ __forceinline__ int half_of_keys() { return warp() % kHalves; }

  __device__ __forceinline__ Sums()
      : v_lane(warp() * kWarpValues * 2, lane_row_major(lane()).row, lane_row_major(lane()).chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      k_lane[i] = TileLayout::offset(half_of_keys() * 8 + lane() % 8,
                                     slice() * kSliceChunks + 4 * i + lane() / 8);
  }

  // Takes a part of the queries from a stage.
  __device__ __forceinline__ void load_queries(uint32_t stage_smem, int part) {
    if constexpr (kHasCodes) {
      if (slice() == part) load_code_queries<CodeRow>(q, stage_smem, lane());
    } else {
      const LaneCoords at = lane_row_major(lane());
#pragma unroll
      for (int d = 0; d < kSliceSteps; ++d)
        ptx::ldmatrix_x4(q[d], stage_smem + TileLayout::offset(
                                                at.row, slice() * kSliceChunks + 2 * d + at.chunk));
    }
  }

  __device__ __forceinline__ void begin_item() {
#pragma unroll
    for (int half = 0; half < 2; ++half) reference[half] = kNoReference, denominator[half] = 0.f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = 0.f;
  }

  // Adds the step in a stage that all threads see. `meet` is a barrier, behind which no thread
  // reads what was read before. With lists `keys_of_step` tells which keys are seen, otherwise it
  // is the first key.
  template <class Meet>
  __device__ __forceinline__ void add_step(const blockflash_attention_decode_params& p,
                                           const DecodeItem& item, Exchange& exchange, int parity,
                                           uint32_t stage_smem, int keys_of_step,
                                           const Meet& meet) {
    if (Config::has_lists && keys_of_step == 0) return meet();
    float4& partial = exchange[parity][slice()][half_of_keys()][lane()];
    if constexpr (kHasCodes)
      partial = multiply_codes<CodeRow>(q, stage_smem, slice(), half_of_keys(), lane());
    else
      partial = multiply(stage_smem);
    meet();
    // Keys 2 t + e of the first half, in s[0], and of the second one.
    float s[kHalves][4];
#pragma unroll
    for (int keys = 0; keys < kHalves; ++keys) {
      const float4 a = exchange[parity][0][keys][lane()], b = exchange[parity][1][keys][lane()];
      s[keys][0] = a.x + b.x, s[keys][1] = a.y + b.y;
      s[keys][2] = a.z + b.z, s[keys][3] = a.w + b.w;
    }
    cap_scores(s, p.scores);
    if constexpr (Config::has_lists)
      hide_unlisted(s, keys_of_step, lane());
    else if (keys_of_step < item.all.begin || keys_of_step + kStepKeys > item.all.end)
      mask_step(p, item, s, stage_smem, keys_of_step);
    float subtract[2];
    move_references(s, p.scores, subtract);
    uint32_t probabilities[4];
#pragma unroll
    for (int keys = 0; keys < kHalves; ++keys)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          x[e] = ptx::ex2_approx(fmaf(s[keys][2 * half + e], p.scores.scale_log2, -subtract[half]));
        denominator[half] += x[0] + x[1];
        if constexpr (kHasCodes) weigh<CodeRow>(x, stage_smem, keys * 8 + lane() % 4 * 2, warp());
        probabilities[2 * keys + half] = Traits::pack(x[0], x[1]);
      }
    add_values(o, probabilities, stage_smem, v_lane);
  }

 private:
  // The part of a step's scores that is this warp's. Two chains of products, since one after
  // another they would take longer than anything else.
  __device__ __forceinline__ float4 multiply(uint32_t stage_smem) const {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int d = 0; d < kSliceSteps; d += 2) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, stage_smem + k_lane[d / 2 % 2] + d / 4 * 128);
      ptx::mma_m16n8k16<Element>(even, q[d], k[0], k[1]);
      ptx::mma_m16n8k16<Element>(odd, q[d + 1], k[2], k[3]);
    }
    return make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
  }

  // A reference moves when a score of its own row exceeds it, so that a key with nearly all the
  // weight has a probability of 1, which no rounding changes. Other rows have no say in it.
  // `subtract` takes its place in the exponents, where large scores are changed.
  __device__ __forceinline__ void move_references(float (&s)[kHalves][4],
                                                  const blockflash_scores& scores,
                                                  float (&subtract)[2]) {
    float largest[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]),
                            fmaxf(s[1][2 * half], s[1][2 * half + 1])) *
                      scores.scale_log2;
      subtract[half] = reference[half];
      grew |= largest[half] > reference[half] || may_be_beyond_fused(reference[half]);
    }
    if (!__any_sync(~0u, grew)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float moved = fmaxf(quad_max(largest[half]), reference[half]);
      const float rescale = ptx::ex2_approx(reference[half] - moved);
      reference[half] = subtract[half] = moved;
      denominator[half] *= rescale;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) o[j][2 * half] *= rescale, o[j][2 * half + 1] *= rescale;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_beyond_fused(reference[half])) continue;
      subtract[half] = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[i / 2][2 * half + i % 2];
        x = with_rounded_product(x, scores.scale_log2, scores.inverse_scale_log2, reference[half],
                                 0.f);
      }
    }
  }

  // Hides keys from rows. A NaN or infinity among the values reaches all rows of a product, also
  // those whose probability for its key is 0. Such values are therefore added here to the rows that
  // attend to them, and then removed: of a step whose scores are complete, a warp alone reads its
  // columns.
  __device__ __forceinline__ void mask_step(const blockflash_attention_decode_params& p,
                                            const DecodeItem& item, float (&s)[kHalves][4],
                                            uint32_t stage_smem, int first_key) {
    const int lane = ptx::opaque(Sums::lane());  // rare, so nothing of it stays in registers
    const AttentionMask mask = DecodeSequence::mask(p, item.q_length, item.kv_length);
    KeyRange visible[2];  // relative to the first key
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.row_tile * Config::rows + accumulator_row(lane, 2 * half);
      const KeyRange keys = mask.keys_of(small_quotient(row, p.group));
      visible[half] = {keys.begin - first_key, keys.end - first_key};
    }
    const auto sees = [&](int half, int key) {
      return key >= visible[half].begin && key < visible[half].end;
    };
#pragma unroll
    for (int keys = 0; keys < kHalves; ++keys)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!sees(i / 2, keys * 8 + accumulator_column(lane, i))) s[keys][i] = -CUDART_INF_F;
    if (kHasCodes) return;  // they are widened to finite values, and their scores tell of NaN

    const auto chunk_at = [&](int key, int chunk) {
      return stage_smem + TileLayout::offset(key, warp() * (kWarpValues / 8) + chunk);
    };
    bool found = false;
#pragma unroll 1
    for (int i = lane; i < kStepKeys * kTiles; i += kWarpSize) {
      const int4 words = ptx::load_shared_int4(chunk_at(i / kTiles, i % kTiles));
      for (uint32_t word : {words.x, words.y, words.z, words.w})
        found |= is_nonfinite<Element>(word) || is_nonfinite<Element>(word >> 16);
    }
    if (!__any_sync(~0u, found)) return;
#pragma unroll 1
    for (int key = 0; key < kStepKeys; ++key) {
      const bool of_row[2] = {sees(0, key), sees(1, key)};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint32_t pair = ptx::load_shared(chunk_at(key, j) + lane % 4 * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t bits = static_cast<uint16_t>(pair >> (i % 2 * 16));
          const bool counts = of_row[i / 2] && is_nonfinite<Element>(bits);
          o[j][i] += counts ? Traits::to_float(bits) : 0.f;
        }
      }
    }
    __syncwarp();  // all have read the values before they are changed
#pragma unroll 1
    for (int i = lane; i < kStepKeys * kTiles * 4; i += kWarpSize) {
      const uint32_t at = chunk_at(i / (kTiles * 4), i / 4 % kTiles) + i % 4 * 4;
      uint32_t pair = ptx::load_shared(at);
      if (is_nonfinite<Element>(pair)) pair &= 0xFFFF0000;
      if (is_nonfinite<Element>(pair >> 16)) pair &= 0xFFFF;
      ptx::store_shared(at, pair);
    }
    __syncwarp();
  }
};

}  // namespace
}  // namespace blockflash

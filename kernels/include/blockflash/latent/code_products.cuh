// The products over rows of codes. Codes are widened in registers to bf16, which holds them
// exactly, and so do its products with queries of bf16 in f32. Scales multiply the scores of 128
// columns, and the probabilities of the warp that has these columns of the output.
#pragma once

#include "blockflash/latent/loader.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {
namespace {

constexpr int kSlices = 2;                                   // of the columns of keys, of this many
constexpr int kSliceSteps = Config::columns / kSlices / 16;  // steps of 16 columns,
constexpr int kSliceChunks = kHasCodes ? CodeRow::codes / kSlices / 16  // and 16-byte chunks,
                                       : kSliceSteps * 2;               // of codes alone
static_assert(kSliceChunks % 4 == 0, "ldmatrix loads four chunks");
static_assert(!kHasCodes || kQueryParts == kSlices, "a slice has a part of the queries");
constexpr int kCodeSteps = kHasCodes ? kSliceChunks : 0;  // of 16 codes
static_assert(!kHasCodes || kSliceSteps == kCodeSteps + 2, "two steps of turned columns");

// Of 16 columns, a lane has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in a fragment, and of codes, four of
// which are a word, 4 t to 4 t + 3. So that is the order of the queries.
template <class Row>
__device__ __forceinline__ void load_code_queries(uint32_t (&q)[kSliceSteps][4],
                                                  uint32_t stage_smem, int lane) {
#pragma unroll
  for (int d = 0; d < kCodeSteps; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = stage_smem + Row::offset(lane / 4 + 8 * half, 2 * d) + lane % 4 * 8;
      q[d][half] = ptx::load_shared(at), q[d][2 + half] = ptx::load_shared(at + 4);
    }
  const LaneCoords lane_at = lane_row_major(lane);
#pragma unroll
  for (int d = kCodeSteps; d < kSliceSteps; ++d)
    ptx::ldmatrix_x4(q[d], stage_smem + Row::offset(lane_at.row, 2 * d + lane_at.chunk));
}

// The part of a step's scores that is a warp's: of half of the columns and half of the keys.
template <class Row>
__device__ __forceinline__ float4 multiply_codes(const uint32_t (&q)[kSliceSteps][4],
                                                 uint32_t stage_smem, int slice, int half_of_keys,
                                                 int lane) {
  constexpr int kGroups = Row::codes / Row::of_scale / kSlices;  // with a scale each
  constexpr int kGroupSteps = kCodeSteps / kGroups;
  float scales[2][kGroups];  // of the keys 2 t + e
  static_assert(kGroups == 2, "two scales are loaded at once");
#pragma unroll
  for (int e = 0; e < 2; ++e)
    ptx::load_shared_float2(scales[e], stage_smem +
                                           (half_of_keys * 8 + lane % 4 * 2 + e) * Row::row_bytes +
                                           Row::scales_at + slice * kGroups * 4);
  const uint32_t keys = stage_smem + Row::offset(half_of_keys * 8 + lane % 8, lane / 8);
  float s[4] = {};
  uint32_t nan = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    // Two chains of products, since one after another they would take longer than anything else.
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int d = group * kGroupSteps; d < (group + 1) * kGroupSteps; d += 4) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, keys + (slice * kSliceChunks + d) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t b[2];
        nan |= nan_bits_e4m3(k[i]);
        widen_to_bf16<CodeOrder::kAdjacent>(k[i], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(i % 2 ? odd : even, q[d + i], b[0], b[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[i] = fmaf(even[i] + odd[i], nan_unless_finite(scales[i % 2][group]), s[i]);
  }
  uint32_t k[4];
  ptx::ldmatrix_x4(k, keys + Row::turned_at + slice * (Row::turned * 2 / kSlices));
  ptx::mma_m16n8k16<Element>(s, q[kCodeSteps], k[0], k[1]);
  ptx::mma_m16n8k16<Element>(s, q[kCodeSteps + 1], k[2], k[3]);
  if (__any_sync(~0u, nan != 0)) {
    // The lanes 4 g to 4 g + 3 have read key g.
    const unsigned lanes = __ballot_sync(~0u, nan != 0);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (lanes >> (lane % 4 * 8 + e * 4) & 15) s[e] = s[e + 2] = CUDART_NAN_F;
  }
  return make_float4(s[0], s[1], s[2], s[3]);
}

// The probabilities of two keys, times the scales of a warp's values. A key without weight has none
// whatever its scale.
template <class Row>
__device__ __forceinline__ void weigh(float (&x)[2], uint32_t stage_smem, int key, int warp) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const uint32_t at = stage_smem + (key + e) * Row::row_bytes + Row::scales_at + warp * 4;
    const float scaled = x[e] * __uint_as_float(ptx::load_shared(at));
    x[e] = x[e] > 0.f ? scaled : x[e];
  }
}

// Adds p·v for the columns of a warp.
template <int tiles>
__device__ __forceinline__ void add_values(float (&o)[tiles][4], const uint32_t (&probabilities)[4],
                                           uint32_t stage_smem, const CodeLane& v_lane) {
  // The order of the sum of an address, so that images of both kinds keep their GPU passes.
  if constexpr (kHasIndex) {
    const CodeLane own = v_lane;
    add_code_values<Element>(o, probabilities, stage_smem, own);
  } else {
    add_code_values<Element>(o, probabilities, stage_smem, v_lane);
  }
}

}  // namespace
}  // namespace blockflash

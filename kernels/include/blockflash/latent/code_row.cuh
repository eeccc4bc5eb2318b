// Rows of codes of a latent cache, and their codes in registers.
#pragma once

#include "blockflash/mma/codes.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/math.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/permute.cuh"

namespace blockflash {
namespace {

// A row of codes: of the values, then a scale for each 128 of them, then what is turned.
struct CodeRow {
  static constexpr int codes = 512, of_scale = 128, turned = 64;
  static constexpr int scales_at = codes, turned_at = scales_at + codes / of_scale * 4;
  static constexpr int row_bytes = turned_at + turned * 2;
  static_assert(row_bytes / 16 % 2 == 1, "eight rows side by side are in all groups of banks");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * row_bytes + chunk * 16;
  }
};

// Four codes of e4m3 as two pairs of bf16, numbers in place of NaN. The bits of a code, behind its
// sign, are those of a bf16 whose exponent is too small by the difference of the biases, 120, also
// where it is subnormal.
template <CodeOrder order>
__device__ __forceinline__ void widen_to_bf16(uint32_t x, uint32_t& low, uint32_t& high) {
  constexpr bool adjacent = order == CodeOrder::kAdjacent;
  constexpr uint32_t factor = 0x7b807b80, minus_zero = 0x80008000;
  const uint32_t first = ptx::permute_bytes(x, 0, adjacent ? 0x1404 : 0x2404);
  const uint32_t second = ptx::permute_bytes(x, 0, adjacent ? 0x3424 : 0x3414);
  low = first & 0x80008000 | first >> 4 & 0x07f007f0;
  high = second & 0x80008000 | second >> 4 & 0x07f007f0;
  low = ptx::fma_bf16x2(low, factor, minus_zero);
  high = ptx::fma_bf16x2(high, factor, minus_zero);
}

// Where a lane reads values.
struct CodeLane {
  uint32_t at;

  __device__ __forceinline__ CodeLane(uint32_t warp_offset, int row, int chunk)
      // Columns of bf16 are twice as many bytes.
      : at(warp_offset / 2 + CodeRow::offset(row, chunk)) {}
};

// A scale as a factor of scores. Infinity times codes of both signs is NaN.
__device__ __forceinline__ float nan_unless_finite(float scale) { return scale + (scale - scale); }

// Adds p·v for the columns of a warp.
template <class Element, int tiles>
__device__ __forceinline__ void add_code_values(float (&o)[tiles][4],
                                                const uint32_t (&probabilities)[4],
                                                uint32_t stage_smem, const CodeLane& v_lane) {
#pragma unroll
  for (int j = 0; j < tiles; j += 4) {
    uint32_t v[4];
    ptx::ldmatrix_x4_trans(v, stage_smem + v_lane.at + j / 2 * 16);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint32_t even[2], odd[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        widen_to_bf16<CodeOrder::kAlternate>(v[2 * chunk + half], even[half], odd[half]);
      ptx::mma_m16n8k16<Element>(o[j + 2 * chunk], probabilities, even[0], even[1]);
      ptx::mma_m16n8k16<Element>(o[j + 2 * chunk + 1], probabilities, odd[0], odd[1]);
    }
  }
}

}  // namespace
}  // namespace blockflash

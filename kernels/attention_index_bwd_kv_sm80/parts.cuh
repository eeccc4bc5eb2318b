// What a CTA leaves: parts of dq of its rows, and dk and dv of its keys, or their parts.
#pragma once

#include "blockflash/attention/gradient.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/global.cuh"

namespace blockflash {
namespace {

// The factor, a power of two, that takes the largest of some numbers below 2^14, and its inverse.
// The f16 that numbers become then keep 11 bits over 28 binades. An infinity stays one.
struct HalfFactor {
  float factor, inverse;

  explicit __device__ __forceinline__ HalfFactor(float largest) {
    // The exponents of both, biased by 127, must be in [1, 254].
    const int exponent = max(min(static_cast<int>(__float_as_uint(largest) >> 23), 254), 14);
    factor = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
    inverse = __uint_as_float(static_cast<uint32_t>(exponent - 13) << 23);
  }
};

// Stores rows of dq, in columns from `column0` on, as f16 and factors.
template <int m_tiles, int n_tiles>
__device__ __forceinline__ void store_dq_part(const float (&acc)[m_tiles][n_tiles][4],
                                              uint16_t* parts, float* factors, int factor_stride,
                                              int row0, int rows, int column0, int columns,
                                              int lane) {
  static_assert(n_tiles % 4 == 0, "four MMA tiles are stored at a time");
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0.f;
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
        largest = fmaxf(largest, fmaxf(fabsf(acc[m][n][2 * half]), fabsf(acc[m][n][2 * half + 1])));
      const HalfFactor scaled(quad_max(largest));
      const int row = row0 + m * 16 + accumulator_row(lane, 2 * half);
      uint16_t* const out = parts + static_cast<int64_t>(row) * columns;
      if (row < rows && lane % 4 == 0)
        factors[static_cast<int64_t>(row) * factor_stride] = scaled.inverse;
#pragma unroll
      for (int d = 0; d < n_tiles; d += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          piece[i] = ElementTraits<__half>::pack(acc[m][d + i][2 * half] * scaled.factor,
                                                 acc[m][d + i][2 * half + 1] * scaled.factor);
        quad_transpose(piece, lane);
        const int column = column0 + (d + (lane & 3)) * 8;
        if (row < rows && column < columns) ptx::store_16_bytes(out + column, piece);
      }
    }
}

// Visits the accumulators of a warp in an f32 tile of `columns` columns, two at a time.
template <int m_tiles, int n_tiles, class Visit>
__device__ __forceinline__ void each_pair(float (&acc)[m_tiles][n_tiles][4], float* tile,
                                          int columns, int row0, int column0, int lane,
                                          Visit visit) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const int row = row0 + m * 16 + accumulator_row(lane, 2 * half);
        float* const at = tile + row * columns + column0 + n * 8 + accumulator_column(lane, 0);
        visit(reinterpret_cast<float2&>(*at), acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      }
}

}  // namespace
}  // namespace blockflash

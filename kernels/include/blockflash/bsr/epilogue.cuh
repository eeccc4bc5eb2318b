// Epilogue of BSR matmul: alpha, beta, bias, activation, and 16-byte stores of C.
//
// The accumulators go through shared memory in slices of 16 rows × slice_n columns per warp. Whole
// rows come out, so that loads and stores of C are 16 bytes wide and the epilogue is one short loop
// instead of being unrolled over the accumulators.
#pragma once

#include <type_traits>

#include "blockflash/bsr/activation.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/mma/staging.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/global.cuh"

namespace blockflash {
namespace {

__device__ __forceinline__ float load_c(const blockflash_bsr_matmul_params& p, int64_t at) {
  if (p.c_dtype == BLOCKFLASH_DTYPE_F32) return static_cast<const float*>(p.c)[at];
  const uint16_t bits = static_cast<const uint16_t*>(p.c)[at];
  return p.c_dtype == BLOCKFLASH_DTYPE_F16 ? ElementTraits<__half>::to_float(bits)
                                           : ElementTraits<__nv_bfloat16>::to_float(bits);
}

__device__ __forceinline__ float load_bias(const blockflash_bsr_matmul_params& p, int64_t at) {
  return ElementTraits<BsrMatmulElement>::to_float(static_cast<const uint16_t*>(p.bias)[at]);
}

// The whole epilogue except for alpha, for the first `count` of eight neighbouring values of C from
// `at` on. The bias of the first one is at `bias_at`, and of each next one `bias_step` further.
__device__ __forceinline__ void apply_epilogue(const blockflash_bsr_matmul_params& p, float (&x)[8],
                                               int64_t at, int64_t bias_at, int bias_step,
                                               int count) {
  if (p.beta != 0.f) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) x[i] += p.beta * load_c(p, at + i);
  }
  if (p.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) x[i] += load_bias(p, bias_at + i * bias_step);
  }
  const auto each = [&](auto activation) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = activate(x[i], activation);
  };
  switch (p.activation) {
    case BLOCKFLASH_ACTIVATION_RELU:
      return each(std::integral_constant<int, BLOCKFLASH_ACTIVATION_RELU>());
    case BLOCKFLASH_ACTIVATION_GELU:
      return each(std::integral_constant<int, BLOCKFLASH_ACTIVATION_GELU>());
    case BLOCKFLASH_ACTIVATION_SILU:
      return each(std::integral_constant<int, BLOCKFLASH_ACTIVATION_SILU>());
  }
}

// Stores the first `count` of eight neighbouring values of C.
__device__ __forceinline__ void store_piece(const blockflash_bsr_matmul_params& p,
                                            const float (&x)[8], int64_t at, int count) {
  if (p.c_dtype == BLOCKFLASH_DTYPE_F32) {
    float* const c = static_cast<float*>(p.c) + at;
    if (p.c_vectorized && count == 8) {
      reinterpret_cast<float4*>(c)[0] = make_float4(x[0], x[1], x[2], x[3]);
      reinterpret_cast<float4*>(c)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < count) c[i] = x[i];
    }
    return;
  }
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack(p.c_dtype, x[2 * i], x[2 * i + 1]);
  uint16_t* const c = static_cast<uint16_t*>(p.c) + at;
  if (p.c_vectorized && count == 8) {
    ptx::store_16_bytes(c, packed);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) c[i] = static_cast<uint16_t>(packed[i / 2] >> (i % 2 * 16));
  }
}

// Stores the part of one slice that is inside of C, a piece of a row per lane and round. The slice
// begins at row at_row and column at_column of C.
template <int slice_n, int slice_stride, bool plain>
__device__ __forceinline__ void store_slice(const blockflash_bsr_matmul_params& p,
                                            const float* slice, int64_t at_row, int64_t at_column,
                                            int lane) {
  constexpr int kRounds = 16 * slice_n / (8 * kWarpSize);
#pragma unroll(plain ? kRounds : 1)
  for (int round = 0; round < kRounds; ++round) {
    const int i = round * kWarpSize + lane;
    const int in_row = i / (slice_n / 8), in_column = i % (slice_n / 8) * 8;
    const int64_t row = at_row + in_row, column = at_column + in_column;
    if (row >= p.m || column >= p.n) continue;
    float x[8];
    *reinterpret_cast<float4*>(x) =
        *reinterpret_cast<const float4*>(slice + in_row * slice_stride + in_column);
    *reinterpret_cast<float4*>(x + 4) =
        *reinterpret_cast<const float4*>(slice + in_row * slice_stride + in_column + 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= p.alpha;
    const int count = static_cast<int>(min(p.n - column, static_cast<int64_t>(8)));
    if constexpr (!plain)
      apply_epilogue(p, x, row * p.ldc + column, p.bias_per_row ? row : column, !p.bias_per_row,
                     count);
    store_piece(p, x, row * p.ldc + column, count);
  }
}

// Not inlined: one copy per slice would be most of the kernel.
template <int slice_n, int slice_stride>
__device__ __noinline__ void store_slice_with_epilogue(const blockflash_bsr_matmul_params& p,
                                                       const float* slice, int64_t at_row,
                                                       int64_t at_column, int lane) {
  store_slice<slice_n, slice_stride, false>(p, slice, at_row, at_column, lane);
}

// Applies the epilogue to 16·m_tiles rows × 8·n_tiles columns of a warp and stores them, from
// accumulators in the layout of MMA (mma/fragment.cuh). `slice`: 16 rows of slice_stride floats
// that belong to the warp.
template <int slice_n, int slice_stride, int m_tiles, int n_tiles>
__device__ __forceinline__ void store_tile(const blockflash_bsr_matmul_params& p,
                                           const float (&acc)[m_tiles][n_tiles][4], float* slice,
                                           int64_t first_row, int64_t first_column, int lane) {
  static_assert(8 * n_tiles % slice_n == 0 && 16 * slice_n % (8 * kWarpSize) == 0,
                "slices divide among columns, and among the lanes");
  const bool plain =
      p.beta == 0.f && p.bias == nullptr && p.activation == BLOCKFLASH_ACTIVATION_NONE;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n0 = 0; n0 < n_tiles; n0 += slice_n / 8) {
      fill_slice<slice_n, slice_stride>(acc[m], n0, slice, lane);
      __syncwarp();
      if (plain)
        store_slice<slice_n, slice_stride, true>(p, slice, first_row + m * 16,
                                                 first_column + n0 * 8, lane);
      else
        store_slice_with_epilogue<slice_n, slice_stride>(p, slice, first_row + m * 16,
                                                         first_column + n0 * 8, lane);
      __syncwarp();
    }
}

// The epilogue straight from registers for the most common case: C of the type of A, alpha only,
// whole pieces of 32 columns. The four lanes of a row exchange words, so that each stores eight
// columns. Returns false and stores nothing in any other case.
template <int n_tiles>
__device__ __forceinline__ bool store_tile_directly(const blockflash_bsr_matmul_params& p,
                                                    const float (&acc)[n_tiles][4],
                                                    int64_t first_row, int64_t first_column,
                                                    int lane) {
  static_assert(n_tiles % 4 == 0, "pieces of 32 columns");
  using Traits = ElementTraits<BsrMatmulElement>;
  constexpr int kDtype =
      std::is_same_v<BsrMatmulElement, __half> ? BLOCKFLASH_DTYPE_F16 : BLOCKFLASH_DTYPE_BF16;
  const bool plain =
      p.beta == 0.f && p.bias == nullptr && p.activation == BLOCKFLASH_ACTIVATION_NONE;
  if (!plain || p.c_dtype != kDtype || !p.c_vectorized || first_column + 8 * n_tiles > p.n)
    return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + accumulator_row(lane, 0) + 8 * half;
    uint16_t* const c = static_cast<uint16_t*>(p.c) + row * p.ldc + first_column + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < n_tiles; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = Traits::pack(acc[n + i][2 * half] * p.alpha, acc[n + i][2 * half + 1] * p.alpha);
      quad_transpose(words, lane % 4);
      if (row < p.m) ptx::store_16_bytes(c + n * 8, words);
    }
  }
  return true;
}

}  // namespace
}  // namespace blockflash

// Queries beside a cache of codes: as f16 in the order of the codes' fragments, each row times a
// power of two.
#pragma once

#include "blockflash/mma/codes.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {

// What CTAs of kernels for codes have in shared memory behind `Shared`.
struct CodesShared {
  float2 scales[2];  // of K and of V for item n in slot n % 2, unless keys have their own
  alignas(8) float factor[Config::rows];  // of the scores of a row
  float v_scale;                          // of all keys, 1 if they have their own
  int unused;
  float2 logs[Config::warps][Config::rows];  // reference and denominator
};

// A scale of K. Infinity times codes of both signs is NaN.
__device__ __forceinline__ float nan_unless_finite(float scale) { return scale + (scale - scale); }

// Starts the copy of the scales of an item, as a part of the group that is committed next.
__device__ __forceinline__ void copy_scales(const blockflash_attention_decode_params& p,
                                            const DecodeItem& item, const float2& to) {
  const blockflash_cache_scales& scales = with_scales(p).scales;
  const uint32_t to_smem = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
  const auto start = [&](unsigned of_thread, const float* from, int64_t of_sequence,
                         int64_t of_head) {
    if (threadIdx.x == of_thread && from != nullptr)
      ptx::cp_async_ca_4_or_zero(to_smem + of_thread * 4,
                                 from + item.sequence * of_sequence + head_of_keys(item) * of_head,
                                 true);
  };
  start(0, scales.k, scales.k_stride_sequence, scales.k_stride_head);
  start(1, scales.v, scales.v_stride_sequence, scales.v_stride_head);
}

// Of 16 columns, a lane of a fragment of Q has 2t, 2t + 1, 2t + 8 and 2t + 9, and of codes, four of
// which are a word, 4t to 4t + 3. So that is the order of the queries.
//
// Rows are scaled until the largest element is below 2^16, and just below: bf16 has numbers that
// f16 has not. That is exact but for elements below 2^-39 of the largest, and for rows of very
// small numbers. By all threads, which have met and then meet again.
template <int codes>
__device__ __forceinline__ void convert_queries(const blockflash_attention_decode_params& p,
                                                unsigned char* q_tile, float k_scale,
                                                float* factors) {
  static_assert(Config::rows * kDSteps % kWarpSize == 0 && kWarpSize % kDSteps == 0,
                "whole warps convert, and the lanes of a row are neighbours");
  constexpr int kMostShift = 40;  // beyond it numbers would leave f32
  const bool is_bf16 = with_scales(p).q_dtype == BLOCKFLASH_DTYPE_BF16;
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::rows * kDSteps; i += Config::threads) {
    const int row = i / kDSteps, d = i % kDSteps;
    uint4* const chunks[] = {reinterpret_cast<uint4*>(q_tile + QLayout::offset(row, 2 * d)),
                             reinterpret_cast<uint4*>(q_tile + QLayout::offset(row, 2 * d + 1))};
    const uint4 first = *chunks[0], second = *chunks[1];
    const uint32_t words[] = {first.x,  first.y,  first.z,  first.w,
                              second.x, second.y, second.z, second.w};
    float x[16], largest = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
      x[j] = is_bf16 ? ElementTraits<__nv_bfloat16>::to_float(bits)
                     : ElementTraits<__half>::to_float(bits);
      largest = fmaxf(largest, fabsf(x[j]));
    }
#pragma unroll
    for (int distance = 1; distance < kDSteps; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const int exponent = (__float_as_int(largest) >> 23) - 127;
    const int shift = min(15 - exponent, kMostShift);
    const auto power = [](int of_two) { return __int_as_float((of_two + 127) << 23); };
    uint32_t y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      y[j] = ElementTraits<__half>::pack(x[2 * j] * power(shift), x[2 * j + 1] * power(shift));
    *chunks[0] = make_uint4(y[0], y[2], y[4], y[6]);
    *chunks[1] = make_uint4(y[1], y[3], y[5], y[7]);
    if (d == 0) factors[row] = power(-shift) * Codes<codes>::kUnit * nan_unless_finite(k_scale);
  }
}

}  // namespace
}  // namespace blockflash

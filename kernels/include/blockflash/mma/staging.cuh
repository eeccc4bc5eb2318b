// Staging of accumulators whose type in memory is known at run time: slices of 16 rows of a warp in
// shared memory, from which whole rows are read.
#pragma once

#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/base.h"

namespace blockflash {
namespace {

// Packs two neighbours in one of the 16-bit types.
__device__ __forceinline__ uint32_t pack(int dtype, float low, float high) {
  return dtype == BLOCKFLASH_DTYPE_F16 ? ElementTraits<__half>::pack(low, high)
                                       : ElementTraits<__nv_bfloat16>::pack(low, high);
}

// Writes the accumulators of 16 rows × slice_n columns, from tile n0 on, to the slice, whose rows
// are slice_stride floats apart.
template <int slice_n, int slice_stride, int n_tiles>
__device__ __forceinline__ void fill_slice(const float (&acc)[n_tiles][4], int n0, float* slice,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < slice_n / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(slice + accumulator_row(lane, 2 * half) * slice_stride + n * 8 +
                                 accumulator_column(lane, 0)) =
          make_float2(acc[n0 + n][2 * half], acc[n0 + n][2 * half + 1]);
}

}  // namespace
}  // namespace blockflash

// What the configurations of all kernels have in common. A file of this folder turns the VARIANT_*
// macros of the kernels of one operation into constexpr structs; no file elsewhere reads them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "blockflash/params/base.h"

namespace blockflash {

template <int dtype>
struct ElementOf;
template <>
struct ElementOf<BLOCKFLASH_DTYPE_F16> {
  using type = __half;
};
template <>
struct ElementOf<BLOCKFLASH_DTYPE_BF16> {
  using type = __nv_bfloat16;
};

constexpr int kWarpSize = 32;

}  // namespace blockflash

// The head of a kernel definition: its name and resources come from the row.
#define BLOCKFLASH_KERNEL \
  extern "C" __global__ void __launch_bounds__(VARIANT_THREADS, VARIANT_MIN_BLOCKS) VARIANT_SYMBOL

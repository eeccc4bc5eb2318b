// Activations of the matmul epilogue, in f32.
#pragma once

#include "blockflash/params/bsr.h"

namespace blockflash {

__device__ __forceinline__ float activate(float x, int activation) {
  switch (activation) {
    case BLOCKFLASH_ACTIVATION_RELU:
      return x < 0.f ? 0.f : x;  // keeps NaN
    case BLOCKFLASH_ACTIVATION_GELU:
      return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
    case BLOCKFLASH_ACTIVATION_SILU:
      return __fdividef(x, 1.f + __expf(-x));
    default:
      return x;
  }
}

}  // namespace blockflash

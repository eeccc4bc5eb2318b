// The maximum that does not lose NaN (sm_80).
#pragma once

namespace blockflash::ptx {

// NaN if one of both is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

}  // namespace blockflash::ptx

// L2 eviction policies (sm_80) for copies that take one.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Normal, or evicted before everything else.
__device__ __forceinline__ uint64_t evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace blockflash::ptx

// Several arrivals at an mbarrier (sm_90) at once. PTX ISA, "Parallel synchronization".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

__device__ __forceinline__ void mbarrier_arrive_many(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

}  // namespace blockflash::ptx

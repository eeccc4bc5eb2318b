// Copies by cp.async that complete a phase of an mbarrier, on Hopper.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Arrives at an mbarrier (sm_90) when all copies that this thread has started are complete.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace blockflash::ptx

// cp.async.mbarrier.arrive (sm_80): copies that do not belong to the bulk units arrive at an mbarrier. PTX ISA, "Parallel synchronization".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Arrives at an mbarrier, which counts this arrival, when all copies that this thread has started are complete.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace blockflash::ptx

// Special registers.
#pragma once

#include <cstdint>

namespace blockflash::ptx {

// SM identifiers of the GPU: at least as many as it has SMs.
__device__ __forceinline__ uint32_t multiprocessor_ids() {
  uint32_t count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return count;
}

}  // namespace blockflash::ptx

// A named barrier that also votes (bar.red). PTX ISA, "Parallel synchronization".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Waits until `threads` threads have waited here. Returns whether `x` was true for any of them.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool x) {
  uint32_t any;
  asm volatile(
      "{.reg .pred in, out; setp.ne.u32 in, %3, 0; bar.red.or.pred out, %1, %2, in; selp.u32 %0, "
      "1, 0, out;}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(x))
      : "memory");
  return any != 0;
}

}  // namespace blockflash::ptx

// Counters of 64 bits in device memory (PTX ISA, "Memory consistency model").
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* at) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}

// Gives the value before, and orders no other memory.
__device__ __forceinline__ uint64_t atomic_exchange(uint64_t* at, uint64_t x) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(at), "l"(x)
               : "memory");
  return before;
}

// These order no other memory. The maximum never lowers the value.
__device__ __forceinline__ void add_relaxed(uint64_t* at, uint64_t x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}
__device__ __forceinline__ void max_relaxed(uint64_t* at, uint64_t x) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

// Both an acquire and a release. Gives the value before.
__device__ __forceinline__ uint64_t atomic_add_acq_rel(uint64_t* at, uint64_t x) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(at), "l"(x)
               : "memory");
  return before;
}

}  // namespace blockflash::ptx

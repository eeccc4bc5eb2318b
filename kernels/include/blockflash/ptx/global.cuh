// Acquire and release in device memory (PTX ISA, "Memory consistency model"), and stores of 16
// bytes.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Writes before a release are visible after an acquire that reads its value.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Never lowers the value.
__device__ __forceinline__ void max_release(uint32_t* at, uint32_t x) {
  asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Adds 1, or returns to 0 from `last`, and gives the value before. Both an acquire and a release.
__device__ __forceinline__ uint32_t atomic_inc_acq_rel(uint32_t* at, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(last)
               : "memory");
  return before;
}

// Stores 16 bytes at once. The compiler may split an assignment of a `uint4` made of registers into
// four stores of 4 bytes, and L2 then takes four partial writes of each sector. Only for values
// that the kernel does not load again: without "memory" the compiler may move loads over the store.
__device__ __forceinline__ void store_16_bytes(void* at, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3]));
}

}  // namespace blockflash::ptx

// Loads and stores by shared-memory address.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

__device__ __forceinline__ uint32_t load_shared(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t at, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_u16(uint32_t at, uint32_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<uint16_t>(x)) : "memory");
}

__device__ __forceinline__ void or_shared(uint32_t at, uint32_t bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(bits) : "memory");
}

__device__ __forceinline__ void store_shared_float4(uint32_t at, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_float2(float (&v)[2], uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
}

__device__ __forceinline__ int4 load_shared_int4(uint32_t at) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_int4(uint32_t at, int4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

}  // namespace blockflash::ptx

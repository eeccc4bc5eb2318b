// cp.async (sm_80): asynchronous copies from global to shared memory. PTX ISA, "Data Movement:
// Non-bulk copy".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Copies 16 bytes, of which the first src_bytes (0…16) are read and the rest is filled with zeros.
// Bypasses L1.
__device__ __forceinline__ void cp_async_cg_16(uint32_t dst_smem, const void* src, int src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst_smem), "l"(src),
               "r"(src_bytes)
               : "memory");
}

// The same where `active`, without a branch.
__device__ __forceinline__ void cp_async_cg_16_if(bool active, uint32_t dst_smem, const void* src,
                                                  int src_bytes) {
  asm volatile(
      "{\n"
      ".reg .pred active;\n"
      "setp.ne.b32 active, %3, 0;\n"
      "@active cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n"
      "}\n" ::"r"(dst_smem),
      "l"(src), "r"(src_bytes), "r"(static_cast<int>(active))
      : "memory");
}

// Copies 16 bytes, bypassing L1, with a policy of L2.
__device__ __forceinline__ void cp_async_cg_16_hinted(uint32_t dst_smem, const void* src,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst_smem),
      "l"(src), "l"(policy)
      : "memory");
}

// Copies 4 bytes, through L1.
__device__ __forceinline__ void cp_async_ca_4(uint32_t dst_smem, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst_smem), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's youngest groups are in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits for all copies of this thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace blockflash::ptx

// Tensor copies of the Tensor Memory Accelerator (TMA, sm_90). PTX ISA, "Data Movement and
// Conversion: cp.async.bulk.tensor".
#pragma once

#include <stdint.h>

#include "blockflash/params/base.h"
#include "blockflash/ptx/eviction.cuh"

namespace blockflash::ptx {

// Starts the TMA load of the box at these coordinates, innermost first, into shared memory. Its
// bytes count at the mbarrier. Elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tensor_copy_4d(uint32_t dst_smem, const blockflash_tensor_map* map,
                                               int x, int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];"
      :
      : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Prefetches a tensor map before its first use.
__device__ __forceinline__ void prefetch_tensor_map(const blockflash_tensor_map* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_copy_3d(uint32_t dst_smem, const blockflash_tensor_map* map,
                                               int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];"
      :
      : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void tensor_copy_3d(uint32_t dst_smem, const blockflash_tensor_map* map,
                                               int x, int y, int z, uint32_t barrier,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;"
      :
      : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tensor_copy_2d(uint32_t dst_smem, const blockflash_tensor_map* map,
                                               int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];"
      :
      : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// Starts the TMA store of a box from shared memory to these coordinates. Elements outside the
// tensor are not written.
__device__ __forceinline__ void tensor_store_4d(const blockflash_tensor_map* map, int x, int y,
                                                int z, int w, uint32_t src_smem) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :
               : "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(src_smem)
               : "memory");
}

__device__ __forceinline__ void tensor_store_2d(const blockflash_tensor_map* map, int x, int y,
                                                uint32_t src_smem) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               :
               : "l"(map), "r"(x), "r"(y), "r"(src_smem)
               : "memory");
}

// Starts the copy of bytes, a multiple of 16, from shared to global memory.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src_smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(dst), "r"(src_smem), "r"(bytes)
               : "memory");
}

// Starts the addition of f32 numbers in shared memory to those in global memory.
__device__ __forceinline__ void bulk_add(float* dst, uint32_t src_smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(dst), "r"(src_smem), "r"(bytes)
               : "memory");
}

// Orders this thread's accesses to global memory with those of its bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Closes a group of this thread's stores.
__device__ __forceinline__ void tensor_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the `pending` youngest groups of this thread have read shared memory.
template <int pending = 0>
__device__ __forceinline__ void tensor_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until all groups of this thread have been written.
__device__ __forceinline__ void tensor_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace blockflash::ptx

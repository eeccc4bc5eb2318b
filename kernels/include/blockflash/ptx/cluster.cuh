// Thread block clusters (sm_90): distributed shared memory, mbarriers in it, and multicast copies.
// PTX ISA, "Cluster of cooperative thread arrays".
#pragma once

#include <stdint.h>

#include "blockflash/params/base.h"

namespace blockflash::ptx {

// The rank of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// CTAs of a cluster; 1 in a launch without clusters.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Says that this thread has come to a point, and waits until all threads of the cluster have. What
// they wrote before they arrived is visible then.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Loads from distributed shared memory.
__device__ __forceinline__ float4 load_cluster_float4(uint32_t at) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load_cluster_float2(uint32_t at) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(at)
               : "memory");
  return x;
}

// Waits for all threads of all CTAs of the cluster. Relaxed: it makes initialised mbarriers
// visible, but no other writes.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}

// The address of the same place in the shared memory of a CTA of the cluster.
__device__ __forceinline__ uint32_t map_shared(uint32_t at, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

// Stores to distributed shared memory. The bytes count at an mbarrier of the same CTA, and whoever
// waits for it sees them. This avoids a cluster-wide arrival with release, which waits for all
// memory that the thread has touched.
__device__ __forceinline__ void store_async(uint32_t at, uint32_t x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(at),
      "r"(x), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_async_int4(uint32_t at, int4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(at),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// Arrives at an mbarrier of the cluster: what this thread has read may be overwritten.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds bytes that are still to come in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_remote(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Starts the TMA load of a box into the same place of the CTAs in the mask. Its bytes count at the
// mbarrier of each.
__device__ __forceinline__ void tensor_copy_3d_multicast(uint32_t dst_smem,
                                                         const blockflash_tensor_map* map, int x,
                                                         int y, int z, uint32_t barrier,
                                                         uint16_t mask, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;"
      :
      : "r"(dst_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask), "l"(policy)
      : "memory");
}

// The same for a number of bytes, a multiple of 16.
__device__ __forceinline__ void bulk_copy_multicast(uint32_t dst_smem, const void* src,
                                                    uint32_t bytes, uint32_t barrier,
                                                    uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;"
      :
      : "r"(dst_smem), "l"(src), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}

}  // namespace blockflash::ptx

// Clusters of the persistent BSR kernels: CTAs with neighbouring tiles of C in the same block rows,
// for which L2 delivers each block of A once. These kernels are bound by L2 bandwidth.
//
// The first CTA takes the tiles of all CTAs and publishes them. Each CTA loads its share of A into
// all of them, and its own B. A stage is empty when the consumers of all CTAs have read it.
#pragma once

#include "blockflash/ptx/cluster.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/ptx/tensor_copy.cuh"

namespace blockflash {

template <int size>
struct BsrCluster {
  static_assert(size == 2 || size == 4, "shares are whole rows of the swizzle");
  static constexpr uint16_t kAll = (1 << size) - 1;

  // The rank of this CTA in its cluster, the index of the cluster, and the number of clusters.
  static __device__ __forceinline__ int rank() { return static_cast<int>(ptx::cluster_rank()); }
  static __device__ __forceinline__ uint32_t index() { return blockIdx.x / size; }
  static __device__ __forceinline__ uint32_t count() { return gridDim.x / size; }

  // Cluster-wide barriers: at the start, so that all mbarriers are initialised; before the end,
  // since other CTAs still copy into this one's shared memory and arrive at its mbarriers.
  static __device__ __forceinline__ void begin() { ptx::cluster_sync(); }
  static __device__ __forceinline__ void end() { ptx::cluster_sync(); }

  // The first CTA sends words to all CTAs, where they are counted as bytes at an mbarrier, and
  // publishes them: says how many bytes to expect.
  static __device__ __forceinline__ void store(uint32_t at, uint32_t x, uint32_t barrier) {
#pragma unroll
    for (int r = 0; r < size; ++r)
      ptx::store_async(ptx::map_shared(at, r), x, ptx::map_shared(barrier, r));
  }
  static __device__ __forceinline__ void store_int4(uint32_t at, int4 v, uint32_t barrier) {
#pragma unroll
    for (int r = 0; r < size; ++r)
      ptx::store_async_int4(ptx::map_shared(at, r), v, ptx::map_shared(barrier, r));
  }
  static __device__ __forceinline__ void publish(uint32_t barrier, uint32_t bytes) {
#pragma unroll
    for (int r = 0; r < size; ++r)
      ptx::mbarrier_arrive_expect_tx_remote(ptx::map_shared(barrier, r), bytes);
  }
  // Any CTA requests a tile from the first one.
  static __device__ __forceinline__ void request(uint32_t barrier) {
    ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, 0));
  }

  // A warp tells all CTAs that it has read a stage.
  static __device__ __forceinline__ void release(uint32_t barrier, int lane) {
    if (lane < size) ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, lane));
  }

  // Copies into all CTAs.
  static __device__ __forceinline__ void tensor_copy_3d(uint32_t dst_smem,
                                                        const blockflash_tensor_map* map, int x,
                                                        int y, int z, uint32_t barrier,
                                                        uint64_t policy) {
    ptx::tensor_copy_3d_multicast(dst_smem, map, x, y, z, barrier, kAll, policy);
  }
  static __device__ __forceinline__ void bulk_copy(uint32_t dst_smem, const void* src,
                                                   uint32_t bytes, uint32_t barrier) {
    ptx::bulk_copy_multicast(dst_smem, src, bytes, barrier, kAll);
  }
};

// A CTA on its own.
template <>
struct BsrCluster<1> {
  static __device__ __forceinline__ int rank() { return 0; }
  static __device__ __forceinline__ uint32_t index() { return blockIdx.x; }
  static __device__ __forceinline__ uint32_t count() { return gridDim.x; }
  static __device__ __forceinline__ void begin() { __syncthreads(); }
  static __device__ __forceinline__ void end() {}
  static __device__ __forceinline__ void store(uint32_t at, uint32_t x, uint32_t) {
    ptx::store_shared(at, x);
  }
  static __device__ __forceinline__ void store_int4(uint32_t at, int4 v, uint32_t) {
    ptx::store_shared_int4(at, v);
  }
  static __device__ __forceinline__ void publish(uint32_t barrier, uint32_t) {
    ptx::mbarrier_arrive(barrier);
  }
  static __device__ __forceinline__ void request(uint32_t barrier) {
    ptx::mbarrier_arrive(barrier);
  }
  static __device__ __forceinline__ void release(uint32_t barrier, int lane) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  static __device__ __forceinline__ void tensor_copy_3d(uint32_t dst_smem,
                                                        const blockflash_tensor_map* map, int x,
                                                        int y, int z, uint32_t barrier,
                                                        uint64_t policy) {
    ptx::tensor_copy_3d(dst_smem, map, x, y, z, barrier, policy);
  }
  static __device__ __forceinline__ void bulk_copy(uint32_t dst_smem, const void* src,
                                                   uint32_t bytes, uint32_t barrier) {
    ptx::bulk_copy(dst_smem, src, bytes, barrier);
  }
};

}  // namespace blockflash

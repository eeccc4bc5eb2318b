// Splitting tiles of C along K, for the persistent BSR kernels, where few tiles or one long tile
// would leave SMs idle.
//
// Split-K: a long tile is cut into splits of equal length. Split 0 adds the sums that the other
// splits have left in the caller's workspace, in the order of the splits, and stores C, so the
// result does not depend on timing. All splits except split 0 come before any split 0 in the order
// in which CTAs take tiles, and they wait for nothing, so a CTA only ever waits for one that is
// computing. This requires the tile counter beyond the first tiles, which CTAs take in the order in
// which they start: in a fixed order that CTA might not have been scheduled on an SM yet.
#pragma once

#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {

// One split of `count`.
struct BsrSplit {
  int number, count;

  static __device__ __forceinline__ BsrSplit load(uint32_t smem) {
    const uint32_t x = ptx::load_shared(smem);
    return {static_cast<int>(x % 16), static_cast<int>(x / 16)};
  }
  __device__ __forceinline__ uint32_t word() const {
    return number + count * 16;
  }  // as `load` reads it

  // Its range of the tile's steps; the first splits have one more.
  __device__ __forceinline__ int begin(int steps) const { return before(number, steps); }
  __device__ __forceinline__ int end(int steps) const { return before(number + 1, steps); }

  __device__ __forceinline__ int before(int split, int steps) const {
    return steps / count * split + min(split, steps % count);
  }
};
static_assert(BLOCKFLASH_BSR_SPLITS < 16, "a number fits into four bits");

// The place at `index` in the order of all splits: the number of the split, and the index among the
// tiles that may have such a split.
struct BsrPlace {
  int split;
  uint32_t index;
  int tiles_m;  // along the rows of C; 0: there are no more places

  __device__ __forceinline__ BsrPlace(const blockflash_bsr_matmul_tma_params& params, int tiles_m,
                                      int tiles_n, uint32_t index)
      : split(0), index(index), tiles_m(tiles_m) {
    const int32_t* const begin = params.split_k_begin;
    while (this->index < static_cast<uint32_t>(begin[split]) * tiles_n) ++split;
    this->index -= static_cast<uint32_t>(begin[split]) * tiles_n;
    if (split > 0) this->tiles_m = begin[split - 1] - begin[split];
    if (this->index >= static_cast<uint32_t>(this->tiles_m) * tiles_n) this->tiles_m = 0;
  }
};

// Whether there is a CTA (or cluster) for each place in the order. None takes another one then, and
// all leave the tile counter alone, whose atomics would only tell them so.
__device__ __forceinline__ bool has_tile_for_each(const blockflash_bsr_matmul_tma_params& params,
                                                  int tiles_m, int tiles_n, uint32_t takers) {
  return (static_cast<uint32_t>(params.split_k_begin[0]) + tiles_m) * tiles_n <= takers;
}

// The number of splits in which this number of steps is computed.
__device__ __forceinline__ int splits_of(const blockflash_bsr_matmul_tma_params& params,
                                         int steps) {
  return min(max(steps - 1, 0) / params.split_k_steps + 1, BLOCKFLASH_BSR_SPLITS);
}

// The sums that a warp holds of the tile at this position and column of tiles.
template <int warps, int registers>
struct BsrSums {
  const blockflash_bsr_matmul_tma_params& params;
  int position, column_tile, tiles_n, warp, lane;

  // Index of the warp's slot in the workspace, for a split.
  __device__ __forceinline__ int64_t slot(int split) const {
    return (static_cast<int64_t>(params.split_k_begin[split] + position) * tiles_n + column_tile) *
               warps +
           warp;
  }
  __device__ __forceinline__ float4* sums(int64_t slot) const {
    return reinterpret_cast<float4*>(params.split_k_sums) + slot * (registers / 4 * kWarpSize) +
           lane;
  }

  // Leaves the sums of a split other than 0.
  __device__ __forceinline__ void leave(int split, const float (&acc)[registers]) const {
    const int64_t slot = this->slot(split);
    float4* const to = sums(slot);
#pragma unroll
    for (int i = 0; i < registers; i += 4)
      __stcg(to + i / 4 * kWarpSize, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    __syncwarp();
    if (lane == 0) ptx::store_release(params.split_k_arrived + slot, 1);
  }

  // Adds the sums of the other splits to split 0, in their order, and resets the words that
  // published them. Where there are registers for it, each lane waits for one split, and the sums
  // of two splits are on their way at a time: one after another, the words would take the latency
  // of memory each.
  __device__ __forceinline__ void add(int splits, float (&acc)[registers]) const {
    constexpr int kTogether =
        registers <= 64 && warps <= 8 && BsrMatmulHopperConfig::ctas == 1 ? 2 : 1;
    static_assert(BLOCKFLASH_BSR_SPLITS <= kWarpSize, "a lane waits for one split at most");
    if constexpr (warps <= 8 || registers <= 32) {
      if (splits == 1) return;
      const bool waits = lane > 0 && lane < splits;
      if (waits) wait(slot(lane));
      __syncwarp();  // what one lane has acquired, all may read
#pragma unroll kTogether
      for (int split = 1; split < splits; ++split) add_from(slot(split), acc);
      __syncwarp();
      if (waits) params.split_k_arrived[slot(lane)] = 0;
    } else {
#pragma unroll 1
      for (int split = 1; split < splits; ++split) {
        const int64_t slot = this->slot(split);
        wait(slot);
        add_from(slot, acc);
        __syncwarp();
        if (lane == 0) params.split_k_arrived[slot] = 0;
      }
    }
  }

 private:
  __device__ __forceinline__ void wait(int64_t slot) const {
    while (ptx::load_acquire(params.split_k_arrived + slot) == 0) __nanosleep(64);
  }
  __device__ __forceinline__ void add_from(int64_t slot, float (&acc)[registers]) const {
    const float4* const from = sums(slot);
#pragma unroll
    for (int i = 0; i < registers; i += 4) {
      const float4 x = __ldcg(from + i / 4 * kWarpSize);
      acc[i] += x.x, acc[i + 1] += x.y, acc[i + 2] += x.z, acc[i + 3] += x.w;
    }
  }
};

}  // namespace blockflash

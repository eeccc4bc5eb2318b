// Splitting tiles of C along K, for the persistent BSR kernels, where few tiles or one long tile
// would leave SMs idle.
//
// A long tile is cut into parts of equal length. Part 0 adds the sums that the other parts have
// left in the caller's workspace, in the order of the parts, and stores C, so the result does not
// depend on timing. All parts except part 0 come before any part 0 in the order in which CTAs take
// tiles, and they wait for nothing, so a CTA only ever waits for one that is computing. This
// requires the tile counter beyond the first tiles, which CTAs take in the order in which they
// start: in a fixed order that CTA might not have been scheduled on an SM yet.
#pragma once

#include "blockflash/bsr/tile_order.cuh"
#include "blockflash/config/bsr.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {

// One part of `count`.
struct BsrPart {
  int number, count;

  static __device__ __forceinline__ BsrPart load(uint32_t smem) {
    const uint32_t x = ptx::load_shared(smem);
    return {static_cast<int>(x % 16), static_cast<int>(x / 16)};
  }
  __device__ __forceinline__ uint32_t word() const {
    return number + count * 16;
  }  // as `load` reads it

  // Its range of the tile's steps; the first parts have one more.
  __device__ __forceinline__ int begin(int steps) const { return before(number, steps); }
  __device__ __forceinline__ int end(int steps) const { return before(number + 1, steps); }

  __device__ __forceinline__ int before(int part, int steps) const {
    return steps / count * part + min(part, steps % count);
  }
};
static_assert(BLOCKFLASH_BSR_PARTS < 16, "a number fits into four bits");

// The place at `index` in the order of all parts: the number of the part, and the index among the
// tiles that may have such a part.
struct BsrPlace {
  int part;
  uint32_t index;
  int tiles_m;  // along the rows of C; 0: there are no more places

  __device__ __forceinline__ BsrPlace(const blockflash_bsr_matmul_tma_params& params, int tiles_m,
                                      int tiles_n, uint32_t index)
      : part(0), index(index), tiles_m(tiles_m) {
    const int32_t* const begin = params.part_begin;
    while (this->index < static_cast<uint32_t>(begin[part]) * tiles_n) ++part;
    this->index -= static_cast<uint32_t>(begin[part]) * tiles_n;
    if (part > 0) this->tiles_m = begin[part - 1] - begin[part];
    if (this->index >= static_cast<uint32_t>(this->tiles_m) * tiles_n) this->tiles_m = 0;
  }
};

// Whether there is a CTA (or cluster) for each place in the order. None takes another one then, and
// all leave the tile counter alone, whose atomics would only tell them so.
__device__ __forceinline__ bool has_tile_for_each(const blockflash_bsr_matmul_tma_params& params,
                                                  int tiles_m, int tiles_n, uint32_t takers) {
  return (static_cast<uint32_t>(params.part_begin[0]) + tiles_m) * tiles_n <= takers;
}

// The number of parts in which this number of steps is computed.
__device__ __forceinline__ int parts_of(const blockflash_bsr_matmul_tma_params& params, int steps) {
  return min(max(steps - 1, 0) / params.part_steps + 1, BLOCKFLASH_BSR_PARTS);
}

// The sums that a warp holds of the tile at this position and column of tiles.
template <int warps, int registers>
struct BsrSums {
  const blockflash_bsr_matmul_tma_params& params;
  int position, column_tile, tiles_n, warp, lane;

  // Index of the warp's slot in the workspace, for a part.
  __device__ __forceinline__ int64_t slot(int part) const {
    return (static_cast<int64_t>(params.part_begin[part] + position) * tiles_n + column_tile) *
               warps +
           warp;
  }
  __device__ __forceinline__ float4* sums(int64_t slot) const {
    return reinterpret_cast<float4*>(params.part_sums) + slot * (registers / 4 * kWarpSize) + lane;
  }

  // Leaves the sums of a part other than 0.
  __device__ __forceinline__ void leave(int part, const float (&acc)[registers]) const {
    const int64_t slot = this->slot(part);
    float4* const to = sums(slot);
#pragma unroll
    for (int i = 0; i < registers; i += 4)
      __stcg(to + i / 4 * kWarpSize, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    __syncwarp();
    if (lane == 0) ptx::store_release(params.part_arrived + slot, 1);
  }

  // Adds the sums of the other parts to part 0, in their order, and resets the words that published
  // them. Where there are registers for it, each lane waits for one part, and the sums of two parts
  // are on their way at a time: one after another, the words would take the latency of memory each.
  __device__ __forceinline__ void add(int parts, float (&acc)[registers]) const {
    constexpr int kTogether =
        registers <= 64 && warps <= 8 && BsrMatmulHopperConfig::ctas == 1 ? 2 : 1;
    static_assert(BLOCKFLASH_BSR_PARTS <= kWarpSize, "a lane waits for one part at most");
    if constexpr (warps <= 8 || registers <= 32) {
      if (parts == 1) return;
      const bool waits = lane > 0 && lane < parts;
      if (waits) wait(slot(lane));
      __syncwarp();  // what one lane has acquired, all may read
#pragma unroll kTogether
      for (int part = 1; part < parts; ++part) add_from(slot(part), acc);
      __syncwarp();
      if (waits) params.part_arrived[slot(lane)] = 0;
    } else {
#pragma unroll 1
      for (int part = 1; part < parts; ++part) {
        const int64_t slot = this->slot(part);
        wait(slot);
        add_from(slot, acc);
        __syncwarp();
        if (lane == 0) params.part_arrived[slot] = 0;
      }
    }
  }

 private:
  __device__ __forceinline__ void wait(int64_t slot) const {
    while (ptx::load_acquire(params.part_arrived + slot) == 0) __nanosleep(64);
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

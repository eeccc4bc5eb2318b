// What warps that share query rows tell each other, and the product that needs it.
#pragma once

#include <type_traits>

#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/barrier_vote.cuh"
#include "blockflash/ptx/shared.cuh"
#include "tile.cuh"

namespace blockflash {
namespace {

// A value of each row that the lane's quad holds, or the lane's part of it.
using RowValues = float[kMTiles][2];

// A warp that has its rows for itself.
struct Alone {
  static constexpr int part = 0;
  int rows;

  __device__ __forceinline__ Alone(uint32_t, int warp, int) : rows(warp) {}

  __device__ __forceinline__ bool any(bool x) const { return __any_sync(~0u, x); }
  __device__ __forceinline__ void largest(RowValues&) const {}
  __device__ __forceinline__ void sum(RowValues&) const {}

  __device__ __forceinline__ void multiply(Output& o, const Scores& p,
                                           const LaneAddress<kChunks>& v_lane) const {
    accumulate_output(o, v_lane, [&](Probabilities& a, int m, int k) { pack(a, p, m, k); });
  }
};

// One of a pair of neighbouring warps, which meet at a barrier of their own. Each writes to a place
// in shared memory that the other one reads. Both take the same branches, since they decide by what
// they agreed on.
struct Pair {
  static constexpr int kStepBytes = kWarpSize * 16, kPlaceBytes = kMTiles * kKvSteps * kStepBytes;
  static_assert(kSplit == 1 || Config::warps * kPlaceBytes == kSharedBytes,
                "a place for each warp");

  int part, rows;        // which part of keys and outputs is this warp's, and which rows
  uint32_t mine, other;  // this lane's words in both places

  __device__ __forceinline__ Pair(uint32_t places, int warp, int lane)
      : part(warp % 2),
        rows(warp / 2),
        mine(places + warp * kPlaceBytes + lane * 16),
        other(places + (warp ^ 1) * kPlaceBytes + lane * 16) {}

  __device__ __forceinline__ int barrier() const { return 1 + rows; }  // 0 is that of the CTA
  __device__ __forceinline__ void meet() const {
    ptx::named_barrier_sync(barrier(), 2 * kWarpSize);
  }

  __device__ __forceinline__ bool any(bool x) const {
    return ptx::named_barrier_or(barrier(), 2 * kWarpSize, x);
  }

  // Combines the values of both warps. The caller makes sure that each has read the other's place;
  // afterwards both may be written again.
  template <class Combine>
  __device__ __forceinline__ void exchange(RowValues& x, const Combine& combine) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      ptx::store_shared(mine + m * kStepBytes, __float_as_uint(x[m][0]));
      ptx::store_shared(mine + m * kStepBytes + 4, __float_as_uint(x[m][1]));
    }
    meet();
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[m][half] = combine(x[m][half],
                             __uint_as_float(ptx::load_shared(other + m * kStepBytes + half * 4)));
    meet();
  }

  // Follows `any`. Since the last product, which read the places, all have passed a barrier of the
  // CTA.
  __device__ __forceinline__ void largest(RowValues& x) const {
    exchange(x, [](float a, float b) { return fmaxf(a, b); });
  }

  __device__ __forceinline__ void sum(RowValues& x) const {
    meet();  // the other one has read the last probabilities
    exchange(x, [](float a, float b) { return a + b; });
  }

  // The keys of this warp come first, so that the other one's probabilities arrive meanwhile.
  __device__ __forceinline__ void multiply(Output& o, const Scores& p,
                                           const LaneAddress<kChunks>& v_lane) const {
    constexpr int kPartBytes = kKvPerWarp * TileLayout::row_bytes;
    accumulate_output(o, moved(v_lane, part * kPartBytes), [&](Probabilities& a, int m, int k) {
      pack(a, p, m, k);
      ptx::store_shared_int4(mine + (m * kKvSteps + k) * kStepBytes,
                             make_int4(a[0], a[1], a[2], a[3]));
    });
    meet();
    accumulate_output(
        o, moved(v_lane, (1 - part) * kPartBytes), [&](Probabilities& a, int m, int k) {
          const int4 x = ptx::load_shared_int4(other + (m * kKvSteps + k) * kStepBytes);
          a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
        });
  }
};

using Sharers = std::conditional_t<kSplit == 1, Alone, Pair>;
static_assert(kSplit <= 2, "two warps share rows at most");

}  // namespace
}  // namespace blockflash

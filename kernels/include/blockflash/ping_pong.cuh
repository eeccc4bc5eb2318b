// The ping-pong barriers of consumer warpgroups (FlashAttention-3): they issue their products one
// after the other, so that one works at its scores while the tensor cores multiply for another.
#pragma once

#include "blockflash/ptx/barrier.cuh"

namespace blockflash {

// Named barrier 1 + w guards the issue slot of warpgroup w; it counts the 128 threads that wait and
// the 128 of the warpgroup that was before. A warpgroup on its own needs none.
template <int warpgroups>
struct PingPong {
  int warpgroup;

  // Waits until this warpgroup may issue its products.
  __device__ __forceinline__ void sync() const {
    if constexpr (warpgroups > 1) ptx::named_barrier_sync(1 + warpgroup, 256);
  }
  // Lets the next warpgroup issue its own.
  __device__ __forceinline__ void arrive() const {
    const int next = warpgroups == 2 ? 1 - warpgroup : (warpgroup + 1) % warpgroups;
    if constexpr (warpgroups > 1) ptx::named_barrier_arrive(1 + next, 256);
  }
};

}  // namespace blockflash

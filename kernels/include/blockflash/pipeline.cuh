// Pipelines: a producer fills the stages of a ring in shared memory, and consumers read and release
// them. A stage has a "full" mbarrier, whose phase ends when its data have arrived, and an "empty"
// one, whose phase ends when all consumers have released it.
//
// Only this file derives stages and phases. There are three forms of the same state:
//   PipelineState   stage and phase in two registers, the usual form;
//   PipelineState::consumer_at, producer_at: from the number of the item, where that is counted
//                   anyway, or where the stage of another item than the next one is asked for;
//   PhaseBits       one bit per mbarrier in one register, for many rings that advance one by one.
// Where threads fill a ring by cp.async for themselves, groups take the place of mbarriers, and a
// stage alone is the state.
#pragma once

#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/mbarrier.cuh"

namespace blockflash {

constexpr int kBarrierBytes = 8;

// The mbarrier of a stage, of those from `barriers` on.
__device__ __forceinline__ uint32_t barrier_of(uint32_t barriers, int stage) {
  return barriers + kBarrierBytes * stage;
}

// The stage behind this one in a ring.
template <int stages>
__device__ __forceinline__ constexpr int next_stage(int stage) {
  return stage + 1 == stages ? 0 : stage + 1;
}
// The stage before this one.
template <int stages>
__device__ __forceinline__ constexpr int previous_stage(int stage) {
  return stage == 0 ? stages - 1 : stage - 1;
}

// Waits for the oldest group of copies by cp.async, after which `younger` ones, at most `most`,
// were committed.
template <int most>
__device__ __forceinline__ void wait_for_oldest_group(int younger) {
  if (younger >= most)
    ptx::cp_async_wait_group<most>();
  else if constexpr (most > 0)
    wait_for_oldest_group<most - 1>(younger);
}

// Where a thread is in a ring: the stage, and the phase that it waits for there. A consumer starts
// with phase 0 of "full", a producer with phase 1 of "empty", which a fresh mbarrier passes at once
// because all stages are free.
template <int stages>
struct PipelineState {
  int stage;
  uint32_t phase;

  static __device__ __forceinline__ PipelineState consumer() { return {0, 0}; }
  static __device__ __forceinline__ PipelineState producer() { return {0, 1}; }
  // The state at item n.
  template <class Number>
  static __device__ __forceinline__ PipelineState consumer_at(Number n) {
    return {static_cast<int>(n % stages), static_cast<uint32_t>(n / stages & 1)};
  }
  template <class Number>
  static __device__ __forceinline__ PipelineState producer_at(Number n) {
    return {static_cast<int>(n % stages), static_cast<uint32_t>((n / stages & 1) ^ 1)};
  }

  // The mbarrier of this stage, of a ring's "full" or "empty" ones.
  __device__ __forceinline__ uint32_t of(uint32_t barriers) const {
    return barrier_of(barriers, stage);
  }
  __device__ __forceinline__ void wait(uint32_t barriers) const {
    ptx::mbarrier_wait(of(barriers), phase);
  }
  __device__ __forceinline__ void advance() {
    if (stages == 1 || ++stage == stages) stage = 0, phase ^= 1;
  }
};

// The consumer's and the producer's wait for item n.
template <int stages, class Number>
__device__ __forceinline__ void wait_full(uint32_t barriers, Number n) {
  ptx::mbarrier_wait(barrier_of(barriers, n % stages), n / stages & 1);
}
template <int stages, class Number>
__device__ __forceinline__ void wait_empty(uint32_t barriers, Number n) {
  ptx::mbarrier_wait(barrier_of(barriers, n % stages), (n / stages & 1) ^ 1);
}

// The phases of up to 32 mbarriers of several rings, a bit each. Consumers of the Hopper attention
// forward have no registers for a PipelineState per ring, and these rings do not advance together.
struct PhaseBits {
  uint32_t bits;

  static __device__ __forceinline__ PhaseBits consumer() { return {0}; }
  static __device__ __forceinline__ PhaseBits producer() { return {~0u}; }

  // Waits without leaving the phase.
  __device__ __forceinline__ void peek(uint32_t barriers, int index) const {
    ptx::mbarrier_wait(barrier_of(barriers, index), bits >> index & 1);
  }
  __device__ __forceinline__ void wait(uint32_t barriers, int index) {
    peek(barriers, index);
    bits ^= 1u << index;
  }
};

// The mbarriers of a ring.
template <int stages>
struct PipelineBarriers {
  static constexpr int kBytes = 2 * kBarrierBytes * stages;
  uint32_t full, empty;

  __device__ __forceinline__ explicit PipelineBarriers(uint32_t at)
      : full(at), empty(at + kBarrierBytes * stages) {}

  // One producer announces the bytes of a stage; `readers` release it.
  __device__ __forceinline__ void init(int readers) const {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(full + kBarrierBytes * i, 1);
      ptx::mbarrier_init(empty + kBarrierBytes * i, readers);
    }
  }
};

}  // namespace blockflash

// Where a consumer warpgroup of the Hopper attention kernel is among the steps of two block rows.
#pragma once

#include "layout.cuh"

namespace blockflash {

// The step of two block rows at which a warpgroup is, and the one whose probabilities are pending.
template <bool two_block_rows>
struct StepCursor {
  KeyStep step;  // zero behind the last one
  int pending;   // its place in the ring and, from bit 16 on, the "full" mbarrier of V

  // Looks up the step at a position, or the one below if that is for the other warpgroup: there is
  // never more than one such step in succession.
  __device__ __forceinline__ void look_up(const StepRing& ring, int last, int& position,
                                          int warpgroup) {
    step = ring.step(position);
    const KeyStep below = ring.step(position - 1);
    if (position >= last && !step.is_for(warpgroup)) --position, step = below;
    if (position < last) step = {0};
  }
  __device__ __forceinline__ void take(int position, int warpgroup) {
    const int v_full = v_full_of(warpgroup) + position % kVStages;
    pending = (position & (StepRing::kSteps - 1)) | v_full << 16;
  }
  __device__ __forceinline__ int v_full_of(int warpgroup) const {
    return Barriers::kV + (step.rows() == 3 ? 0 : 1 + warpgroup) * kVStages;
  }
  // The "full" mbarriers of the step in a stage of K, and of the pending one.
  __device__ __forceinline__ int k_full(int stage, int warpgroup) const {
    return (step.rows() == 3 ? 0 : 1 + warpgroup) * kStages + stage;
  }
  __device__ __forceinline__ int v_full(int) const { return pending >> 16; }
};
template <>
struct StepCursor<false> {
  static constexpr KeyStep step = {0};
  static constexpr int pending = 0;
  __device__ __forceinline__ void look_up(const StepRing&, int, int&, int) {}
  __device__ __forceinline__ void take(int, int) {}
  __device__ __forceinline__ int k_full(int stage, int) const { return stage; }
  __device__ __forceinline__ int v_full(int stage) const { return Barriers::kV + stage; }
};

}  // namespace blockflash

// The softcap of attention scores.
#pragma once

#include "blockflash/ptx/math.cuh"

namespace blockflash {

// softcap·tanh(x·scale_over_cap), as exact as f32 scores are. tanh.approx would have an error of
// softcap·2^-11, and 1 - 2 / (e^2y + 1) alone cancels for small y, which shows in the log-sum-exp
// of short rows. Small arguments therefore take an odd polynomial (minimax on |y| < 0.625, relative
// error 2e-7). Its leading coefficient is factored out so that every step takes its constant as an
// immediate: the Hopper kernel for head_dim 64 has no register left to hold one.
__device__ __forceinline__ float soft_cap(float x, float softcap, float scale_over_cap) {
  constexpr float kTwoLog2e = 2.8853900817779268f;
  const float y = x * scale_over_cap;
  if (fabsf(y) < 0.625f) {
    const float y2 = y * y;
    const float p = fmaf(fmaf(y2 - 3.41315164f, y2, 8.74028735f), y2, -21.8905116f);
    return softcap * fmaf(p * (y2 * 0.01522686f), y, y);
  }
  return softcap * fmaf(-2.f, ptx::rcp_approx(ptx::ex2_approx(y * kTwoLog2e) + 1.f), 1.f);
}

}  // namespace blockflash

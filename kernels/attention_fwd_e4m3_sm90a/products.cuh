// The matrix products of a consumer warpgroup.
#pragma once

#include "blockflash/ptx/wgmma.cuh"
#include "blockflash/ptx/wgmma_e4m3.cuh"
#include "layout.cuh"

namespace blockflash {

constexpr int kQWords = Config::q_in_registers ? kD / 8 : 1;

// s = Q·Kᵀ, where Q is in a stage of its own or in registers.
__device__ __forceinline__ void start_scores(float (&s)[kBlockKv / 2], const uint32_t (&q)[kQWords],
                                             uint32_t smem, int q_stage, int k_stage) {
  using Product = ptx::WgmmaE4m3<kBlockKv>;
  const uint64_t k = ptx::wgmma_descriptor<kRowBytes>(smem + kKOffset) + (k_stage * kKvBytes >> 4),
                 q_tile = ptx::wgmma_descriptor<kRowBytes>(smem) + (q_stage * kQBytes >> 4);
  constexpr int kSteps = kRowBytes / 32;  // of a panel
#pragma unroll
  for (int d = 0; d < kD / 32; ++d) {
    const int in_row = d % kSteps * 32;
    const uint64_t k_step = k + ((d / kSteps * kBlockKv * kRowBytes + in_row) >> 4),
                   q_step = q_tile + ((d / kSteps * 64 * kRowBytes + in_row) >> 4);
    if constexpr (Config::q_in_registers) {
      if (d == 0)
        Product::template rs<false>(s, q + 4 * d, k_step);
      else
        Product::template rs<true>(s, q + 4 * d, k_step);
    } else {
      if (d == 0)
        Product::template ss<false>(s, q_step, k_step);
      else
        Product::template ss<true>(s, q_step, k_step);
    }
  }
  ptx::wgmma_commit_group();
}

// t = P·V of a part of the columns.
__device__ __forceinline__ void start_part(float (&t)[kPartColumns / 2],
                                           const uint32_t (&p)[kBlockKv / 8], uint32_t smem,
                                           int v_stage, int part) {
  using Product = ptx::WgmmaE4m3<kPartColumns>;
  const uint64_t v =
      ptx::wgmma_descriptor<kBlockKv>(smem + kVOffset + part * kPartColumns * kBlockKv) +
      (v_stage * kKvBytes >> 4);
#pragma unroll
  for (int k = 0; k < kBlockKv / 32; ++k) {
    if (k == 0)
      Product::template rs<false>(t, p, v);
    else
      Product::template rs<true>(t, p + 4 * k, v + (k * 32 >> 4));
  }
  ptx::wgmma_commit_group();
}

}  // namespace blockflash

// The matrix products of a consumer warpgroup of the Hopper attention kernel, and what is done to
// their operands.
#pragma once

#include "blockflash/ptx/wgmma.cuh"
#include "layout.cuh"

namespace blockflash {

using Element = Config::Element;

// s = Q·Kᵀ, where Q is in a stage of its own or in registers.
__device__ __forceinline__ void start_scores(float (&s)[kBlockKv / 2], uint32_t* q, uint32_t smem,
                                             int q_stage, int stage) {
  const uint64_t k = kTwoBlockRows
                         ? ptx::wgmma_descriptor(k_at(smem, stage))
                         : ptx::wgmma_descriptor(smem + kKOffset) + (stage * kKStageBytes >> 4);
  const uint64_t q_tile = ptx::wgmma_descriptor(smem) + (q_stage * kQBytes >> 4);
#pragma unroll
  for (int d = 0; d < (kDQk + 15) / 16; ++d) {
    using Product = ptx::Wgmma<kBlockKv, Element>;
    const uint64_t k_step = k + ((d / 4 * kBlockKv * 128 + d % 4 * 32) >> 4) -
                            (k_panel_shift(stage, d / 4) >> 4),
                   q_step = q_tile + ((d / 4 * 8192 + d % 4 * 32) >> 4);
    if constexpr (Config::q_in_registers) {
      if (d == 0)
        Product::template rs<false, false>(s, q + 4 * d, k_step);
      else
        Product::template rs<true, false>(s, q + 4 * d, k_step);
    } else {
      if (d == 0)
        Product::template ss<false>(s, q_step, k_step);
      else
        Product::template ss<true>(s, q_step, k_step);
    }
  }
  ptx::wgmma_commit_group();
}

// o += P·V, and the row sums of P by the ones behind V. With `skip`, multiplies by the page of
// zeros instead: a branch around the product would serialise all WGMMAs.
__device__ __forceinline__ void start_output(float (&o)[kOutColumns / 2],
                                             uint32_t (&p)[kBlockKv / 4], uint32_t smem, int stage,
                                             uint32_t accumulate, bool skip = false) {
  const uint64_t v = skip ? ptx::wgmma_descriptor_mn(smem + kZerosOffset, 0, 0)
                     : kSharedOnes
                         ? ptx::wgmma_descriptor_mn(v_at(smem, stage), v_panel(stage), 1024)
                         : ptx::wgmma_descriptor_mn(smem + kVOffset, kBlockKv * 128, 1024) +
                               (stage * kVStageBytes >> 4);
  const int step = skip ? 0 : 16 * 128 >> 4;
#pragma unroll
  for (int k = 0; k < kBlockKv / 16; ++k) {
    using Product = ptx::Wgmma<kOutColumns, Element>;
    if (k == 0)
      Product::template rs_if<true>(accumulate, o, p, v);
    else
      Product::template rs<true, true>(o, p + 4 * k, v + k * step);
  }
  ptx::wgmma_commit_group();
}

__device__ __forceinline__ void clear_probabilities(uint32_t (&p)[kBlockKv / 4]) {
#pragma unroll
  for (int i = 0; i < kBlockKv / 4; ++i) p[i] = 0;
}

__device__ __forceinline__ void rescale_output(float (&o)[kOutColumns / 2],
                                               const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kOutColumns / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

__device__ __forceinline__ void clear_output(float (&o)[kOutColumns / 2]) {
#pragma unroll
  for (int i = 0; i < kOutColumns / 2; ++i) o[i] = 0.f;
  ptx::wgmma_pin(o);  // makes this a branch instead of selects into a second set of registers
}

}  // namespace blockflash

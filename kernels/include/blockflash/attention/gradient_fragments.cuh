// A resident tile of the attention backward on Hopper as fragments in registers, where a CTA has
// registers for it. Products that read one operand of 64 rows from registers take half as much from
// shared memory.
#pragma once

#include "blockflash/attention/gradient_ring.cuh"
#include "blockflash/ptx/ldmatrix.cuh"

namespace blockflash {
namespace {

constexpr int kSteps = (kD + 15) / 16;  // of 16 columns each

// The 64 rows of a warpgroup: 16 for each warp.
using Fragments = uint32_t[4 * kSteps];

__device__ __forceinline__ void load_fragments(Fragments& to, uint32_t tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t words[4];
    ptx::ldmatrix_x4(words, tile + k / 4 * kResidentPanel + row * 128 +
                                ((k % 4 * 2 + lane / 16) ^ row % 8) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[4 * k + i] = words[i];
  }
}

// d[64, columns] = a·bᵀ over the head dimension, with all rows of b, which is K-major.
template <int columns>
__device__ __forceinline__ void start_scores(float (&d)[columns / 2], const Fragments& a,
                                             uint32_t b, int b_panel) {
  using Product = ptx::Wgmma<columns, Element>;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint64_t b_step = ptx::wgmma_descriptor_of(b) + (k / 4 * b_panel >> 4) + k % 4 * 2;
    if (k == 0)
      Product::template rs<false, false>(d, a + 4 * k, b_step);
    else
      Product::template rs<true, false>(d, a + 4 * k, b_step);
  }
  ptx::wgmma_commit_group();
}

}  // namespace
}  // namespace blockflash

// From the sums of an item to the output, or to the workspace. Warps without rows store nothing.
#pragma once

#include "blockflash/latent_hopper/sums.cuh"
#include "blockflash/ptx/global.cuh"

namespace blockflash {
namespace {

// All sums of a row tile. The four lanes of a row exchange words, so that each stores eight
// columns.
template <int warpgroup>
__device__ __forceinline__ void store_results(const DecodeRun& item, const Sums<warpgroup>& x) {
  const blockflash_attention_decode_params& p = x.p;
  const int rows = rows_of(p, item);
  if (x.first_row() / 16 * 16 >= rows) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = x.first_row() + 8 * half;
    const RowPlace at(p, item, min(row, rows - 1));
    // What the end of a row makes of sums of 1 is the factor of all sums.
    Partial all{make_float4(1.f, 1.f, 1.f, 1.f), x.reference[half], x.denominator[half]};
    end_row(p, at, all);
    const float by = reciprocal(all) * all.sum.x;
    if (p.lse != nullptr && warpgroup == 0 && x.is_first_of_row() && row < rows)
      p.lse[at.lse] = log_sum_exp(all);
    Element* const o = static_cast<Element*>(p.o) + at.o + warpgroup * 256 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x.o + 4 * (j + i) + 2 * half;
        words[i] = Traits::pack(pair[0] * by, pair[1] * by);
      }
      quad_transpose(words, threadIdx.x % 4);
      if (row < rows) ptx::store_16_bytes(o + j * 8, words);
    }
  }
}

// The same to a slot of the workspace.
template <int warpgroup>
__device__ __forceinline__ void store_partial(const DecodeRun& item, const Sums<warpgroup>& x) {
  const blockflash_attention_decode_params& p = x.p;
  const RunSlot slot(p, item.slot + item.run * item.slot_step);
  const int rows = rows_of(p, item);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = x.first_row() + 8 * half;
    if (row >= rows) continue;
    float2* const sums =
        reinterpret_cast<float2*>(slot.sums + row * Config::head_dim_v + warpgroup * 256) +
        threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      __stcg(sums + j * 4, make_float2(x.o[4 * j + 2 * half], x.o[4 * j + 2 * half + 1]));
    if (warpgroup == 0 && x.is_first_of_row())
      __stcg(slot.logs + row, make_float2(x.reference[half], x.denominator[half]));
  }
}

}  // namespace
}  // namespace blockflash

// From the sums of a run to the output, or to the workspace, where runs are combined by the CTAs
// that complete a row tile.
#pragma once

#include "blockflash/decode/run_results.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/global.cuh"
#include "sums.cuh"

namespace blockflash {
namespace {

// A partial result in the workspace, as a warpgroup holds it.
struct Slot : RunSlot {
  using RunSlot::RunSlot;

  // Calls `visit(sums of two columns, i)` for the sums o[i] and o[i + 1] of this lane.
  template <class Visit>
  __device__ __forceinline__ void each(const blockflash_attention_decode_params& p, int rows,
                                       const Visit& visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        const int column = 8 * j + accumulator_column(threadIdx.x % kWarpSize, 0);
        if (column < p.head_dim_v)
          visit(reinterpret_cast<float2*>(sums + row * p.head_dim_v + column), 4 * j + 2 * half);
      }
    }
  }
  __device__ __forceinline__ void store(const blockflash_attention_decode_params& p, int rows,
                                        const Sums& x) const {
    each(p, rows, [&](float2* at, int i) { __stcg(at, make_float2(x.o[i], x.o[i + 1])); });
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (threadIdx.x % 4 == 0 && first_row() + 8 * half < rows)
        __stcg(logs + first_row() + 8 * half,
               make_float2(x.total.reference[half], x.total.denominator[half]));
  }
  // Puts the sums that the same warp has stored before these.
  __device__ __forceinline__ void combine(const blockflash_attention_decode_params& p, int rows,
                                          Sums& x) const {
    __syncwarp();
    Totals before;
    float earlier[kD / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + 8 * half;
      const float2 of_row = row < rows ? __ldcg(logs + row) : make_float2(kNoReference, 0.f);
      before.reference[half] = of_row.x, before.denominator[half] = of_row.y;
    }
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) earlier[i] = 0.f;
    each(p, rows, [&](const float2* at, int i) {
      const float2 pair = __ldcg(at);
      earlier[i] = pair.x, earlier[i + 1] = pair.y;
    });
    x.join_after(before, [&](int i) { return earlier[i]; });
    __syncwarp();  // all have read what may be stored anew
  }
};

// The sums over earlier splits in shared memory, where each thread keeps its own.
struct Kept {
  float4* sums;
  float2* logs;
  __device__ __forceinline__ void store(const Sums& x) const {
#pragma unroll
    for (int i = 0; i < kD / 8; ++i)
      sums[i * Config::threads + threadIdx.x] =
          make_float4(x.o[4 * i], x.o[4 * i + 1], x.o[4 * i + 2], x.o[4 * i + 3]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (threadIdx.x % 4 == 0)
        logs[first_row() + 8 * half] =
            make_float2(x.total.reference[half], x.total.denominator[half]);
  }
  __device__ __forceinline__ void combine(Sums& x) const {
    __syncwarp();
    Totals before;
    float earlier[kD / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 of_row = logs[first_row() + 8 * half];
      before.reference[half] = of_row.x, before.denominator[half] = of_row.y;
    }
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      const float4 four = sums[i * Config::threads + threadIdx.x];
      earlier[4 * i] = four.x, earlier[4 * i + 1] = four.y;
      earlier[4 * i + 2] = four.z, earlier[4 * i + 3] = four.w;
    }
    x.join_after(before, [&](int i) { return earlier[i]; });
    __syncwarp();  // all have read what may be stored anew
  }
};

// The same of all sums of a row tile, with the same arithmetic.
__device__ __forceinline__ void store_results(const blockflash_attention_decode_params& p,
                                              const DecodeRun& item, Sums& x) {
  const int rows = rows_of(p, item);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row() + 8 * half;
    const RowPlace at(p, item, min(row, rows - 1));
    // The sums become factors of them.
    Partial all{make_float4(1.f, 1.f, 1.f, 1.f), x.total.reference[half],
                x.total.denominator[half]};
    end_row(p, at, all);
    const float by = reciprocal(all);
    if (p.lse != nullptr && threadIdx.x % 4 == 0 && row < rows) p.lse[at.lse] = log_sum_exp(all);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      const int column = 8 * j + accumulator_column(threadIdx.x % kWarpSize, 0);
      const float* const pair = x.o + 4 * j + 2 * half;
      if (row < rows && column < p.head_dim_v)
        *reinterpret_cast<uint32_t*>(static_cast<Element*>(p.o) + at.o + column) =
            Traits::pack(pair[0] * all.sum.x * by, pair[1] * all.sum.x * by);
    }
  }
}

}  // namespace
}  // namespace blockflash

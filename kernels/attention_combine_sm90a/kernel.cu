// Combines the splits that the Hopper kernels for many rows over a cache left in the workspace. A
// CTA has one row of a head, or several where there are many. A thread adds four columns of every
// so many splits, whose loads are all under way at once; shared memory adds these sums, in a fixed
// order.
#include <math_constants.h>

#include "blockflash/attention/exponent.cuh"
#include "blockflash/config/attention_combine.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/kv_cache_splits.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/math.cuh"

namespace blockflash {
namespace {

using Config = AttentionCombineConfig;

// Splits of which a thread loads its columns before it adds any.
constexpr int kAtOnce = 8;

__device__ __forceinline__ float4 fused(float weight, const float4& x, const float4& sum) {
  return make_float4(fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z),
                     fmaf(weight, x.w, sum.w));
}

template <class Element>
__device__ __forceinline__ void store(void* o, int64_t at, const float4& x) {
  using Traits = ElementTraits<Element>;
  *reinterpret_cast<uint2*>(static_cast<Element*>(o) + at) =
      make_uint2(Traits::pack(x.x, x.y), Traits::pack(x.z, x.w));
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_combine_params p) {
  using namespace blockflash;
  __shared__ float4 sums[Config::threads];
  __shared__ float logs[Config::most_lines][Config::most_splits];
  // A line is a row of a head.
  const int threads_of_line = Config::threads / p.lines;
  const int of_cta = static_cast<int>(threadIdx.x) / threads_of_line,
            thread = static_cast<int>(threadIdx.x) % threads_of_line;
  const int rows = p.batch * p.seqlen_q, lines = rows * p.num_heads_q;
  const int line = static_cast<int>(blockIdx.x) * p.lines + of_cta;
  const bool exists = line < lines;
  const int row = line / p.num_heads_q, head = line - row * p.num_heads_q;
  const int pieces = p.head_dim_v / 4;
  const int threads_of_piece = threads_of_line / pieces;
  const int first = thread / pieces, piece = thread - first * pieces;
  const bool adds = exists && first < threads_of_piece;

  // Where there are many lines, only splits with keys are loaded, for which the log-sum-exps are
  // waited for.
  const bool waits = p.lines > 1;

  ptx::wait_for_predecessors();
  const float* const parts = p.parts + static_cast<int64_t>(line) * p.head_dim_v + 4 * piece;
  float4 columns[kAtOnce];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = begin + i * threads_of_piece + first;
      if (adds && split < p.splits && (!waits || logs[of_cta][split] != -CUDART_INF_F))
        columns[i] = *reinterpret_cast<const float4*>(parts + static_cast<int64_t>(split) * lines *
                                                                  p.head_dim_v);
    }
  };
  if (!waits) load(0);
  if (exists)
    for (int split = thread; split < p.splits; split += threads_of_line)
      logs[of_cta][split] =
          p.parts_lse[(static_cast<int64_t>(split) * p.num_heads_q + head) * rows + row] * kLog2e;
  __syncthreads();
  if (waits) load(0);
  float reference = -CUDART_INF_F, total = 0.f;
  for (int split = 0; split < p.splits; ++split) reference = fmaxf(reference, logs[of_cta][split]);
  // A split without keys has no weight, also where no other one has keys.
  const auto weight_of = [&](int split) {
    const float log = logs[of_cta][split];
    return log == -CUDART_INF_F ? 0.f : ptx::ex2_approx(log - reference);
  };
  for (int split = 0; split < p.splits; ++split) total += weight_of(split);

  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int begin = 0; begin < p.splits;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = begin + i * threads_of_piece + first;
      if (!adds || split >= p.splits) continue;
      const float weight = weight_of(split);
      if (weight != 0.f) sum = fused(weight, columns[i], sum);
    }
    begin += kAtOnce * threads_of_piece;
    load(begin);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (!exists || first > 0) return;
  for (int i = 1; i < threads_of_piece; ++i) sum = fused(1.f, sums[threadIdx.x + i * pieces], sum);
  // A row without keys is 0. NaN is not equal to 0 and passes through.
  const float scale = total == 0.f ? 0.f : ptx::rcp_approx(total);
  sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
  const int sequence = row / p.seqlen_q, query = row - sequence * p.seqlen_q;
  if (p.lse != nullptr && piece == 0)
    p.lse[sequence * p.lse_stride_batch + head * p.lse_stride_head + query] =
        fmaf(ptx::lg2_approx(total), kLn2, reference * kLn2);
  const int64_t at =
      sequence * p.o_stride_batch + query * p.o_stride_seq + head * p.o_stride_head + 4 * piece;
  if (p.o_dtype == BLOCKFLASH_DTYPE_F16)
    store<__half>(p.o, at, sum);
  else
    store<__nv_bfloat16>(p.o, at, sum);
}

// Combines attention over disjoint sets of keys, as between GPUs that hold parts of a cache or
// sequences that share a prefix, or adds gradients of such sets, which have no log-sum-exp. A
// thread computes four columns of a row of o, in one fixed order.
#include "blockflash/config/kv_cache.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/launch.cuh"

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_merge_params p) {
  using namespace blockflash;
  constexpr int kColumns = AttentionMergeConfig::columns;
  static_assert(kColumns == 4, "a partial result has four columns");
  constexpr float kLog2e = 1.4426950408889634f;
  ptx::wait_for_predecessors();
  const int pieces = p.head_dim / kColumns;
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * AttentionMergeConfig::threads + threadIdx.x;
  const int64_t row = thread / pieces;
  const int column = static_cast<int>(thread - row * pieces) * kColumns;
  const int64_t token = row / p.num_heads_q;
  const int64_t head = row - token * p.num_heads_q;
  const int64_t batch = token / p.seqlen_q, query = token - batch * p.seqlen_q;
  if (batch >= p.batch) return;

  const bool adds = p.parts_lse == nullptr;  // each part has a weight of exactly 1
  const int64_t logs = batch * p.parts_lse_stride_batch + head * p.parts_lse_stride_head + query;
  const auto log_of = [&](int part) {
    return adds ? 0.f : p.parts_lse[logs + part * p.parts_lse_stride_part] * kLog2e;
  };
  const int64_t columns = batch * p.parts_stride_batch + query * p.parts_stride_seq +
                          head * p.parts_stride_head + column;
  Partial x{make_float4(0.f, 0.f, 0.f, 0.f), kNoReference, 0.f};
  for (int i = 0; i < p.count; ++i) x.reference = fmaxf(x.reference, log_of(i));
#pragma unroll 4
  for (int i = 0; i < p.count; ++i) {
    const float log = log_of(i);
    if (log == -CUDART_INF_F) continue;  // a part without keys, whose columns do not count
    const float weight = ptx::ex2_approx(log - x.reference);
    const int64_t at = columns + i * p.parts_stride_part;
    x.denominator += weight;
    x.sum.x = fmaf(weight, load_element(p.parts, at, p.parts_dtype), x.sum.x);
    x.sum.y = fmaf(weight, load_element(p.parts, at + 1, p.parts_dtype), x.sum.y);
    x.sum.z = fmaf(weight, load_element(p.parts, at + 2, p.parts_dtype), x.sum.z);
    x.sum.w = fmaf(weight, load_element(p.parts, at + 3, p.parts_dtype), x.sum.w);
  }
  if (adds) x.denominator = 1.f;
  if (p.lse != nullptr && column == 0)
    p.lse[batch * p.lse_stride_batch + head * p.lse_stride_head + query] = log_sum_exp(x);
  const int64_t to =
      batch * p.o_stride_batch + query * p.o_stride_seq + head * p.o_stride_head + column;
  if (p.o_dtype == BLOCKFLASH_DTYPE_F32) {
    const float scale = reciprocal(x);
    *reinterpret_cast<float4*>(static_cast<float*>(p.o) + to) =
        make_float4(x.sum.x * scale, x.sum.y * scale, x.sum.z * scale, x.sum.w * scale);
  } else if (p.o_dtype == BLOCKFLASH_DTYPE_F16) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.o) + to) = quotient<__half>(x);
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.o) + to) = quotient<__nv_bfloat16>(x);
  }
}

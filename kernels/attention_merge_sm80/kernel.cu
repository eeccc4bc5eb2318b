// Combines attention over disjoint sets of keys, as between GPUs that hold parts of a cache or
// sequences that share a prefix, or adds gradients of such sets, which have no log-sum-exp. A
// thread computes eight columns of a row of o, in one fixed order.
#include "blockflash/config/kv_cache.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

using Params = blockflash_attention_merge_params;

constexpr int kColumns = AttentionMergeConfig::columns;
// Parts that are loaded before any is added. Memory bounds this kernel, and ten CTAs of threads
// with 48 registers load more at once than six CTAs whose threads hold twice as many parts.
template <class Element>
constexpr int kAtOnce = 4 / sizeof(Element);
static_assert(kColumns == 8, "columns of 16-bit elements are one access of 16 bytes");

// Two sums of four columns each, as partial results have them.
struct Row {
  Partial halves[2];
};

// The columns of a part as they are in memory.
template <class Element>
struct Columns {
  static constexpr int kWords = kColumns * sizeof(Element) / 4;
  uint32_t words[kWords];

  static __device__ __forceinline__ Columns load(const Element* at, bool is_aligned) {
    Columns columns;
    if (is_aligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(at)[i / 4];
        columns.words[i] = four.x, columns.words[i + 1] = four.y;
        columns.words[i + 2] = four.z, columns.words[i + 3] = four.w;
      }
      return columns;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Element) == 4) {
        columns.words[i] = reinterpret_cast<const uint32_t*>(at)[i];
      } else {
        const uint16_t* const pair = reinterpret_cast<const uint16_t*>(at) + 2 * i;
        columns.words[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
      }
    }
    return columns;
  }
  __device__ __forceinline__ float operator[](int column) const {
    if constexpr (sizeof(Element) == 4)
      return __uint_as_float(words[column]);
    else
      return ElementTraits<Element>::to_float(
          static_cast<uint16_t>(words[column / 2] >> (column % 2 * 16)));
  }
};

// The columns of some parts of a row, and their log-sum-exps in units of log2.
template <class Element>
struct Parts {
  Columns<Element> columns[kAtOnce<Element>];
  float logs[kAtOnce<Element>];
};

// The sums of one row over its parts; `logs` is the place of the row's first log-sum-exp.
template <class Element>
__device__ __forceinline__ Row sums(const Params& p, int64_t columns, int64_t logs) {
  const bool adds = p.parts_lse == nullptr;  // each part has a weight of exactly 1
  const auto log_of = [&](int part) {
    return adds ? 0.f : p.parts_lse[logs + part * p.parts_lse_stride_part] * kLog2e;
  };
  const int64_t strides = p.parts_stride_part | p.parts_stride_row | p.parts_stride_head;
  const bool is_aligned =
      (reinterpret_cast<uintptr_t>(p.parts) | strides * sizeof(Element)) % 16 == 0;
  const auto load = [&](int first) {
    Parts<Element> parts;
#pragma unroll
    for (int i = 0; i < kAtOnce<Element>; ++i) {
      parts.logs[i] = -CUDART_INF_F;
      if (first + i >= p.count) continue;
      const int64_t at = columns + (first + i) * p.parts_stride_part;
      const Element* const from = static_cast<const Element*>(p.parts) + at;
      parts.columns[i] = Columns<Element>::load(from, is_aligned);
      parts.logs[i] = log_of(first + i);
    }
    return parts;
  };

  Parts<Element> parts = load(0);
  Partial x = kNoPartial;
#pragma unroll
  for (int i = 0; i < kAtOnce<Element>; ++i) x.reference = fmaxf(x.reference, parts.logs[i]);
  for (int i = kAtOnce<Element>; i < p.count; ++i) x.reference = fmaxf(x.reference, log_of(i));
  Row row{{x, x}};
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce<Element>; ++i) {
      // A part without keys does not count, whatever its columns are.
      if (parts.logs[i] == -CUDART_INF_F) continue;
      const float weight = ptx::ex2_approx(parts.logs[i] - x.reference);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Partial& sum = row.halves[half];
        const int at = half * 4;
        sum.denominator += weight;
        sum.sum.x = fmaf(weight, parts.columns[i][at], sum.sum.x);
        sum.sum.y = fmaf(weight, parts.columns[i][at + 1], sum.sum.y);
        sum.sum.z = fmaf(weight, parts.columns[i][at + 2], sum.sum.z);
        sum.sum.w = fmaf(weight, parts.columns[i][at + 3], sum.sum.w);
      }
    }
    first += kAtOnce<Element>;
    if (first >= p.count) break;
    parts = load(first);
  }
  if (adds) row.halves[0].denominator = row.halves[1].denominator = 1.f;
  return row;
}

template <class Element>
__device__ __forceinline__ void store(const Params& p, int64_t at, const Row& row) {
  Element* const to = static_cast<Element*>(p.o) + at;
  const uint2 low = quotient<Element>(row.halves[0]), high = quotient<Element>(row.halves[1]);
  if ((p.o_stride_row | p.o_stride_head) % kColumns == 0) {
    ptx::store_16_bytes(to, {low.x, low.y, high.x, high.y});
  } else {
    reinterpret_cast<uint2*>(to)[0] = low;
    reinterpret_cast<uint2*>(to)[1] = high;
  }
}

template <>
__device__ __forceinline__ void store<float>(const Params& p, int64_t at, const Row& row) {
  float4* const to = reinterpret_cast<float4*>(static_cast<float*>(p.o) + at);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 sum = row.halves[half].sum;
    const float scale = reciprocal(row.halves[half]);
    to[half] = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_merge_params p) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  const int pieces = p.head_dim_v / kColumns;
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * AttentionMergeConfig::threads + threadIdx.x;
  const int64_t line = thread / pieces;  // a row of a head
  const int column = static_cast<int>(thread - line * pieces) * kColumns;
  const int64_t row = line / p.num_heads_q, head = line - row * p.num_heads_q;
  if (row >= p.rows) return;

  const int64_t columns = row * p.parts_stride_row + head * p.parts_stride_head + column;
  const int64_t logs = row * p.parts_lse_stride_row + head * p.parts_lse_stride_head;
  const Row sums_of_row = p.parts_dtype == BLOCKFLASH_DTYPE_F32 ? sums<float>(p, columns, logs)
                          : p.parts_dtype == BLOCKFLASH_DTYPE_F16
                              ? sums<__half>(p, columns, logs)
                              : sums<__nv_bfloat16>(p, columns, logs);
  if (p.lse != nullptr && column == 0)
    p.lse[row * p.lse_stride_row + head * p.lse_stride_head] = log_sum_exp(sums_of_row.halves[0]);
  const int64_t to = row * p.o_stride_row + head * p.o_stride_head + column;
  if (p.o_dtype == BLOCKFLASH_DTYPE_F32)
    store<float>(p, to, sums_of_row);
  else if (p.o_dtype == BLOCKFLASH_DTYPE_F16)
    store<__half>(p, to, sums_of_row);
  else
    store<__nv_bfloat16>(p, to, sums_of_row);
}

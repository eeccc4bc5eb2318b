// The parts of the attention backward that pass over rows once.
//
// Step 0, the row statistics: delta = rowsum(dO∘o) and the negative logarithm of every query, in
// the padded layout of the workspace. A CTA has 64 queries of a head, a quarter of a warp per
// query. Rows past the end of a sequence get the statistics of a query that sees nothing.
//
// Step 1, the gradient of the sinks: a CTA has a head and sums -exp(sink - lse)·delta over all of
// its queries in a fixed order. The sink is a logit without a value, so its dp is 0.
//
// Step 2, zeros in the rows of dq, dk and dv that belong to no sequence: a CTA has 64 rows, counted
// through dq and then through dk and dv.
#include "blockflash/attention/gradient.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/params/attention_bwd.h"

namespace blockflash {
namespace {

using Config = AttentionDeltaConfig;
using Element = Config::Element;
using Params = blockflash_attention_bwd_params;

// The queries of a sequence: its first row in packed tensors and its length.
__device__ __forceinline__ PackedRows queries_of(const Params& params, int batch) {
  const blockflash_attention_fwd_params& p = params.base;
  if (p.cu_seqlens_q == nullptr) return {0, p.seqlen_q};
  return PackedRows::of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
}

__device__ __forceinline__ int64_t statistics_of(const Params& params, int batch, int head,
                                                 PackedRows queries) {
  const bool packed = params.base.cu_seqlens_q != nullptr;
  return batch * params.statistics_stride_batch * !packed + head * params.statistics_stride_head +
         statistics_row(packed, batch, queries.begin);
}

__device__ __forceinline__ void store_statistics(const Params& params) {
  const blockflash_attention_fwd_params& p = params.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int tiles = (p.seqlen_q + kStatisticsTile - 1) / kStatisticsTile;
  const int batch_head = blockIdx.x / tiles, first = blockIdx.x % tiles * kStatisticsTile;
  const int batch = batch_head / p.num_heads_q, head = batch_head % p.num_heads_q;
  const PackedRows queries = queries_of(params, batch);
  if (first >= queries.length) return;
  const int64_t statistics = statistics_of(params, batch, head, queries);
  if (params.semaphores != nullptr && threadIdx.x == 0)
    params.semaphores[(statistics + first) / kStatisticsTile] = 0;
  const Element* const o = static_cast<const Element*>(p.o) + batch * p.o_stride_batch * !packed +
                           head * p.o_stride_head;
  const Element* const d_o = static_cast<const Element*>(params.d_o) +
                             batch * params.d_o_stride_batch * !packed +
                             head * params.d_o_stride_head;
  // All rows of a lane at a time, so that their loads are in flight together. Columns are not
  // unrolled: more CTAs on an SM keep more loads in flight than more registers do.
  constexpr int kLanes = 8, kRows = Config::threads / kLanes, kEach = kStatisticsTile / kRows;
  static_assert(kEach * kRows == kStatisticsTile && kEach <= kLanes, "a lane stores one row");
  const int lane = threadIdx.x % kLanes, r = threadIdx.x / kLanes;
  // A lane stores the statistics of one of the rows.
  const int own = first + r + lane * kRows;
  const bool stores = lane < kEach, stores_inside = stores && own < queries.length;
  float lse = 0.f;
  if (stores_inside)
    lse = p.lse[batch * p.lse_stride_batch + head * p.lse_stride_head + queries.begin + own];
  float sums[kEach] = {};
#pragma unroll 1
  for (int d = lane * 8; d < p.head_dim_v; d += kLanes * 8) {
    uint4 x[kEach], y[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = first + r + i * kRows;
      const int64_t at = static_cast<int64_t>(queries.begin) + row;
      const bool inside = row < queries.length;
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      if (inside) {
        x[i] = *reinterpret_cast<const uint4*>(o + at * p.o_stride_seq + d);
        y[i] = *reinterpret_cast<const uint4*>(d_o + at * params.d_o_stride_seq + d);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t a[4] = {x[i].x, x[i].y, x[i].z, x[i].w},
                     b[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int shift = 0; shift < 32; shift += 16)
          sums[i] =
              fmaf(ElementTraits<Element>::to_float(static_cast<uint16_t>(a[j] >> shift)),
                   ElementTraits<Element>::to_float(static_cast<uint16_t>(b[j] >> shift)), sums[i]);
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    if (lane == i) sum = sums[i];
  }
  if (!stores) return;
  // A query that sees nothing has an lse of -inf. Its probabilities are 0.
  const float negative_log = stores_inside && lse != -CUDART_INF_F
                                 ? negative_log_of(lse, p.scores.softcap)
                                 : -CUDART_INF_F;
  params.negative_logs[statistics + own] = negative_log;
  params.deltas[statistics + own] = negative_log == -CUDART_INF_F ? 0.f : sum;
}

__device__ __forceinline__ void store_sink_gradient(const Params& params) {
  const blockflash_attention_fwd_params& p = params.base;
  const int head = blockIdx.x;
  const float sink = NaturalUnits::sink(p.scores, head);
  float sum = 0.f;
  for (int batch = 0; batch < p.batch; ++batch) {
    const PackedRows queries = queries_of(params, batch);
    const int64_t statistics = statistics_of(params, batch, head, queries);
    for (int row = threadIdx.x; row < queries.length; row += Config::threads) {
      const float log = params.negative_logs[statistics + row];
      // Selected, since a query that sees nothing has no gradient whatever the sink is.
      if (log != -CUDART_INF_F)
        sum -= ptx::ex2_approx(p.scores.softcap > 0.f ? FusedExponent{}(sink, kLog2e, log)
                                                      : ExponentOfLarge{}(sink, kLog2e, log)) *
               params.deltas[statistics + row];
    }
  }
  __shared__ float partial[Config::threads];
  partial[threadIdx.x] = sum;
#pragma unroll 1
  for (int half = Config::threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.d_sink[head] = partial[0];
}

// Whether a row belongs to a sequence, so that another step writes it. The sequence that bisection
// finds is looked at, so where offsets do not ascend, zeros are written in vain and none is
// missing.
__device__ __forceinline__ bool in_sequence(const int32_t* cu_seqlens, int sequences, int64_t row,
                                            int total, int longest) {
  if (cu_seqlens == nullptr || sequences == 0) return false;
  int sequence = 0, end = sequences;
  while (end - sequence > 1) {
    const int middle = sequence + (end - sequence) / 2;
    (cu_seqlens[middle] <= row ? sequence : end) = middle;
  }
  const PackedRows rows = PackedRows::of(cu_seqlens, sequence, total, longest);
  return row >= rows.begin && row - rows.begin < rows.length;
}

// Every row of a tensor counts once, whatever the sequences are.
__device__ __forceinline__ void store_zeros(const Params& params) {
  const blockflash_attention_fwd_params& p = params.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t rows_q = packed ? p.total_q : static_cast<int64_t>(p.batch) * p.seqlen_q,
                rows_kv = packed ? p.total_kv : static_cast<int64_t>(p.batch) * p.seqlen_kv;
  const auto clear = [&](void* tensor, int64_t row, int64_t batch_stride, int64_t seq_stride,
                         int64_t head_stride, int seqlen, int heads, int columns) {
    const int64_t batch = packed ? 0 : row / seqlen;
    Element* const first =
        static_cast<Element*>(tensor) + batch * batch_stride + (row - batch * seqlen) * seq_stride;
    const int chunks = columns / 8;
    for (int i = threadIdx.x % 32; i < heads * chunks; i += 32)
      *reinterpret_cast<uint4*>(first + i / chunks * head_stride + i % chunks * 8) =
          make_uint4(0, 0, 0, 0);
  };
  for (int r = threadIdx.x / 32; r < kStatisticsTile; r += Config::threads / 32) {
    int64_t row = static_cast<int64_t>(blockIdx.x) * kStatisticsTile + r;
    if (row < rows_q) {
      if (in_sequence(p.cu_seqlens_q, p.batch, row, p.total_q, p.seqlen_q)) continue;
      clear(params.dq, row, params.dq_stride_batch, params.dq_stride_seq, params.dq_stride_head,
            p.seqlen_q, p.num_heads_q, p.head_dim_qk);
      continue;
    }
    row -= rows_q;
    if (row >= rows_kv) return;
    if (in_sequence(p.cu_seqlens_kv, p.batch, row, p.total_kv, p.seqlen_kv)) continue;
    clear(params.dk, row, params.dk_stride_batch, params.dk_stride_seq, params.dk_stride_head,
          p.seqlen_kv, p.num_heads_kv, p.head_dim_qk);
    clear(params.dv, row, params.dv_stride_batch, params.dv_stride_seq, params.dv_stride_head,
          p.seqlen_kv, p.num_heads_kv, p.head_dim_v);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_params params) {
  using namespace blockflash;
  if constexpr (Config::step == 0)
    store_statistics(params);
  else if constexpr (Config::step == 1)
    store_sink_gradient(params);
  else
    store_zeros(params);
}

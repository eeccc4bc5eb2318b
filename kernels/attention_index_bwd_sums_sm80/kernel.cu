// What the parts of the gradients of attention by lists add up to, for sm_80 and newer: dk and dv
// of bins that have several items, or none, and dq of the queries of a pass. All sums have a fixed
// order.
#include "blockflash/attention/index_visits.cuh"
#include "blockflash/config/attention_index_bwd.cuh"
#include "blockflash/mma/element.cuh"

namespace blockflash {
namespace {

using Params = blockflash_attention_index_bwd_params;
using Config = AttentionIndexSumsConfig;
using Element = Config::Element;
constexpr int kColumns = 8;  // of a thread
constexpr int kLoads = 4;    // of parts in flight per thread

__device__ __forceinline__ void store(Element* to, const float (&x)[kColumns], float factor) {
  uint32_t words[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    words[i] = ElementTraits<Element>::pack(x[2 * i] * factor, x[2 * i + 1] * factor);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void add(float (&sum)[kColumns], const float* x) {
  const float4 low = reinterpret_cast<const float4*>(x)[0],
               high = reinterpret_cast<const float4*>(x)[1];
  const float values[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] += values[i];
}

// dk and dv of 64 keys of a bin.
__device__ __forceinline__ void sum_keys(const Params& p) {
  const blockflash_attention_bwd_params& bwd = p.bwd;
  const blockflash_attention_fwd_params& fwd = bwd.base;
  const int width = 1 << bin_width_log2(p), parts_of_bin = width >> kBinLog2;
  int rest = blockIdx.x;
  const int first = rest % parts_of_bin << kBinLog2;  // key of the bin
  rest /= parts_of_bin;
  const int bin = rest % p.bins, head = rest / p.bins;
  const int set = set_of_head(p, head);
  const int64_t of_set = static_cast<int64_t>(set) * p.bins + bin;
  const int visits = p.lengths[of_set];
  const int items = (visits + p.item_visits - 1) / p.item_visits;
  // The CTA of a single item has done it. With nothing to add, sums stay as they are.
  if (items == 1 || (items == 0 && !p.first_pass && !p.last_pass)) return;

  __shared__ IndexedSequence agreed;
  if (threadIdx.x == 0) agreed = IndexedSequence::of_bin(p, bin);
  __syncthreads();
  const IndexedSequence& sequence = agreed;
  const int first_key = ((bin - sequence.first_bin) << bin_width_log2(p)) + first;
  const bool packed = fwd.cu_seqlens_q != nullptr;
  const int chunks = p.tile_head_dim / kColumns;
  const int64_t tile = static_cast<int64_t>(p.block_kv) * p.tile_head_dim;  // of dk or dv
  const int64_t of_bin = width / p.block_kv * 2 * tile;                     // of an item or bin
  const float* const parts =
      p.key_parts + (int64_t{head} * p.max_parts + min(p.first_part[of_set], p.max_parts)) * of_bin;
  float* const sums = p.key_sums + (int64_t{head} * p.bins + bin) * of_bin;
  const int count = min(items, p.max_parts - min(p.first_part[of_set], p.max_parts));
  for (int i = threadIdx.x; i < 2 * chunks << kBinLog2; i += Config::threads) {
    const int column = i % chunks * kColumns;
    const int key = i / chunks & (1 << kBinLog2) - 1, of_bin_key = first + key;
    const bool is_dv = i >= chunks << kBinLog2;
    const int64_t at = (of_bin_key / p.block_kv * 2 + is_dv) * tile +
                       of_bin_key % p.block_kv * p.tile_head_dim + column;
    float sum[kColumns] = {};
    if (!p.first_pass) add(sum, sums + at);
#pragma unroll 4
    for (int part = 0; part < count; ++part) add(sum, parts + part * of_bin + at);
    if (!p.last_pass) {
      reinterpret_cast<float4*>(sums + at)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      reinterpret_cast<float4*>(sums + at)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      continue;
    }
    if (first_key + key >= sequence.keys.length) continue;
    const int64_t row = (packed ? sequence.keys.begin : 0) + int64_t{first_key} + key;
    const int64_t batch = packed ? 0 : sequence.batch;
    if (!is_dv && column < fwd.head_dim_qk)
      store(static_cast<Element*>(bwd.dk) + batch * bwd.dk_stride_batch + row * bwd.dk_stride_seq +
                head * bwd.dk_stride_head + column,
            sum, fwd.scores.scale);
    if (is_dv && column < fwd.head_dim_v)
      store(static_cast<Element*>(bwd.dv) + batch * bwd.dv_stride_batch + row * bwd.dv_stride_seq +
                head * bwd.dv_stride_head + column,
            sum, 1.f);
  }
}

// dq of 8 columns of a query and head.
__device__ __forceinline__ void sum_queries(const Params& p) {
  const blockflash_attention_bwd_params& bwd = p.bwd;
  const blockflash_attention_fwd_params& fwd = bwd.base;
  const int chunks = fwd.head_dim_qk / kColumns;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * Config::threads + threadIdx.x;
  const int64_t head_and_query = index / chunks;
  const int column = static_cast<int>(index - head_and_query * chunks) * kColumns;
  const int of_pass = static_cast<int>(head_and_query / fwd.num_heads_q);
  const int head = static_cast<int>(head_and_query - int64_t{of_pass} * fwd.num_heads_q);
  if (of_pass >= p.queries) return;
  const int heads_per_key_head = fwd.num_heads_q / fwd.num_heads_kv;
  const int head_kv = head / heads_per_key_head, of_key_head = head % heads_per_key_head;
  const int list = of_key_head / p.group, of_group = of_key_head % p.group;

  const int64_t entries = entries_of_set(p), rows = entries * p.group;
  const int32_t* const places =
      p.places + set_of_head(p, head_kv) * entries +
      (static_cast<int64_t>(list) * p.queries + of_pass) * p.lists.capacity;
  const int tiles = (1 << bin_width_log2(p)) / p.block_kv;
  const int of_columns = column / (p.tile_head_dim / p.dq_columns);
  float sum[kColumns] = {};
  for (int first = 0; first < p.lists.capacity; first += kLoads) {
    int64_t row[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int place = first + i < p.lists.capacity ? places[first + i] : -1;
      row[i] = place >= 0 && place < entries ? int64_t{place} * p.group + of_group : -1;
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t of_tile = (int64_t{head_kv} * tiles + tile) * rows;
      uint4 part[kLoads];
      float factor[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        part[i] = make_uint4(0, 0, 0, 0), factor[i] = 0.f;
        if (row[i] < 0) continue;
        part[i] = __ldcs(reinterpret_cast<const uint4*>(
            p.dq_parts + (of_tile + row[i]) * fwd.head_dim_qk + column));
        factor[i] = p.dq_factors[(of_tile + row[i]) * p.dq_columns + of_columns];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          sum[j] = fmaf(ElementTraits<__half>::to_float(words[j / 2] >> 16 * (j % 2)), factor[i],
                        sum[j]);
      }
    }
  }
  const int query = p.first_query + of_pass;
  const bool packed = fwd.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : query / fwd.seqlen_q;
  store(static_cast<Element*>(bwd.dq) + batch * bwd.dq_stride_batch +
            (query - batch * (packed ? 0 : fwd.seqlen_q)) * bwd.dq_stride_seq +
            head * bwd.dq_stride_head + column,
        sum, fwd.scores.scale);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_bwd_params p) {
  using namespace blockflash;
  if (p.step == BLOCKFLASH_INDEX_SUM_KEYS)
    sum_keys(p);
  else
    sum_queries(p);
}

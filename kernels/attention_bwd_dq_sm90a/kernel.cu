// The last step of attention backward on Hopper where f32 sums are left in the workspace: dq, to
// which blocks of keys have added in semaphore order, and parts of dk and dv, which are added here
// in ascending order where the query heads of a group were split over CTAs.
//
// A CTA has 64 queries of a head, or 64 keys of a head of keys and one of its gradients. The sums
// are in the order of the accumulators that they come from, see SumsOrder.
#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/sums_order.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

constexpr int kD = AttentionBwdSumsConfig::head_dim;
constexpr int kTile = kStatisticsTile * kD;  // values
using Element = AttentionBwdSumsConfig::Element;
using Order = SumsOrder<kD>;

// 64 rows of an output.
struct Rows {
  Element* out;  // row 0 of the sequence
  int64_t stride;
  int first, end, columns;
  float factor;
};

// `columns` columns of a warp's 16 rows: `parts` tiles from `tile` on, `stride` values apart.
template <int columns>
__device__ __forceinline__ void round_columns(const float* tile, int parts, int64_t stride,
                                              int column, const Rows& rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float4* from = reinterpret_cast<const float4*>(tile + Order::of_warp(warp)) + lane;
  float sums[1][columns / 8][4] = {};
#pragma unroll 1
  for (int part = 0; part < parts; ++part, from += stride / 4)
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      const float4 x = from[i * 32];
      sums[0][i][0] += x.x, sums[0][i][1] += x.y, sums[0][i][2] += x.z, sums[0][i][3] += x.w;
    }
  store_rows<Element>(sums, rows.factor, rows.out, rows.stride, rows.first + warp % 4 * 16,
                      rows.end, column, rows.columns, lane);
}

__device__ __forceinline__ void round_tile(const float* tile, int parts, int64_t stride,
                                           const Rows& rows) {
  const int half = threadIdx.x / 128;
  if (Order::kFirst == Order::kSecond || half == 0)
    round_columns<Order::kFirst>(tile, parts, stride, half * Order::kFirst, rows);
  else
    round_columns<Order::kSecond>(tile, parts, stride, Order::kFirst, rows);
}

__device__ __forceinline__ void round_queries(const blockflash_attention_bwd_tma_params& params,
                                              int batch_head, int first) {
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int batch = batch_head / p.num_heads_q, head = batch_head % p.num_heads_q;
  PackedRows queries = {0, p.seqlen_q};
  if (packed) queries = PackedRows::of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
  if (first >= queries.length) return;
  const int64_t statistics = batch * b.statistics_stride_batch * !packed +
                             head * b.statistics_stride_head +
                             statistics_row(packed, batch, queries.begin);
  const int64_t tile = (statistics + first) / kStatisticsTile;
  Element* const out = static_cast<Element*>(b.dq) + batch * b.dq_stride_batch * !packed +
                       head * b.dq_stride_head + queries.begin * b.dq_stride_seq;
  const Rows rows = {out, b.dq_stride_seq, first, queries.length, p.head_dim_qk, p.scores.scale};
  // Nobody has written a tile that no block of keys visits.
  round_tile(params.dq_sums + tile * kTile, b.semaphores[tile] != 0 ? 1 : 0, 0, rows);
}

__device__ __forceinline__ void round_keys(const blockflash_attention_bwd_tma_params& params,
                                           int index) {
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const int tiles = key_tiles(p);
  const bool of_k = index % 2 == 0;
  const int tile = index / 2 % tiles, batch_head = index / 2 / tiles;
  const int batch = batch_head / p.num_heads_kv, head = batch_head % p.num_heads_kv;
  const int first = tile * kStatisticsTile;
  if (first >= p.seqlen_kv) return;
  const Rows rows =
      of_k ? Rows{static_cast<Element*>(b.dk) + batch * b.dk_stride_batch + head * b.dk_stride_head,
                  b.dk_stride_seq,
                  first,
                  p.seqlen_kv,
                  p.head_dim_qk,
                  p.scores.scale}
           : Rows{static_cast<Element*>(b.dv) + batch * b.dv_stride_batch + head * b.dv_stride_head,
                  b.dv_stride_seq,
                  first,
                  p.seqlen_kv,
                  p.head_dim_v,
                  1.f};
  const int64_t of_part = static_cast<int64_t>(tiles) * 2 * kTile;
  round_tile(params.key_parts + batch_head * params.head_parts * of_part +
                 static_cast<int64_t>(index % (2 * tiles)) * kTile,
             params.head_parts, of_part, rows);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_tma_params params) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  const blockflash_attention_fwd_params& p = params.base.base;
  const int tiles = (p.seqlen_q + kStatisticsTile - 1) / kStatisticsTile;
  const int of_queries = params.base.semaphores != nullptr ? tiles * p.num_heads_q * p.batch : 0;
  const int index = blockIdx.x;
  if (index < of_queries)
    round_queries(params, index / tiles, index % tiles * kStatisticsTile);
  else
    round_keys(params, index - of_queries);
}

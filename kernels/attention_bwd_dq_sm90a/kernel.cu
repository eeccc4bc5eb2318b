// The last step of attention backward on Hopper where dq is summed in semaphore order: sums to dq.
//
// A CTA has 64 queries of a head. The sums are in the order of the accumulators that they come
// from: eight warps have 16 queries and half of the columns each.
#include "blockflash/attention/gradient.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/params/attention_bwd.h"

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_tma_params params) {
  using namespace blockflash;
  using Element = AttentionBwdSumsConfig::Element;
  constexpr int kD = AttentionBwdSumsConfig::head_dim;
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int tiles = (p.seqlen_q + kStatisticsTile - 1) / kStatisticsTile;
  const int batch_head = blockIdx.x / tiles, first = blockIdx.x % tiles * kStatisticsTile;
  const int batch = batch_head / p.num_heads_q, head = batch_head % p.num_heads_q;
  PackedRows queries = {0, p.seqlen_q};
  if (packed) queries = PackedRows::of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
  if (first >= queries.length) return;
  const int64_t statistics = batch * b.statistics_stride_batch * !packed +
                             head * b.statistics_stride_head +
                             statistics_row(packed, batch, queries.begin);
  const int64_t tile = (statistics + first) / kStatisticsTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kValues = kStatisticsTile * kD / 256;
  // Nobody has written a tile that no block of keys visits.
  const bool visited = b.semaphores[tile] != 0;
  const float4* const from =
      reinterpret_cast<const float4*>(params.dq_sums + tile * (kStatisticsTile * kD)) +
      warp * (kValues / 4 * 32) + lane;
  float dq[1][kValues / 4][4];
#pragma unroll
  for (int i = 0; i < kValues / 4; ++i) {
    const float4 x = visited ? from[i * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
    dq[0][i][0] = x.x, dq[0][i][1] = x.y, dq[0][i][2] = x.z, dq[0][i][3] = x.w;
  }
  Element* const out = static_cast<Element*>(b.dq) + batch * b.dq_stride_batch * !packed +
                       head * b.dq_stride_head + queries.begin * b.dq_stride_seq;
  store_rows<Element>(dq, p.scores.scale, out, b.dq_stride_seq, first + warp % 4 * 16,
                      queries.length, warp / 4 * (kD / 2), p.head_dim_qk, lane);
}

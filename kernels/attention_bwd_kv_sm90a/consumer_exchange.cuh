// Two consumer warpgroups that share 64 keys, for head dimensions whose dk and dv do not fit into
// the registers of one: each computes the scores of half of the queries, the first accumulates dv
// and the second dk. So the first needs the probabilities of the second, and the second the
// gradients of the scores of the first. They exchange them through shared memory.
#pragma once

#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/stmatrix.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

// Two tiles of 64 keys × 64 queries, used alternately: of the first 32 queries it holds ds, of the
// others p.
constexpr int kExchangeOffset = kRingEnd, kExchangeBytes = 64 * 128;
static_assert(kResidentRows == 64 * Config::warpgroups ||
                  kExchangeOffset + 2 * kExchangeBytes <= kStatisticsOffset,
              "manifest and kernel disagree on shared memory");

__device__ __forceinline__ void consume_exchanging(const Params& params, uint32_t smem,
                                                   const Barriers& barriers, int warpgroup) {
  constexpr int kQueries = kStreamRows / 2;
  using Product = ptx::Wgmma<kD, Element>;
  const blockflash_attention_fwd_params& p = params.base.base;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const int first_of_mine = warpgroup * kQueries;
  float s[kQueries / 2], dp[kQueries / 2], gradient[kD / 2];
  uint32_t p16[kQueries / 4], ds16[kQueries / 4];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) gradient[i] = 0.f;

  const uint32_t k = ptx::wgmma_low(smem), v = k + (kResidentBytes >> 4);
  const uint32_t q = ptx::wgmma_low(smem + kFirstOffset + first_of_mine * 128),
                 d_o = ptx::wgmma_low(smem + kSecondOffset + first_of_mine * 128);
  // The rows by which this warpgroup multiplies: of dO for dv, of Q for dk. The other's scores come
  // from the half of the exchanged tile that belongs to the other's queries.
  const uint32_t rows =
      ptx::wgmma_low(smem + (warpgroup == 0 ? kSecondOffset : kFirstOffset), kStreamPanel);
  const uint32_t theirs = ptx::wgmma_low(smem + kExchangeOffset) + (1 - warpgroup) * 4;
  const uint32_t row_out = smem + kExchangeOffset + (warp_row + lane % 16) * 128;

  auto at = PipelineState<kStages>::consumer();
  int before = -1;  // stage of the tile before
  uint32_t exchange = 0;
#pragma unroll 1
  while (true) {
    at.wait(barriers.first);
    const int first_query = published_row(smem, at.stage);
    if (first_query < 0) break;
    if (before < 0) wait_full<1>(barriers.resident, 0);
    const uint32_t stage = at.stage * (kStreamBytes >> 4);
    ptx::wgmma_fence();
    start_scores<kQueries>(s, k, kResidentPanel, q + stage, kStreamPanel);
    // The scores are queued behind the gradient of the tile before, whose stage is now read.
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(gradient);
    if (before >= 0) barriers.release(before);
    at.wait(barriers.second);
    if (before < 0) wait_full<1>(barrier_of(barriers.resident, 1), 0);
    ptx::wgmma_fence();
    start_scores<kQueries>(dp, v, kResidentPanel, d_o + stage, kStreamPanel);
    differentiate_scores<false>(
        s, dp, p16, ds16, p.scores,
        has_large<kQueries>(first_statistics(smem, at.stage) + first_of_mine * 4),
        visible_pairs(p, warp_row, first_query + first_of_mine, kQueries),
        statistics_at(first_statistics(smem, at.stage) + first_of_mine * 4),
        statistics_at(second_statistics(smem, at.stage) + first_of_mine * 4), [] {});

    uint32_t mine[kQueries / 4];
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      mine[i] = warpgroup == 0 ? p16[i] : ds16[i];
      ds16[i] = warpgroup == 0 ? ds16[i] : p16[i];
    }
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step) {
      const uint32_t words[4] = {ds16[4 * step], ds16[4 * step + 1], ds16[4 * step + 2],
                                 ds16[4 * step + 3]};
      const int chunk = warpgroup * 4 + 2 * step + lane / 16;
      ptx::stmatrix_x4(row_out + exchange * kExchangeBytes + ((chunk ^ lane % 8) * 16), words);
    }
    ptx::fence_proxy_async();
    // Both have written. Nobody still reads the tile that is written next: its product was complete
    // when its reader came here.
    ptx::named_barrier_sync(1, 256);
    ptx::wgmma_fence();
    const uint32_t b = rows + stage, a = theirs + exchange * (kExchangeBytes >> 4);
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step)
      Product::template rs<true, true>(
          gradient, mine + 4 * step,
          ptx::wgmma_descriptor_of(b + (warpgroup * kQueries / 16 + step) * 128));
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step)
      Product::template ss<true, true>(
          gradient, ptx::wgmma_descriptor_of(a + step * 2),
          ptx::wgmma_descriptor_of(b + ((1 - warpgroup) * kQueries / 16 + step) * 128));
    ptx::wgmma_commit_group();
    exchange ^= 1;
    before = at.stage;
    at.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(gradient);
  if (warpgroup == 0)
    store_dv(params, gradient, warp_row);
  else
    store_dk(params, gradient, warp_row);
}

}  // namespace
}  // namespace blockflash

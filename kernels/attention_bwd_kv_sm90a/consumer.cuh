// A consumer warpgroup with 64 keys of its own.
#pragma once

#include "blockflash/attention/gradient_fragments.cuh"
#include "blockflash/params/attention_bwd.h"
#include "tiles.cuh"

namespace blockflash {
namespace {

// Whether K and V are multiplied from registers.
constexpr bool kKeysInRegisters = kAlone && kD <= 64;

// Of the 16 keys of a warp, a lane holds g and g + 8 (g = lane / 4) in every accumulator.
__device__ __forceinline__ void consume(const Params& params, uint32_t smem,
                                        const Barriers& barriers, int warpgroup) {
  const blockflash_attention_fwd_params& p = params.base.base;
  const int warp_row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const GradientPingPong ping_pong{warpgroup};
  float s[kStreamRows / 2], dp[kStreamRows / 2], dk[kD / 2], dv[kD / 2];
  uint32_t p16[kStreamRows / 4], ds16[kStreamRows / 4];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.f;

  const uint32_t k = ptx::wgmma_low(smem + warpgroup * 64 * 128), v = k + (kResidentBytes >> 4);
  const uint32_t q = ptx::wgmma_low(smem + kFirstOffset),
                 q_rows = ptx::wgmma_low(smem + kFirstOffset, kStreamPanel),
                 d_o = ptx::wgmma_low(smem + kSecondOffset),
                 d_o_rows = ptx::wgmma_low(smem + kSecondOffset, kStreamPanel);

  ping_pong.open();
  auto at = PipelineState<kStages>::consumer();
  int before = -1;  // stage of the tile before
  Fragments of_k, of_v;
  if constexpr (kKeysInRegisters) {
    at.wait(barriers.first);
    if (published_row(smem, 0) >= 0) {
      wait_full<1>(barriers.resident, 0), wait_full<1>(barrier_of(barriers.resident, 1), 0);
      load_fragments(of_k, smem), load_fragments(of_v, smem + kResidentBytes);
    }
  }
#pragma unroll 1
  while (true) {
    at.wait(barriers.first);
    const int first_query = published_row(smem, at.stage);
    if (first_query < 0) break;
    if (!kKeysInRegisters && before < 0) wait_full<1>(barriers.resident, 0);
    const uint32_t stage = at.stage * (kStreamBytes >> 4);
    ptx::wgmma_fence();
    if constexpr (kKeysInRegisters)
      start_scores<kStreamRows>(s, of_k, q + stage, kStreamPanel);
    else
      start_scores<kStreamRows>(s, k, kResidentPanel, q + stage, kStreamPanel);
    StreamPairs pairs;
    if constexpr (kHasTerms) pairs = load_pairs(params, smem, at.stage, warpgroup);
    // The scores are queued behind the gradients of the tile before, whose stage is now read.
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(dk), ptx::wgmma_pin(dv);
    if (before >= 0) barriers.release(before);
    at.wait(barriers.second);
    if (!kKeysInRegisters && before < 0) wait_full<1>(barrier_of(barriers.resident, 1), 0);
    ptx::wgmma_fence();
    if constexpr (kKeysInRegisters)
      start_scores<kStreamRows>(dp, of_v, d_o + stage, kStreamPanel);
    else
      start_scores<kStreamRows>(dp, v, kResidentPanel, d_o + stage, kStreamPanel);
    ping_pong.arrive();
    if constexpr (kHasTerms) {
      pairs.restrict(visible_pairs(p, warp_row, first_query, kStreamRows));
      differentiate_with_terms<false>(s, dp, p16, ds16, p.scores,
                                      has_large<kStreamRows>(first_statistics(smem, at.stage)),
                                      added_alibi(params, smem, at.stage, Keys::shared(), warp_row),
                                      pairs, statistics_at(first_statistics(smem, at.stage)),
                                      statistics_at(second_statistics(smem, at.stage)), [] {});
    } else {
      differentiate_scores<false>(s, dp, p16, ds16, p.scores,
                                  has_large<kStreamRows>(first_statistics(smem, at.stage)),
                                  visible_pairs(p, warp_row, first_query, kStreamRows),
                                  statistics_at(first_statistics(smem, at.stage)),
                                  statistics_at(second_statistics(smem, at.stage)), [] {});
    }
    ping_pong.sync();
    ptx::wgmma_fence();
    start_gradient<kStreamRows / 16>(dv, p16, d_o_rows + stage);
    start_gradient<kStreamRows / 16>(dk, ds16, q_rows + stage);
    ptx::wgmma_commit_group();
    before = at.stage;
    at.advance();
  }
  ping_pong.close();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dk), ptx::wgmma_pin(dv);
  store_dv(params, dv, warp_row);
  store_dk(params, dk, warp_row);
}

}  // namespace
}  // namespace blockflash

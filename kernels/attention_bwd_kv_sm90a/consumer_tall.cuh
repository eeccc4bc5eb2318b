// A consumer warpgroup with 64 keys of its own that visits 128 queries at a time and computes 64 of
// their rows of dq. Twice the queries of `consumer_turns.cuh` halve what every tile costs beside
// its products; up to a head_dim of 64 they fit. The warpgroups are not made to take turns at the
// tensor cores here: tiles are long enough that they fall out of step by themselves.
#pragma once

#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/stmatrix.cuh"
#include "turns.cuh"

namespace blockflash {
namespace {

template <int kQueries>
__device__ __forceinline__ void consume_tall(const Params& params, uint32_t smem,
                                             const Barriers& barriers, int warpgroup) {
  static_assert(kQueries == 128 && kPanels == 1, "two panels of scores, one of everything else");
  using Product = ptx::Wgmma<kD, Element>;
  const blockflash_attention_fwd_params& p = params.base.base;
  const TurnBarriers turn_barriers(smem);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 - 64;
  float s[kQueries / 2], dp[kQueries / 2], dk[kD / 2], dv[kD / 2], dq[kD / 2];
  uint32_t p16[kQueries / 4], ds16[kQueries / 4];
  const uint32_t k = ptx::wgmma_low(smem + warpgroup * 64 * 128), v = k + (kResidentBytes >> 4);
  const uint32_t q = ptx::wgmma_low(smem + kFirstOffset),
                 d_o = ptx::wgmma_low(smem + kSecondOffset), k_rows = ptx::wgmma_low(smem);
  // The queries of this warpgroup's dq.
  const uint32_t scores = ptx::wgmma_low(smem + kScoresOffset + warpgroup * kScoresPanel);
  // The address of a lane's first 16 bytes of gradients of scores. Those of its further ones in a
  // panel differ in bits of the swizzle only, since rows are 128 bytes.
  const uint32_t score_row =
      smem + kScoresOffset + (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
  // Not kept, since registers are scarce. Sums of 64 queries lie as eight warps with half of the
  // columns each would leave them.
  const auto staging = [=] {
    const uint32_t thread = ptx::opaque(threadIdx.x) - 128;
    return smem + kStagingOffset + thread / 128 * kSumsTile + thread / 32 % 4 * (kSumsTile / 8) +
           thread % 32 * 16;
  };

  const auto start_dq = [&](uint32_t n) {
    const uint32_t a = scores + (n & 1) * (kScoresBytes >> 4);
#pragma unroll
    for (int step = 0; step < kResidentRows / 16; ++step) {
      const uint64_t a_step = ptx::wgmma_descriptor_of(a) + step * 128,
                     b_step = ptx::wgmma_descriptor_of(k_rows) + step * 128;
      if (step == 0)
        Product::template ss<false, true, true>(dq, a_step, b_step);
      else
        Product::template ss<true, true, true>(dq, a_step, b_step);
    }
    ptx::wgmma_commit_group();
  };
  const auto stage_dq = [&](uint32_t n, uint32_t row) {
    ptx::mbarrier_wait(turn_barriers.staged_empty + 8 * (n & 1), n / 2 & 1 ^ 1);
#pragma unroll
    for (int i = 0; i < kD / 8; ++i)
      ptx::store_shared_float4(row + (n & 1) * kSumsBytes + i / 4 * (kSumsTile / 2) + i % 4 * 512,
                               dq + 4 * i);
  };

  uint32_t n = 0;  // number of the tile, and from kNextBlock on that of the block
#pragma unroll 1
  for (;; n = n % 4 + (n / kNextBlock + 1) * kNextBlock) {
    const uint32_t number = n / kNextBlock;
    ptx::mbarrier_wait(turn_barriers.blocks + 8 * (number & 1), number / 2);
    const int tiles = __shfl_sync(~0u, Block::at(number).all_tiles, 0);
    if (tiles < 0) break;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.f;
    if (tiles > 0) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i, ++n) {
        const bool is_first = i == 0;
        const uint32_t before = n - 1;
        ptx::mbarrier_wait(barriers.first + 8 * (n & 1), n / 2 & 1);
        if (is_first) ptx::mbarrier_wait(barriers.resident, Block::at(number).resident_parity);
        const uint32_t stage = (n & 1) * (kStreamBytes >> 4);
        ptx::wgmma_fence();
        start_scores<kQueries>(s, k, kResidentPanel, q + stage, kStreamPanel);
        // The scores are queued behind dk of the tile before, whose Q is read then.
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(dk), ptx::wgmma_pin(ds16);
        if (!is_first) arrive(barriers.first_empty, before);
        ptx::mbarrier_wait(barriers.second + 8 * (n & 1), n / 2 & 1);
        if (is_first) ptx::mbarrier_wait(barriers.resident + 8, Block::at(number).resident_parity);
        ptx::wgmma_fence();
        start_scores<kQueries>(dp, v, kResidentPanel, d_o + stage, kStreamPanel);
        differentiate_all<false, 0>(s, dp, p16, ds16, p.scores,
                                    has_large<kQueries>(first_statistics(smem, n & 1)),
                                    statistics_at(first_statistics(smem, n & 1)),
                                    statistics_at(second_statistics(smem, n & 1)), [&] {
                                      if (i >= 2) pass_on(turn_barriers.staged, n);
                                    });
        announced_pairs(p, Block::at(number).keys, smem, n & 1, warp_row).clear(p16, ds16);
        ptx::mbarrier_wait(turn_barriers.scores_empty + 8 * (n & 1), n / 2 & 1 ^ 1);
#pragma unroll
        for (int step = 0; step < kQueries / 16; ++step) {
          const uint32_t words[4] = {ds16[4 * step], ds16[4 * step + 1], ds16[4 * step + 2],
                                     ds16[4 * step + 3]};
          ptx::stmatrix_x4(
              (score_row ^ step % 4 * 32) + (n & 1) * kScoresBytes + step / 4 * kScoresPanel,
              words);
        }
        // dq of the tile before, so that the warpgroups need not be in step. There is none at the
        // first tile: that product is discarded, since a branch around it would serialise all of
        // them.
        if (!is_first) ptx::mbarrier_wait(turn_barriers.scores + 8 * (before & 1), before / 2 & 1);
        ptx::wgmma_fence();
        start_dq(before);
        start_gradient<kQueries / 16>(dv, p16, d_o + stage);
        ptx::wgmma_commit_group();
        start_gradient<kQueries / 16>(dk, ds16, q + stage);
        ptx::wgmma_commit_group();
        pass_on(turn_barriers.scores, n);
        const uint32_t place = staging();
        ptx::wgmma_wait_group<2>();
        ptx::wgmma_pin(dq);
        if (!is_first) arrive(turn_barriers.scores_empty, before), stage_dq(before, place);
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(dv), ptx::wgmma_pin(p16);
        arrive(barriers.second_empty, n);
      }
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(dk);
      const uint32_t before = n - 1;
      if (tiles >= 2) pass_on(turn_barriers.staged, n);
      arrive(barriers.first_empty, before), arrive(turn_barriers.resident_empty, 1);
      ptx::mbarrier_wait(turn_barriers.scores + 8 * (before & 1), before / 2 & 1);
      ptx::wgmma_fence();
      start_dq(before);
      const uint32_t place = staging();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(dq);
      arrive(turn_barriers.resident_empty, 0), arrive(turn_barriers.scores_empty, before);
      stage_dq(before, place);
      pass_on(turn_barriers.staged, before);
    }
    const Keys& work = Block::at(number).keys;
    store_dv(params.base, dv, warp_row, work);
    store_dk(params.base, dk, warp_row, work);
    arrive(turn_barriers.blocks_empty, number);
  }
  // Both threads that add tiles read the end of the queue.
#pragma unroll 1
  for (uint32_t end = n; end != n + 2; ++end) {
    ptx::mbarrier_wait(turn_barriers.staged_empty + 8 * (end & 1), end / 2 & 1 ^ 1);
    if (lane == 0) ptx::mbarrier_arrive(turn_barriers.staged + 8 * (end & 1));
  }
}

}  // namespace
}  // namespace blockflash

// A consumer warpgroup with 64 keys of its own that also computes half of dq, in one of two forms:
//
//   64 queries at a time    all queries, half of the columns of dq each; ping-pong barriers
//   128 queries at a time   64 of the queries, all columns of dq each; no ping-pong, since tiles
//   are
//                           long enough that the warpgroups fall out of step by themselves
//
// Twice the queries halve what every tile costs beside its products; up to a head_dim of 64 they
// fit. Either way the sums of 64 queries are stored as eight warps with half of the columns each
// leave them.
#pragma once

#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/stmatrix.cuh"
#include "dq_order.cuh"

namespace blockflash {
namespace {

// `splits_queries`: the second form.
template <bool splits_queries>
__device__ __forceinline__ void consume_with_dq(const Params& params, uint32_t smem,
                                                const Barriers& barriers, int warpgroup) {
  static_assert(!splits_queries || (kStreamRows == 128 && kPanels == 1),
                "two panels of scores, one of everything else");
  // Of this warpgroup: where half of them are no multiple of 32, the second one has fewer, and
  // multiplies by zeros for the others.
  using Order = SumsOrder<kD>;
  constexpr int kDqColumns = splits_queries ? kD : Order::kFirst;
  using Product = ptx::Wgmma<kDqColumns, Element>;
  const blockflash_attention_fwd_params& p = params.base.base;
  const DqBarriers dq_barriers(smem);
  const int lane = threadIdx.x % 32;
  const int warp_row =
      splits_queries ? threadIdx.x / 32 * 16 - 64 : warpgroup * 64 + threadIdx.x / 32 % 4 * 16;
  const PingPong<splits_queries ? 1 : 2> ping_pong{warpgroup};
  // Where registers are scarce, dq is where the scores were and the next ones will be, so that
  // these are queued while the operands of dk, where dp was, are still read.
  constexpr bool kInPlace = !splits_queries && kDqColumns == kStreamRows;
  float s[kStreamRows / 2], dp[kStreamRows / 2], dk[kD / 2], dv[kD / 2];
  if constexpr (kInPlace)
#pragma unroll
    for (float& score : s) score = 0.f;
  float dq_apart[kInPlace ? 1 : kDqColumns / 2];
  float(&dq)[kDqColumns / 2] =
      reinterpret_cast<float(&)[kDqColumns / 2]>(*(kInPlace ? s : dq_apart));
  uint32_t p16[kStreamRows / 4], ds16[kStreamRows / 4];
  const uint32_t k = ptx::wgmma_low(smem + warpgroup * 64 * 128), v = k + (kResidentBytes >> 4);
  const uint32_t q = ptx::wgmma_low(smem + kFirstOffset),
                 d_o = ptx::wgmma_low(smem + kSecondOffset);
  // By rows, a descriptor tells how far apart panels are, if there are several.
  constexpr int kNextPanel = splits_queries ? 0 : kStreamPanel;
  const uint32_t q_rows = ptx::wgmma_low(smem + kFirstOffset, kNextPanel),
                 d_o_rows = ptx::wgmma_low(smem + kSecondOffset, kNextPanel);
  // K by rows, from the first column of this warpgroup's dq on; and the gradients of the scores,
  // from its first query on.
  const uint32_t k_rows =
      splits_queries
          ? ptx::wgmma_low(smem)
          : ptx::wgmma_low(
                smem + warpgroup * (kDqColumns / 64 * kResidentPanel + kDqColumns % 64 * 2),
                kResidentPanel);
  const uint32_t scores =
      ptx::wgmma_low(smem + kScoresOffset + (splits_queries ? warpgroup * kScoresPanel : 0));
  // The address of a lane's first 16 bytes of gradients of scores. Those of its further ones in a
  // panel differ in bits of the swizzle only, since rows are 128 bytes.
  const uint32_t score_row =
      smem + kScoresOffset + (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
  // Not kept, since registers are scarce, but found out while products run.
  const auto staging = [=] {
    const uint32_t thread = ptx::opaque(threadIdx.x) - 128, warp = thread / 32;
    const uint32_t of_warp = splits_queries
                                 ? thread / 128 * kSumsTile + Order::of_warp(warp % 4) * 4
                                 : Order::of_warp(warp) * 4;
    return smem + kStagingOffset + of_warp + thread % 32 * 16;
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
  // Waits until the staging of tile n is free and stores this warp's part of dq.
  const auto stage_dq = [&](uint32_t n, uint32_t row) {
    wait_empty<2>(dq_barriers.staged_empty, n);
    constexpr int kHalf = Order::kFirst / 8;  // groups of eight columns
#pragma unroll
    for (int i = 0; i < kDqColumns / 8; ++i)
      if (splits_queries || i < Order::kSecond / 8 || warpgroup == 0)
        ptx::store_shared_float4(
            row + (n & 1) * kSumsBytes + i / kHalf * (kSumsTile / 2) + i % kHalf * 512, dq + 4 * i);
  };

  // Everything has two buffers, so the number of a tile tells buffer and phase.
  static_assert(!Config::dq || (kStages == 2 && kSecondStages == 2), "all rings are in step");
  if (!splits_queries && warpgroup == 1) ping_pong.arrive();  // the first one begins
  uint32_t n = 0;  // number of the tile, and from kNextBlock on that of the block
#pragma unroll 1
  for (;; n = n % 4 + (n / kNextBlock + 1) * kNextBlock) {
    const uint32_t number = n / kNextBlock;
    wait_full<2>(dq_barriers.blocks, number);
    const int tiles = __shfl_sync(~0u, Block::at(number).all_tiles, 0);
    if (tiles < 0) break;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.f;
    if (tiles > 0) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i, ++n) {
        const bool is_first = i == 0;
        const uint32_t before = n - 1;
        wait_full<2>(barriers.first, n);
        if (is_first) Block::at(number).wait_resident(barriers.resident);
        const uint32_t stage = (n & 1) * (kStreamBytes >> 4);
        ptx::wgmma_fence();
        start_scores<kStreamRows, kInPlace>(s, k, kResidentPanel, q + stage, kStreamPanel);
        // The scores are queued behind dk of the tile before, whose Q is read then.
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(dk), ptx::wgmma_pin(ds16);
        if (!is_first) arrive(barriers.first_empty, before);
        wait_full<2>(barriers.second, n);
        if (is_first) Block::at(number).wait_resident(barrier_of(barriers.resident, 1));
        ptx::wgmma_fence();
        start_scores<kStreamRows>(dp, v, kResidentPanel, d_o + stage, kStreamPanel);
        // 128 queries leave no registers to cap scores; the host takes the other form then.
        differentiate_all<!splits_queries, kInPlace ? 4 : 0>(
            s, dp, p16, ds16, p.scores, has_large<kStreamRows>(first_statistics(smem, n & 1)),
            statistics_at(first_statistics(smem, n & 1)),
            statistics_at(second_statistics(smem, n & 1)), [&] {
              if (i >= 2) pass_on(dq_barriers.staged, n);
            });
        published_pairs(p, Block::at(number).keys, smem, n & 1, warp_row).clear(p16, ds16);
        wait_empty<2>(dq_barriers.scores_empty, n);
#pragma unroll
        for (int step = 0; step < kStreamRows / 16; ++step) {
          const uint32_t words[4] = {ds16[4 * step], ds16[4 * step + 1], ds16[4 * step + 2],
                                     ds16[4 * step + 3]};
          ptx::stmatrix_x4(
              (score_row ^ step % 4 * 32) + (n & 1) * kScoresBytes + step / 4 * kScoresPanel,
              words);
        }

        ping_pong.sync();
        // dq of the tile before, so that the warpgroups need not be in step. There is none at the
        // first tile: that product is discarded, since a branch around it would serialise all of
        // them.
        if (!is_first) wait_full<2>(dq_barriers.scores, before);
        ptx::wgmma_fence();
        start_dq(before);
        start_gradient<kStreamRows / 16>(dv, p16, d_o_rows + stage);
        ptx::wgmma_commit_group();
        start_gradient<kStreamRows / 16>(dk, ds16, q_rows + stage);
        ptx::wgmma_commit_group();
        ping_pong.arrive();
        pass_on(dq_barriers.scores, n);
        const uint32_t row = staging();
        ptx::wgmma_wait_group<2>();
        ptx::wgmma_pin(dq);
        if (!is_first) arrive(dq_barriers.scores_empty, before), stage_dq(before, row);
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_pin(dv), ptx::wgmma_pin(p16);
        arrive(barriers.second_empty, n);
      }
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(dk);
      const uint32_t before = n - 1;
      if (tiles >= 2) pass_on(dq_barriers.staged, n);
      arrive(barriers.first_empty, before), arrive(dq_barriers.resident_empty, 1);
      wait_full<2>(dq_barriers.scores, before);
      ptx::wgmma_fence();
      start_dq(before);
      const uint32_t row = staging();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(dq);
      arrive(dq_barriers.resident_empty, 0), arrive(dq_barriers.scores_empty, before);
      stage_dq(before, row);
      pass_on(dq_barriers.staged, before);
    }
    const Keys& work = Block::at(number).keys;
    store_dv(params, dv, warp_row, work);
    store_dk(params, dk, warp_row, work);
    arrive(dq_barriers.blocks_empty, number);
  }
  // Both threads that add tiles read the end of the queue.
#pragma unroll 1
  for (uint32_t end = n; end != n + 2; ++end) {
    wait_empty<2>(dq_barriers.staged_empty, end);
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(dq_barriers.staged, end & 1));
  }
}

}  // namespace
}  // namespace blockflash

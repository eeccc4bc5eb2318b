// The steps of a consumer warpgroup of the Hopper attention kernel.
#pragma once

#include "consumer_state.cuh"

namespace blockflash {
namespace {

struct Consumer : ConsumerState {
  // A step without masks: probabilities of the key tile in k_stage, and P·V of the previous one, in
  // v_stage. is_last: the last key tile of these queries.
  __device__ __forceinline__ void fast_step(int k_stage, int v_stage, bool is_last) {
    full.wait(barriers.full, k_full(k_stage, warpgroup));
    // Where registers are few, there are enough for score terms once the product is complete.
    constexpr bool kMakeRoom = kAddsTerms && Config::min_blocks == 3;
    // On their way while the products are issued.
    StepBits bits = {};
    if constexpr (kHasBits && !kMakeRoom) bits = bits_of(k_stage);
    ping_pong().sync();
    // s must live until here, or the assembler separates the exponentials from their conversions.
    ptx::wgmma_pin(o), ptx::wgmma_pin(s), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
    start_scores(s, q, smem, q_stage(), k_stage);
    if (kHasBits && is(kHidden)) heed_scanners(v_stage);
    full.wait(barriers.full, v_full(v_stage));
    ptx::wgmma_fence();
    start_output(o, p, smem, v_stage, state & kOutput, kHasBits && is(kSkip));
    state |= kOutput;
    ping_pong().arrive();
    if constexpr (kTwoBlockRows) advance();
    ptx::wgmma_wait_group<kMakeRoom ? 0 : 1>();
    ptx::wgmma_pin(s);
    const auto complete_output = [&] {
      ptx::wgmma_pin(o), ptx::wgmma_pin(p);
      if (kHasBits && is(kSkip)) add_visible(v_stage);
      release(Barriers::kV + v_stage);
    };
    if constexpr (kMakeRoom) complete_output();
    if constexpr (kHasBits && kMakeRoom) bits = bits_of(k_stage);
    release(k_stage);
    if (kLateQ && is_last) release_q();
    if constexpr (kAddsTerms) add_terms(scores().scale);
    if constexpr (kHasBits) {
      if (bits.hide) mask_row(s, 0, bits.of_row(0)), mask_row(s, 1, bits.of_row(1));
      state = state & ~kHidden | (bits.hide ? kHidden : 0);
    }
    int top[2];
    softmax.largest(s, top);
    const bool grew = softmax.exceeds(top, kSlack, scores().inverse_scale_log2);
    if constexpr (kAddsTerms) release_boxes();
    float rescale[2] = {1.f, 1.f};
    if (grew) softmax.move(s, top, scores(), rescale);
    softmax.exponentiate(s, scores().scale_log2);
    if constexpr (!kMakeRoom) {
      ptx::wgmma_wait_group<0>();
      complete_output();
    }
    softmax.template round<Traits>(s, p);
    ptx::wgmma_pin(p);
    if (grew) rescale_output(o, rescale);
    if constexpr (kHasBits) state &= ~kSkip;
  }

  // Releases key tiles that no query of this warpgroup sees. The first one needs no ping-pong
  // barrier, as the other warpgroups need none in their first step.
  __device__ __forceinline__ int pass(int stage, int key_tiles) {
#pragma unroll 1
    for (int i = 0; i < key_tiles; ++i) {
      if constexpr (kTwoBlockRows) {  // the producer releases them
        if (i > 0) ping_pong().sync(), ping_pong().arrive();
        continue;
      }
      full.wait(barriers.full, stage);
      release(stage);
      if (i > 0) ping_pong().sync(), ping_pong().arrive();
      full.wait(barriers.full, Barriers::kV + stage);
      release(Barriers::kV + stage);
      stage = next(stage);
    }
    return stage;
  }

  // Stores the output of the previous query tile.
  __device__ __forceinline__ void finish(const RowTotals& before) {
    if (!is(kOpen)) return;
    if (!is(kPending)) clear_output(o);  // no key tile was visited
    if constexpr (Config::cache)
      store_cache_output(cache_params_of(params), slot_before(), o, before, warpgroup);
    else
      store_output(params, tile_of(slot_before()), o, before, smem, warpgroup);
  }

  __device__ __forceinline__ void run() {
    slot = slot_of(smem, kSlots - 1);
    int stage = 0;  // stage of the next key tile
    const auto v_stage = [&] {
      if (kTwoBlockRows) return pending & 1;
      return previous_stage<kStages>(stage);
    };  // stage of the pending probabilities
    const auto uses_ping_pong = [&] { return has_scores() && !is(kFresh); };
#pragma unroll 1
    for (;;) {
      // A step of any kind: the first of a query tile, which also completes the previous one; a
      // step with a mask; the last of all.
      if (!is(kInside)) state |= kFresh;
      stage = __shfl_sync(~0u, stage, 0);  // a uniform register, for the matrix descriptors
      // Both products are issued in any case and an unwanted result is discarded: a branch around a
      // WGMMA would make the assembler serialise all of them.
      const auto start_scores_here = [&] {
        if (Config::q_stages == 2 && is(kFresh) && is(kOpen)) release_q();
        if (is(kFresh)) state |= fetch();
        if (kTwoBlockRows && has_scores()) {
          look_up_step();
          stage = __shfl_sync(~0u, key_tile % kStages, 0);
        }
        if (has_scores()) full.wait(barriers.full, k_full(stage, warpgroup));
        if (!kLateQ && uses_ping_pong()) ping_pong().sync();
        ptx::wgmma_pin(o), ptx::wgmma_pin(p);
        ptx::wgmma_fence();
        start_scores(s, q, smem, q_stage(), stage);
      };
      const auto start_output_here = [&] {
        if (kHasBits && is(kHidden)) heed_scanners(v_stage());
        if (is(kPending)) full.wait(barriers.full, v_full(v_stage()));
        if (kLateQ && uses_ping_pong()) ping_pong().sync();
        ptx::wgmma_fence();
        const int now = __shfl_sync(~0u, state, 0);
        start_output(o, p, smem, v_stage(), now & kOutput, now & kSkip);
      };
      if constexpr (!kLateQ) start_scores_here();
      start_output_here();
      if constexpr (kLateQ) start_scores_here();
      if (uses_ping_pong()) ping_pong().arrive();
      uint32_t visible[2] = {0, 0};
      const auto look_up_mask_here = [&] {
        if (has_scores() && is_masked()) look_up_mask(visible), state |= kMasked;
      };
      const auto look_up_bits_here = [&] {
        const StepBits bits = bits_of(stage);
        if (!bits.hide) return;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          visible[half] = bits.of_row(half) & (is(kMasked) ? visible[half] : ~0u);
        state |= kMasked;
      };
      // Three warpgroups have free registers only after the products, and score terms need them
      // before the mask.
      if constexpr (kWarpgroups < 3 && !kTwoBlockRows && !kAddsTerms) look_up_mask_here();
      // With three warpgroups, in a CTA or in three of them with score terms, the pending product
      // must be complete before registers are free for the softmax. Otherwise it may still be in
      // flight when it is the last of its query tile.
      constexpr bool kScarce = kWarpgroups == 3 || (kAddsTerms && Config::min_blocks == 3);
      constexpr bool kMakeRoom = kScarce || kLateQ;
      // They have no register for the log-sum-exp beside the next scores.
      constexpr bool kFinishFirst = kLateQ || (kScarce && Config::lse);
      RowTotals before;  // totals of the query tile that ends here
      if constexpr (!Config::lse && !kTwoBlockRows) before = softmax.totals();
      if constexpr (kLateQ) {
        ptx::wgmma_wait_group<1>();
        take_product(v_stage());
        if (is(kFresh)) finish(softmax.totals());
      }
      ptx::wgmma_wait_group<kMakeRoom ? 0 : 1>();
      ptx::wgmma_pin(s);
      if constexpr (kMakeRoom && !kLateQ) take_product(v_stage());
      if (kFinishFirst && !kLateQ && is(kFresh)) finish(softmax.totals());
      // Q is released only when the scores are complete: WGMMA may still read fragments that
      // ldmatrix has requested but that have not arrived.
      if (is(kFresh) && !is(kEnd) && (Config::q_in_registers || kLateQ && !is(kInside)))
        release_q();
      if (is(kFresh)) {
        if constexpr (Config::lse || kTwoBlockRows) before = softmax.totals();
        softmax.reset();
      }
      float rescale[2] = {1.f, 1.f};
      if constexpr ((kWarpgroups == 3 || kTwoBlockRows) && !kAddsTerms) look_up_mask_here();
      if (has_scores()) {
        if constexpr (!kHasBits) release(stage);
        if (kLateQ && key_tile == QueryTile::load(slot).first_key_tile) release_q();
        cap_scores(s, scores());
        if constexpr (kAddsTerms)
          add_terms(scores().softcap > 0.f ? 1.f : scores().scale), look_up_mask_here();
        if constexpr (kHasBits) look_up_bits_here(), release(stage);
        if (is(kMasked)) mask_row(s, 0, visible[0]), mask_row(s, 1, visible[1]);
        int top[2];
        softmax.largest(s, top);
        if (is(kFresh) || softmax.exceeds(top, kSlack, scores().inverse_scale_log2))
          softmax.move(s, top, scores(), rescale);
        if constexpr (kAddsTerms) release_boxes();
        softmax.exponentiate(s, scores().scale_log2);
      }
      if constexpr (!kMakeRoom) {
        ptx::wgmma_wait_group<0>();
        take_product(v_stage());
      }
      if (has_scores())
        softmax.template round<Traits>(s, p), advance();
      else
        clear_probabilities(p);
      if (!is(kFresh)) {
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) rescale_output(o, rescale);
      } else if (!kFinishFirst) {
        finish(before);
      }
      if (is(kEnd)) break;
      if (!has_scores()) {
        if (is(kPass)) stage = pass(stage, walk().lead);
        state = (state & kInside) | kOpen;
        continue;
      }
      const bool masked = is(kMasked);
      state =
          kPending | kOpen | kInside | ((state & (kPending | kFresh)) == kPending ? kOutput : 0);
      if (masked) {
        if constexpr (kTwoBlockRows) {
          stage = v_stage();
        }
        if constexpr (kHasBits)
          state |= kHidden;
        else
          heed_scanners(stage);
      }
      const int first_key_tile = QueryTile::load(slot).first_key_tile;
      const KeyWalk mine = walk();
      // Whether the next step is fast, which the one before may decide. With score terms there is
      // no register for the first key tile.
      const auto is_fast = [&] {
        if constexpr (kAddsTerms) return key_tile >= walk().unmasked_first;
        return key_tile >= mine.unmasked_first;
      };
      // With a softcap every key tile takes the general step, which keeps the cap out of the fast
      // one.
      if constexpr (kTwoBlockRows) {
        const bool fast = !is(kSkip) && !(scores().softcap > 0.f);
#pragma unroll 1
        while (fast && step.is_for(warpgroup) && !is_masked())
          fast_step(__shfl_sync(~0u, key_tile % kStages, 0), __shfl_sync(~0u, v_stage(), 0), false);
        if (!step.is_for(warpgroup)) state &= ~kInside;
        continue;
      }
      if (!is(kSkip) && !(scores().softcap > 0.f) && key_tile <= mine.unmasked_last) {
        // Unrolled over the ring, so that stages are constants; the first round starts at the
        // current stage.
#pragma unroll
        for (int u = 1; u < kStages; ++u) {
          if (u != stage || !is_fast()) continue;
          stage = next(u);
          fast_step(next(u), u, key_tile == first_key_tile);
          --key_tile;
        }
        while (is_fast()) {
#pragma unroll
          for (int u = 0; u < kStages; ++u) {
            stage = next(u);
            fast_step(next(u), u, key_tile == first_key_tile);
            --key_tile;
            if (u + 1 < kStages && !is_fast()) break;
          }
        }
      }
      // Kernels for bits alone have no register for it in the loop, nor for its address.
      int first = first_key_tile;
      if constexpr (kHasBits && !kAddsTerms)
        first = QueryTile::load(ptx::opaque(slot)).first_key_tile;
      if (key_tile < first) state &= ~kInside;
      stage = next(stage);
    }
  }
};

}  // namespace
}  // namespace blockflash

// A consumer warpgroup that shares its CTA with another block row, and the checker warp there.
#pragma once

#include "consumer.cuh"
#include "union_walk.cuh"

namespace blockflash {
namespace {

// Computes the key tiles of its own list, in the steps that the producer tells. Stages and phases
// are variables, since foreign key tiles lie between the own ones.
struct UnionConsumer : Consumer {
  StepQueue steps{smem, warpgroup};
  Step pending = {0};  // the step whose probabilities are pending

  // Gives K the phase of this step and V that of the pending one.
  __device__ __forceinline__ void set_phases(Step now) {
    constexpr uint32_t kOfK = (1u << kStages) - 1, kOfV = kOfK << kStages;
    full.bits =
        full.bits & ~(kOfK | kOfV) | (now.parity() ? kOfK : 0u) | (pending.parity() ? kOfV : 0u);
  }

  // Whether the pending V, which a mask concerns, holds NaN or infinity.
  __device__ __forceinline__ bool finds_nonfinite() const {
    full.peek(barriers.checked - 8 * Barriers::kV, Barriers::kV + pending.stage());
    // Lane 0 reads the word and also releases V, which orders this read before the next write.
    uint32_t found = 0;
    if (lane() == 0) found = ptx::load_shared(barriers.nonfinite + 4 * pending.stage());
    return __shfl_sync(~0u, found, 0);
  }

  // Completes the pending product without new scores.
  __device__ __forceinline__ void complete() {
    full.wait(barriers.full, Barriers::kV + pending.stage());
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
    const int now = __shfl_sync(~0u, state, 0);
    start_output(pending.stage(), now & kOutput, now & kSkip);
    ptx::wgmma_wait_group<0>();
    take_product(pending.stage());
    clear_probabilities();
    state = state & ~(kPending | kSkip) | kOutput;
  }

  // A step without masks. As Consumer::fast_step, but a branch keeps the exponentials before the
  // wait for P·V, since no turns make the other warpgroup fill that time.
  __device__ __forceinline__ void regular_step(Step now) {
    full.wait(barriers.full, now.stage());
    ptx::wgmma_pin(o), ptx::wgmma_pin(s), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
    start_scores(now.stage());
    full.wait(barriers.full, Barriers::kV + pending.stage());
    ptx::wgmma_fence();
    start_output(pending.stage(), state & kOutput);
    state |= kOutput;
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(s);
    release(now.stage());
    int top[2];
    softmax.largest(s, top);
    const bool grew = softmax.exceeds(top, kSlack, params.inverse_scale_log2);
    float rescale[2] = {1.f, 1.f};
    if (grew) softmax.move(s, top, params.scale_log2, rescale);
    softmax.exponentiate(s, params.scale_log2);
    ptx::wgmma_pin(s);
    if (grew) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(o);
      rescale_output(rescale);
    } else {
      ptx::wgmma_wait_group<0>();
    }
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    release(Barriers::kV + pending.stage());
    softmax.template round<Traits>(s, p);
    ptx::wgmma_pin(p);
  }

  // A step of any kind with scores, or the first of a query tile, which also completes the previous
  // one. Both products are issued in any case, as in Consumer::run; without a pending one,
  // probabilities are zeros and meet a page of zeros.
  __device__ __forceinline__ void general_step(Step now) {
    if (now.is(Step::kBegins)) state |= kFresh | fetch();
    if (now.is(Step::kScores)) full.wait(barriers.full, now.stage());
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
    start_scores(now.stage());
    if (is(kPending)) full.wait(barriers.full, Barriers::kV + pending.stage());
    ptx::wgmma_fence();
    const int flags = __shfl_sync(~0u, state, 0);
    start_output(pending.stage(), flags & kOutput, (flags & (kPending | kSkip)) != kPending);
    uint32_t visible[2] = {0, 0};
    if (now.is(Step::kScores) && is_masked()) look_up_mask(visible), state |= kMasked;
    RowTotals before;  // totals of the query tile that ends here
    if constexpr (!Config::lse) before = softmax.totals();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(s);
    if (is(kFresh)) {
      if (!is(kEnd)) release_q();
      if constexpr (Config::lse) before = softmax.totals();
      softmax.reset();
    }
    float rescale[2] = {1.f, 1.f};
    if (now.is(Step::kScores)) {
      release(now.stage());
      if (params.base.softcap > 0.f) {
#pragma unroll
        for (float& score : s) score = soft_cap(score, params.base.softcap, params.scale_over_cap);
      }
      if (is(kMasked)) mask_row(s, 0, visible[0]), mask_row(s, 1, visible[1]);
      int top[2];
      softmax.largest(s, top);
      if (is(kFresh) || softmax.exceeds(top, kSlack, params.inverse_scale_log2))
        softmax.move(s, top, params.scale_log2, rescale);
      softmax.exponentiate(s, params.scale_log2);
    }
    ptx::wgmma_wait_group<0>();
    take_product(pending.stage());
    if (now.is(Step::kScores))
      softmax.template round<Traits>(s, p), --key_tile;
    else
      clear_probabilities();
    if (!is(kFresh)) {
      if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) rescale_output(rescale);
    } else if (is(kOpen)) {
      store_output(params, QueryTile::load(slot_before()), o, before, smem, warpgroup);
    }
    state = state & (kEnd | kMasked) | kOpen | (now.is(Step::kScores) ? kPending : 0) |
            (is(kFresh) ? 0 : kOutput);
    pending = now;
  }

  __device__ __forceinline__ void run() {
    slot = slot_of(smem, kSlots - 1);
#pragma unroll 1
    while (!is(kEnd)) {
      const Step now = steps.take();
      set_phases(now);
      if (is(kMasked)) state = state & ~kMasked | (finds_nonfinite() ? kSkip : 0);
      if (!now.is(Step::kScores | Step::kBegins)) {
        complete();
        continue;
      }
      const KeyWalk mine = walk();
      if (!now.is(Step::kBegins) && (state & (kPending | kSkip)) == kPending &&
          !(params.base.softcap > 0.f) && key_tile <= mine.unmasked_last &&
          key_tile >= mine.unmasked_first) {
        regular_step(now);
        --key_tile, pending = now;
      } else {
        general_step(now);
      }
    }
  }
};

// The checker warp where two block rows share a CTA. The producer says which stages of V to search.
__device__ __forceinline__ void check_values_of_union(uint32_t smem, const Barriers& barriers) {
  Phases full = {0};
  int stage = 0;
#pragma unroll 1
  for (;;) {
    full.wait(barriers.full, Barriers::kV + stage);
    __syncwarp();
    const int search = static_cast<int>(ptx::load_shared(smem + kSearchOffset + 4 * stage));
    if (search == kNoMoreValues) break;
    if (search == kSearchValues) search_values(smem, barriers, stage, 0);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(barriers.checked + 8 * stage);
      ptx::mbarrier_arrive(barriers.empty + 8 * (Barriers::kV + stage));
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace
}  // namespace blockflash

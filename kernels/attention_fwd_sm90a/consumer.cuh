// A consumer warpgroup of the Hopper attention kernel.
#pragma once

#include "blockflash/attention/soft_cap.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "output.cuh"
#include "pipeline.cuh"
#include "values.cuh"

namespace blockflash {
namespace {

using Element = Config::Element;
using Traits = ElementTraits<Element>;
using Softmax = HopperSoftmax<kBlockKv / 2, !kOnes, Config::lse>;

// How far a score may exceed the reference, in powers of two. A probability must not overflow the
// 16-bit type; in bf16 the sums of P·V stay within f32 for |V| up to about 2^90.
constexpr float kSlack = Traits::exponent_mask == 0x7F80 ? 30.f : 8.f;

// One consumer warpgroup: 64 queries of each tile. Of the 16 rows of a warp, a lane holds rows g
// and g + 8 (g = lane / 4) in every accumulator.
struct Consumer {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  const int warpgroup;
  Phases full = {0};

  float s[kBlockKv / 2];          // scores, then probabilities
  float o[kOutColumns / 2] = {};  // output, followed by the row sums
  uint32_t p[kBlockKv / 4] = {};  // probabilities in 16 bits
  uint32_t q[Config::q_in_registers ? kPanels * 16 : 1];
  Softmax softmax;
  uint32_t slot;  // slot of the current query tile
  int key_tile;   // position of the next key tile
  // State of the pipeline. In flight: kPending, probabilities still wait for their product with V;
  // kSkip, that product is left to the CUDA cores; kOpen, an output has not been stored yet. Ahead:
  // kInside, this query tile has more key tiles; kPass, some key tiles are released unread first;
  // kEnd, no query tile is left. This step: kFresh, it began a query tile; kMasked, it had a mask.
  // kOutput: o holds a partial sum.
  static constexpr int kPending = 1, kSkip = 2, kOpen = 4, kInside = 8, kPass = 16, kEnd = 32,
                       kFresh = 64, kMasked = 128, kOutput = 256;
  int state = 0;  // one register for all flags, since no other is free

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int first_row() const {
    return warpgroup * kRowStep + threadIdx.x / 32 % 4 * 16 + accumulator_row(lane(), 0);
  }
  __device__ __forceinline__ uint32_t slot_before() const {
    return slot == slot_of(smem, 0) ? slot_of(smem, kSlots - 1) : slot - kSlotBytes;
  }
  __device__ __forceinline__ KeyWalk walk() const {
    return KeyWalk::load(slot + kWalkInSlot + 16 * warpgroup);
  }
  __device__ __forceinline__ int q_stage() const {
    return slot_parity(smem, slot) % Config::q_stages * kWarpgroups + warpgroup;
  }
  static __device__ __forceinline__ int next(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }

  __device__ __forceinline__ void release(int stage) const {
    if (lane() == 0) ptx::mbarrier_arrive(barriers.empty + 8 * stage);
  }
  __device__ __forceinline__ void release_q() const { release(Barriers::kQ + q_stage()); }
  // Warpgroups take turns in issuing their products, so that one computes its softmax while the
  // tensor cores work for another.
  __device__ __forceinline__ void begin_turn() const {
    if constexpr (kTurns) ptx::named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (kTurns) ptx::named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 256);
  }

  // Waits for the next query tile and returns the flags that describe it.
  __device__ __forceinline__ int fetch() {
    slot = slot == slot_of(smem, kSlots - 1) ? slot_of(smem, 0) : slot + kSlotBytes;
    full.wait(barriers.full, Barriers::kQ + q_stage());
    const QueryTile tile = QueryTile::load(slot);
    if (tile.key_tiles < 0) return kEnd;
    const KeyWalk mine = walk();
    key_tile = tile.first_key_tile + mine.left - 1;
    if constexpr (Config::q_in_registers) {
      const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
      for (int d = 0; d < kPanels * 4; ++d) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4(fragment, smem + q_stage() * kQBytes + d / 4 * 8192 + row * 128 +
                                       ((d % 4 * 2 + lane() / 16) ^ row % 8) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * d + i] = fragment[i];
      }
    }
    return (mine.left > 0 ? kInside : 0) | (mine.lead > 0 ? kPass : 0);
  }

  // s = Q·Kᵀ
  __device__ __forceinline__ void start_scores(int stage) {
    const uint64_t k = ptx::wgmma_descriptor(smem + kKOffset) + (stage * kKvBytes >> 4);
    const uint64_t q_tile = ptx::wgmma_descriptor(smem) + (q_stage() * kQBytes >> 4);
#pragma unroll
    for (int d = 0; d < (kD + 15) / 16; ++d) {
      using Product = ptx::Wgmma<kBlockKv, Element>;
      const uint64_t k_step = k + ((d / 4 * kBlockKv * 128 + d % 4 * 32) >> 4),
                     q_step = q_tile + ((d / 4 * 8192 + d % 4 * 32) >> 4);
      if constexpr (Config::q_in_registers) {
        if (d == 0)
          Product::template rs<false, false>(s, q + 4 * d, k_step);
        else
          Product::template rs<true, false>(s, q + 4 * d, k_step);
      } else {
        if (d == 0)
          Product::template ss<false>(s, q_step, k_step);
        else
          Product::template ss<true>(s, q_step, k_step);
      }
    }
    ptx::wgmma_commit_group();
  }

  // o += P·V, and the row sums of P by the ones behind V. With `skip`, multiplies by the page of
  // zeros instead: a branch around the product would serialise all WGMMAs.
  __device__ __forceinline__ void start_output(int stage, uint32_t accumulate, bool skip = false) {
    const uint64_t v = skip ? ptx::wgmma_descriptor_mn(smem + kZerosOffset, 0, 0)
                            : ptx::wgmma_descriptor_mn(smem + kVOffset, kBlockKv * 128, 1024) +
                                  (stage * kVStageBytes >> 4);
    const int step = skip ? 0 : 16 * 128 >> 4;
#pragma unroll
    for (int k = 0; k < kBlockKv / 16; ++k) {
      using Product = ptx::Wgmma<kOutColumns, Element>;
      if (k == 0)
        Product::template rs_if<true>(accumulate, o, p, v);
      else
        Product::template rs<true, true>(o, p + 4 * k, v + k * step);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void clear_probabilities() {
#pragma unroll
    for (int i = 0; i < kBlockKv / 4; ++i) p[i] = 0;
  }

  __device__ __forceinline__ void rescale_output(const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOutColumns / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kOutColumns / 2; ++i) o[i] = 0.f;
    ptx::wgmma_pin(o);  // makes this a branch instead of selects into a second set of registers
  }

  __device__ __forceinline__ bool is_masked() const {
    const KeyWalk mine = walk();
    return key_tile > mine.unmasked_last || key_tile < mine.unmasked_first;
  }

  // One bit per key of this lane that its rows attend to.
  __device__ __forceinline__ void look_up_mask(uint32_t (&visible)[2]) const {
    const QueryTile tile = QueryTile::load(slot);
    const AttentionMask mask = tile.mask(params.base);
    const int first_key = key_tile_at(slot, key_tile) * kBlockKv + accumulator_column(lane(), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = mask.keys_of<int>(tile.q_begin + first_row() + 8 * half);
      visible[half] = visible_keys(keys.begin - first_key, keys.end - first_key);
    }
  }

  // Computes the pending product on the CUDA cores, because V holds NaN or infinity and a mask
  // hides keys.
  __device__ __forceinline__ void add_visible(int stage) {
    const uint32_t its_slot = is(kFresh) ? slot_before() : slot;
    const QueryTile tile = QueryTile::load(its_slot);
    const int first_key =
        key_tile_at(its_slot, is(kFresh) ? tile.first_key_tile : key_tile + 1) * kBlockKv;
    add_visible_products(o, p, tile.mask(params.base), tile.q_begin + first_row(), first_key,
                         smem + kVOffset + stage * kVStageBytes);
  }

  // Completes the pending product: adds the part left to the CUDA cores and releases the stage of
  // V.
  __device__ __forceinline__ void take_product(int stage) {
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    if (is(kSkip)) add_visible(stage);
    if (is(kPending)) release(Barriers::kV + stage);
  }

  // A step without masks: probabilities of the key tile in k_stage, and P·V of the previous one, in
  // v_stage. is_last: the last key tile of these queries.
  __device__ __forceinline__ void fast_step(int k_stage, int v_stage, bool is_last) {
    full.wait(barriers.full, k_stage);
    begin_turn();
    // s must live until here, or the assembler separates the exponentials from their conversions.
    ptx::wgmma_pin(o), ptx::wgmma_pin(s), ptx::wgmma_pin(p);
    ptx::wgmma_fence();
    start_scores(k_stage);
    full.wait(barriers.full, Barriers::kV + v_stage);
    ptx::wgmma_fence();
    start_output(v_stage, state & kOutput);
    state |= kOutput;
    end_turn();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(s);
    release(k_stage);
    if (kLateQ && is_last) release_q();
    int top[2];
    softmax.largest(s, top);
    const bool grew = softmax.exceeds(top, kSlack, params.inverse_scale_log2);
    float rescale[2] = {1.f, 1.f};
    if (grew) softmax.move(s, top, params.scale_log2, rescale);
    softmax.exponentiate(s, params.scale_log2);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    release(Barriers::kV + v_stage);
    softmax.template round<Traits>(s, p);
    ptx::wgmma_pin(p);
    if (grew) rescale_output(rescale);
  }

  // Releases key tiles that no query of this warpgroup sees. The first one takes no turn, as the
  // other warpgroups take none in their first step.
  __device__ __forceinline__ int pass(int stage, int key_tiles) {
#pragma unroll 1
    for (int i = 0; i < key_tiles; ++i) {
      full.wait(barriers.full, stage);
      release(stage);
      if (i > 0) begin_turn(), end_turn();
      full.wait(barriers.full, Barriers::kV + stage);
      release(Barriers::kV + stage);
      stage = next(stage);
    }
    return stage;
  }

  __device__ __forceinline__ bool is(int bits) const { return state & bits; }
  __device__ __forceinline__ bool has_scores() const {
    return (state & (kInside | kPass)) == kInside;
  }

  // Stores the output of the previous query tile.
  __device__ __forceinline__ void finish(const RowTotals& before) {
    if (!is(kOpen)) return;
    if (!is(kPending)) clear_output();  // no key tile was visited
    store_output(params, QueryTile::load(slot_before()), o, before, smem, warpgroup);
  }

  __device__ __forceinline__ void run() {
    slot = slot_of(smem, kSlots - 1);
    int stage = 0;  // stage of the next key tile
    const auto v_stage = [&] {
      return stage == 0 ? kStages - 1 : stage - 1;
    };  // stage of the pending probabilities
    const auto takes_turn = [&] { return has_scores() && !is(kFresh); };
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
        if (has_scores()) full.wait(barriers.full, stage);
        if (!kLateQ && takes_turn()) begin_turn();
        ptx::wgmma_pin(o), ptx::wgmma_pin(p);
        ptx::wgmma_fence();
        start_scores(stage);
      };
      const auto start_output_here = [&] {
        if (is(kPending)) full.wait(barriers.full, Barriers::kV + v_stage());
        if (kLateQ && takes_turn()) begin_turn();
        ptx::wgmma_fence();
        const int now = __shfl_sync(~0u, state, 0);
        start_output(v_stage(), now & kOutput, now & kSkip);
      };
      if constexpr (!kLateQ) start_scores_here();
      start_output_here();
      if constexpr (kLateQ) start_scores_here();
      if (takes_turn()) end_turn();
      uint32_t visible[2] = {0, 0};
      const auto look_up_mask_here = [&] {
        if (has_scores() && is_masked()) look_up_mask(visible), state |= kMasked;
      };
      if constexpr (kWarpgroups < 3)
        look_up_mask_here();  // three warpgroups have free registers only after the products
      // With three warpgroups the pending product must be complete before registers are free for
      // the softmax. Otherwise it may still be in flight when it is the last of its query tile.
      constexpr bool kMakeRoom = kWarpgroups == 3 || kLateQ;
      // Three warpgroups have no register for the log-sum-exp beside the next scores.
      constexpr bool kFinishFirst = kLateQ || (kWarpgroups == 3 && Config::lse);
      RowTotals before;  // totals of the query tile that ends here
      if constexpr (!Config::lse) before = softmax.totals();
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
        if constexpr (Config::lse) before = softmax.totals();
        softmax.reset();
      }
      float rescale[2] = {1.f, 1.f};
      if constexpr (kWarpgroups == 3) look_up_mask_here();
      if (has_scores()) {
        release(stage);
        if (kLateQ && key_tile == QueryTile::load(slot).first_key_tile) release_q();
        if (params.base.softcap > 0.f) {
#pragma unroll
          for (float& score : s)
            score = soft_cap(score, params.base.softcap, params.scale_over_cap);
        }
        if (is(kMasked)) mask_row(s, 0, visible[0]), mask_row(s, 1, visible[1]);
        int top[2];
        softmax.largest(s, top);
        if (is(kFresh) || softmax.exceeds(top, kSlack, params.inverse_scale_log2))
          softmax.move(s, top, params.scale_log2, rescale);
        softmax.exponentiate(s, params.scale_log2);
      }
      if constexpr (!kMakeRoom) {
        ptx::wgmma_wait_group<0>();
        take_product(v_stage());
      }
      if (has_scores())
        softmax.template round<Traits>(s, p), --key_tile;
      else
        clear_probabilities();
      if (!is(kFresh)) {
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) rescale_output(rescale);
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
        full.peek(barriers.checked - 8 * Barriers::kV, Barriers::kV + stage);
        // Lane 0 reads the words and also releases V, which orders this read before the next write.
        const uint32_t words = barriers.nonfinite + 4 * kCheckers * stage;
        uint32_t found = 0;
        if (lane() == 0)
          found = ptx::load_shared(words) | ptx::load_shared(words + 4 * (kCheckers - 1));
        if (__shfl_sync(~0u, found, 0)) state |= kSkip;
      }
      const int first_key_tile = QueryTile::load(slot).first_key_tile;
      const KeyWalk mine = walk();
      // With a softcap every key tile takes the general step, which keeps the cap out of the fast
      // one.
      if (!is(kSkip) && !(params.base.softcap > 0.f) && key_tile <= mine.unmasked_last) {
        // Unrolled over the ring, so that stages are constants; the first turn starts at the
        // current stage.
#pragma unroll
        for (int u = 1; u < kStages; ++u) {
          if (u != stage || key_tile < mine.unmasked_first) continue;
          stage = next(u);
          fast_step(next(u), u, key_tile == first_key_tile);
          --key_tile;
        }
        while (key_tile >= mine.unmasked_first) {
#pragma unroll
          for (int u = 0; u < kStages; ++u) {
            stage = next(u);
            fast_step(next(u), u, key_tile == first_key_tile);
            --key_tile;
            if (u + 1 < kStages && key_tile < mine.unmasked_first) break;
          }
        }
      }
      if (key_tile < first_key_tile) state &= ~kInside;
      stage = next(stage);
    }
  }
};

}  // namespace
}  // namespace blockflash

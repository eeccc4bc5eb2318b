// What a consumer warpgroup of the Hopper attention kernel keeps, and the parts of its steps.
#pragma once

#include "blockflash/attention/scores.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ping_pong.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "cache_output.cuh"
#include "products.cuh"
#include "score_terms.cuh"
#include "step_cursor.cuh"
#include "values.cuh"

namespace blockflash {
namespace {

using Traits = ElementTraits<Element>;
using Softmax = HopperSoftmax<kBlockKv / 2, 128, 128 * kWarpgroups, !kOnes, Config::lse>;

// How far a score may exceed the reference, in powers of two. A probability must not overflow the
// 16-bit type; in bf16 the sums of P·V stay within f32 for |V| up to about 2^90.
constexpr float kSlack = Traits::exponent_mask == 0x7F80 ? 30.f : 8.f;

// One consumer warpgroup has 64 queries of each tile. Of the 16 rows of a warp, a lane holds rows g
// and g + 8 (g = lane / 4) in every accumulator.
struct ConsumerState : StepCursor<kTwoBlockRows> {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  const int warpgroup;
  PhaseBits full = PhaseBits::consumer();

  float s[kBlockKv / 2];          // scores, then probabilities
  float o[kOutColumns / 2] = {};  // output, followed by the row sums
  uint32_t p[kBlockKv / 4] = {};  // probabilities in 16 bits
  uint32_t q[Config::q_in_registers ? kQkPanels * 16 : 1];
  Softmax softmax;
  uint32_t slot;  // slot of the current query tile
  int key_tile;   // position of the next key tile
  // State of the pipeline. In flight: kPending, probabilities still wait for their product with V;
  // kSkip, that product is left to the CUDA cores; kOpen, an output has not been stored yet. Ahead:
  // kInside, this query tile has more key tiles; kPass, some key tiles are released unread first;
  // kEnd, no query tile is left. This step: kFresh, it began a query tile; kMasked, it had a mask.
  // kOutput: o holds a partial sum. kHidden: the pending key tile had a mask, so that scanners read
  // its V.
  static constexpr int kPending = 1, kSkip = 2, kOpen = 4, kInside = 8, kPass = 16, kEnd = 32,
                       kFresh = 64, kMasked = 128, kOutput = 256, kHidden = 512;
  int state = 0;  // one register for all flags, since no other is free

  __device__ __forceinline__ bool is(int bits) const { return state & bits; }
  __device__ __forceinline__ bool has_scores() const {
    return (state & (kInside | kPass)) == kInside;
  }

  __device__ __forceinline__ const blockflash_scores& scores() const { return params.base.scores; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int first_row() const {
    return warpgroup * kRowStep + threadIdx.x / 32 % 4 * 16 + accumulator_row(lane(), 0);
  }
  // The query of a lane's row `half`.
  __device__ __forceinline__ int query_of(const QueryTile& tile, int half) const {
    if constexpr (Config::cache) {
      const CacheRows rows = CacheRows::of(cache_params_of(params));
      const int row = threadIdx.x / 32 % 4 * 16 + accumulator_row(lane(), 2 * half);
      return tile.q_begin + warpgroup * rows.queries + rows.query_of(row);
    }
    return tile.q_begin + first_row() + 8 * half;
  }
  // The queries of both rows, as a function.
  __device__ __forceinline__ auto queries_of(const QueryTile& tile) const {
    if constexpr (Config::cache)
      return [=, this](int half) { return query_of(tile, half); };
    else
      return [row = tile.q_begin + first_row()](int half) { return row + 8 * half; };
  }
  __device__ __forceinline__ uint32_t slot_before() const {
    return slot == slot_of(smem, 0) ? slot_of(smem, kSlots - 1) : slot - kSlotBytes;
  }
  // The query tile of a slot; of two block rows that of this warpgroup.
  __device__ __forceinline__ QueryTile tile_of(uint32_t at) const {
    QueryTile tile = QueryTile::load(at);
    if constexpr (kTwoBlockRows) tile.q_begin = ptx::load_shared(at + kPairInSlot + 4 * warpgroup);
    return tile;
  }
  __device__ __forceinline__ KeyWalk walk() const {
    return KeyWalk::load(slot + kWalkInSlot + 16 * warpgroup);
  }
  __device__ __forceinline__ int q_stage() const {
    return slot_parity(smem, slot) % Config::q_stages * kWarpgroups + warpgroup;
  }
  static __device__ __forceinline__ int next(int stage) { return next_stage<kStages>(stage); }

  __device__ __forceinline__ void release(int stage) const {
    if (lane() == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, stage));
  }
  __device__ __forceinline__ void release_q() const { release(Barriers::kQ + q_stage()); }
  __device__ __forceinline__ PingPong<kWarpgroups> ping_pong() const { return {warpgroup}; }

  __device__ __forceinline__ StepRing ring() const { return {smem + kStepOffset}; }
  __device__ __forceinline__ void look_up_step() {
    look_up(ring(), QueryTile::load(slot).first_key_tile, key_tile, warpgroup);
  }
  __device__ __forceinline__ void advance() {
    if constexpr (kTwoBlockRows) take(key_tile, warpgroup);
    --key_tile;
    if constexpr (kTwoBlockRows) look_up_step();
  }

  __device__ __forceinline__ bool is_masked() const {
    if constexpr (kTwoBlockRows) return step.is_masked(warpgroup);
    const KeyWalk mine = walk();
    return key_tile > mine.unmasked_last || key_tile < mine.unmasked_first;
  }

  // One bit per key of this lane that its rows attend to.
  __device__ __forceinline__ void look_up_mask(uint32_t (&visible)[2]) const {
    const QueryTile tile = tile_of(slot);
    const AttentionMask mask = tile.mask(params.base);
    if constexpr (kTwoBlockRows) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visible[half] =
            step.visible(mask.keys_of<int>(query_of(tile, half)), accumulator_column(lane(), 0));
      return;
    }
    const int first_key = key_tile_at(slot, key_tile) * kBlockKv + accumulator_column(lane(), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = mask.keys_of<int>(query_of(tile, half));
      visible[half] = visible_keys(keys.begin - first_key, keys.end - first_key);
    }
  }

  // The bits of the key tile in a stage of K or V.
  __device__ __forceinline__ StepBits bits_of(int stage) const {
    return StepBits::load(params, barriers.bits_of(stage), warpgroup);
  }

  // Adds bias and ALiBi to the scores, which are multiplied by `factor` before that.
  __device__ __forceinline__ void add_terms(float factor) {
    const blockflash_score_terms& terms = terms_of(params).terms;
    if (terms.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kBlockKv / 64; ++i) {
        const int at = next_box(full, warpgroup);
        full.wait(barriers.full, Barriers::kBias + at);
        add_bias(s, 32 * i, factor, smem + kBiasOffset + at * kBoxBytes);
      }
      // Opaque, or the compiler makes two copies of what follows and spills registers.
      factor = ptx::opaque(1.f);
    }
    if (terms.alibi != nullptr)
      Alibi::of(params, tile_of(slot), warpgroup, first_row(),
                key_tile_at(slot, key_tile) * kBlockKv)
          .add(s, factor);
  }

  // Releases the boxes that add_terms read: all of the ring but the next one. Only after a vote or
  // shuffle on the scores, since fragments that ldmatrix has requested may not have arrived before.
  __device__ __forceinline__ void release_boxes() const {
    if (terms_of(params).terms.bias == nullptr) return;
    const int unread = next_box(full, warpgroup);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int box = warpgroup * kBoxes + i;
      if (box != unread) release(Barriers::kBias + box);
    }
  }

  // Waits for the NaN scanners of a stage of V. If they found something, its product is left to the
  // CUDA cores.
  __device__ __forceinline__ void heed_scanners(int stage) {
    full.peek(barriers.scanned - kBarrierBytes * Barriers::kV, v_full(stage));
    // Lane 0 reads the words and also releases V, which orders this read before the next write.
    const uint32_t words = barriers.has_nonfinite + 4 * kScanners * stage;
    uint32_t found = 0;
    if (lane() == 0)
      found = ptx::load_shared(words) | ptx::load_shared(words + 4 * (kScanners - 1));
    if (__shfl_sync(~0u, found, 0)) state |= kSkip;
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
      for (int d = 0; d < kQkPanels * 4; ++d) {
        uint32_t fragment[4];
        ptx::ldmatrix_x4(fragment, smem + q_stage() * kQBytes + d / 4 * 8192 + row * 128 +
                                       ((d % 4 * 2 + lane() / 16) ^ row % 8) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * d + i] = fragment[i];
      }
    }
    return (mine.left > 0 ? kInside : 0) | (mine.lead > 0 ? kPass : 0);
  }

  // Computes the pending product on the CUDA cores, because V holds NaN or infinity and a mask
  // hides keys.
  __device__ __forceinline__ void add_visible(int stage) {
    const uint32_t its_slot = is(kFresh) ? slot_before() : slot;
    const QueryTile tile = tile_of(its_slot);
    // Read once for each row, since registers are few.
    const auto bits_of_row = [&](int half) {
      if constexpr (!kHasBits) return ~0u;
      const StepBits bits = bits_of(Barriers::kV + stage);
      return bits.hide ? bits.of_row(half) : ~0u;
    };
    if constexpr (kTwoBlockRows) {
      const KeyStep pending_step = ring().step(pending);
      const int halves = pending_step.has_second() ? 2 : 1;
#pragma unroll 1
      for (int half = 0; half < halves; ++half)
        add_visible_products(o, p, tile.mask(params.base), queries_of(tile),
                             (pending_step.tile(half) - half) * 64, bits_of_row, v_at(smem, stage),
                             v_panel(stage), 64 * half, 64 * half + 64);
      return;
    }
    const int first_key =
        key_tile_at(its_slot, is(kFresh) ? tile.first_key_tile : key_tile + 1) * kBlockKv;
    add_visible_products(o, p, tile.mask(params.base), queries_of(tile), first_key, bits_of_row,
                         v_at(smem, stage), v_panel(stage));
  }

  // Completes the pending product: adds the part left to the CUDA cores and releases the stage of
  // V.
  __device__ __forceinline__ void take_product(int stage) {
    ptx::wgmma_pin(o), ptx::wgmma_pin(p);
    if (is(kSkip)) add_visible(stage);
    if (is(kPending)) release(Barriers::kV + stage);
  }
};

}  // namespace
}  // namespace blockflash

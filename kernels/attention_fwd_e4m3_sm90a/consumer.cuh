// A consumer warpgroup: 64 queries of each tile.
#pragma once

#include "blockflash/ptx/ldmatrix.cuh"
#include "output.cuh"
#include "products.cuh"
#include "softmax.cuh"
#include "turn_values.cuh"

namespace blockflash {
namespace {

// The scales of q and k of a query tile.
__device__ __forceinline__ float scale_of_scores(const Params& params, const QueryTile& tile) {
  const blockflash_attention_fwd_params& b = params.fwd.base;
  const blockflash_operand_scales& s = params.scales;
  const int head_kv = tile.head / (b.num_heads_q / b.num_heads_kv);
  float scale = 1.f;
  if (s.q != nullptr)
    scale = s.q[tile.batch * s.q_stride_batch + tile.head / s.q_heads_per_scale * s.q_stride_head];
  if (s.k != nullptr) scale *= s.k[tile.batch * s.k_stride_batch + head_kv * s.k_stride_head];
  return scale;
}

// What q·k is multiplied with in the exponent of 2. NaN if scores are capped, or if the factor is
// not positive and finite: then scores are multiplied before they are compared and masked.
__device__ __forceinline__ float exponent_of_scores(const Params& params, const QueryTile& tile) {
  const blockflash_scores& scores = params.fwd.base.scores;
  const float factor = scores.scale_log2 * scale_of_scores(params, tile);
  const bool is_plain = !(scores.softcap > 0.f) && factor >= FLT_MIN && factor <= FLT_MAX;
  return is_plain ? factor : CUDART_NAN_F;
}

// Of the 16 rows of a warp, a lane holds rows g and g + 8 (g = lane / 4) in every accumulator.
struct Consumer {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  PhaseBits full = PhaseBits::consumer();

  float s[kBlockKv / 2] = {};      // scores, then probabilities
  float t[kPartColumns / 2] = {};  // a part of the product of a key tile with V
  float o[kD / 2];                 // the output, relative to the references
  uint32_t p[kBlockKv / 8];        // probabilities in e4m3
  uint32_t q[kQWords];
  TileSoftmax<kBlockKv / 2> softmax;
  float weight[2];  // of the probabilities in p
  float exponent;   // see exponent_of_scores
  uint32_t slot;    // of the query tile
  int key_tile;     // position of the next key tile
  // Of the next key tile in the rings of K and of V transposed. The pending one is in the stage
  // before.
  int stage = 0;

  // Computed where it is needed, or it would be spilled.
  static __device__ __forceinline__ int warpgroup() {
    return ptx::opaque(static_cast<int>(threadIdx.x)) / 128 - 1;
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ const blockflash_scores& scores() const {
    return params.fwd.base.scores;
  }
  __device__ __forceinline__ KeyWalk walk() const {
    return KeyWalk::load(slot + kWalkInSlot + 16 * warpgroup());
  }
  __device__ __forceinline__ int q_stage() const {
    return slot_parity(smem, slot) % Config::q_stages * kWarpgroups + warpgroup();
  }
  __device__ __forceinline__ void release(int stage) const {
    if (lane() == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, stage));
  }
  // Releases Q once the scores of the last key tile are complete, or those of the first one if it
  // is in registers: WGMMA may still read fragments that ldmatrix has requested but that have not
  // arrived.
  __device__ __forceinline__ void release_q_after(int position) const {
    const int first = QueryTile::load(slot).first_key_tile;
    if (position == first + (Config::q_in_registers ? walk().left - 1 : 0))
      release(Barriers::kQ + q_stage());
  }
  __device__ __forceinline__ bool is_masked(int position) const {
    const KeyWalk mine = walk();
    return position > mine.unmasked_last || position < mine.unmasked_first;
  }

  // The keys that both rows of this lane attend to, relative to `first` in the key tile at a
  // position.
  __device__ __forceinline__ void keys_of_rows(int position, int first, KeyRange (&keys)[2]) const {
    const QueryTile tile = QueryTile::load(slot);
    first += TileList::load(slot + kListInSlot).tile_at(position) * kBlockKv;
    const int row = tile.q_begin + warpgroup() * kRowStep + threadIdx.x / 32 % 4 * 16 +
                    accumulator_row(lane(), 0);
    const AttentionMask mask = tile.mask(params.fwd.base);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      keys[half] = mask.keys_of<int>(row + 8 * half);
      keys[half].begin -= first, keys[half].end -= first;
    }
  }

  __device__ __forceinline__ void load_q() {
    if constexpr (Config::q_in_registers) {
      const uint32_t from = smem + q_stage() * kQBytes;
      const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
      constexpr int kChunks = kRowBytes / 16;
#pragma unroll
      for (int d = 0; d < kD / 32; ++d) {
        const int chunk = 2 * d + lane() / 16;
        uint32_t fragment[4];
        ptx::ldmatrix_x4(fragment, from + chunk / kChunks * 64 * kRowBytes +
                                       swizzled<kRowBytes>(row, chunk % kChunks));
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * d + i] = fragment[i];
      }
    }
  }

  // Releases key tiles that no query of this warpgroup sees.
  __device__ __forceinline__ void pass(int key_tiles) {
#pragma unroll 1
    for (int i = 0; i < key_tiles; ++i) {
      full.wait(barriers.full, stage);
      release(stage);
      full.wait(barriers.full, Barriers::kV + stage);
      release(Barriers::kV + stage);
      stage = next_stage<kStages>(stage);
    }
  }

  __device__ __forceinline__ bool is_plain() const { return exponent == exponent; }

  // What happens to scores before the softmax, in key tiles with a mask or of query tiles that are
  // not plain.
  __device__ __forceinline__ void treat_scores() {
    if (!is_plain()) {
      const bool caps = scores().softcap > 0.f;
      float factor = scale_of_scores(params, QueryTile::load(slot));
      if (!caps) factor *= scores().scale;
#pragma unroll
      for (int i = 0; i < kBlockKv / 2; ++i) s[i] *= factor;
      if (caps) cap_each(s, scores());
    }
    if (!is_masked(key_tile)) return;
    KeyRange keys[2];
    keys_of_rows(key_tile, accumulator_column(lane(), 0), keys);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      mask_row(s, half, visible_keys(keys[half].begin, keys[half].end));
  }

  template <bool is_masked>
  __device__ __forceinline__ void compute_probabilities(float factor, float (&next)[2]) {
    softmax.probabilities<is_masked>(s, factor, next, [&](const float(&shrink)[2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) weight[half] *= shrink[half];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) o[i] *= shrink[i / 2 % 2];
    });
  }

  // o += weight·t for a part of the columns.
  __device__ __forceinline__ void add_part(int part) {
    float* const sums = o + kPartColumns / 2 * part;
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) sums[i] = fmaf(t[i], weight[i / 2 % 2], sums[i]);
  }

  // Where V in this stage has NaN, at the key tile of a position with a mask: the columns of rows
  // that see one become NaN. This is rare, so the code is small rather than fast.
  __device__ __forceinline__ void spread_nan(int stage, int position) {
    const uint32_t words = barriers.has_nan + 4 * kTurners * stage;
    if ((ptx::load_shared(words) | ptx::load_shared(words + 4)) == 0) return;
    KeyRange keys[2];
    keys_of_rows(position, 0, keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = min(keys[half].end, kBlockKv);
#pragma unroll 1
      for (int key = max(keys[half].begin, 0); key < end; ++key) {
        // Its place among 16 keys: see turn_values.cuh.
        const int place = key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
        const uint32_t tile = smem + kVOffset + stage * kKvBytes + place / 4 * 4;
#pragma unroll
        for (int i = 0; i < kD / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = 8 * i + accumulator_column(lane(), e);
            const uint32_t codes = ptx::load_shared(tile + swizzled<kBlockKv>(row, key / 16));
            if ((codes >> place % 4 * 8 & 0xff) == kNanMark) o[4 * i + 2 * half + e] = CUDART_NAN_F;
          }
      }
    }
  }

  // The product of the pending probabilities with V, of the stage before `stage`.
  __device__ __forceinline__ void multiply_pending() {
    const int v_now = previous_stage<kStages>(__shfl_sync(~0u, stage, 0));
    full.wait(barriers.full, Barriers::kV + v_now);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::wgmma_pin(o), ptx::wgmma_pin(t), ptx::wgmma_pin(p);
      ptx::wgmma_fence();
      start_part(t, p, smem, v_now, part);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(t), ptx::wgmma_pin(p);
      add_part(part);
    }
    spread_nan(v_now, key_tile + 1);
    release(Barriers::kV + v_now);
  }

  // The probabilities of the next key tile, which may have a mask, and of scores that may not be
  // plain. Nothing is pending, which leaves registers for that.
  __device__ __forceinline__ void general_step() {
    const int k_now = __shfl_sync(~0u, stage, 0);
    full.wait(barriers.full, k_now);
    ptx::wgmma_pin(s);
    ptx::wgmma_fence();
    start_scores(s, q, smem, q_stage(), k_now);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(s);
    release(k_now);
    release_q_after(key_tile);
    treat_scores();
    compute_probabilities<true>(is_plain() ? exponent : kLog2e, weight);
    softmax.round(s, p);
    ptx::wgmma_pin(p);
    stage = next_stage<kStages>(k_now);
    --key_tile;
  }

  // The probabilities of the next key tile and the product of the pending ones with V: neither has
  // a mask, and scores are plain.
  __device__ __forceinline__ void fast_step(int k_now) {
    const int v_now = previous_stage<kStages>(k_now);
    full.wait(barriers.full, k_now);
    // Where there are several parts, the first one is issued before the scores.
    constexpr bool kPartFirst = kParts > 1;
    if constexpr (kPartFirst) full.wait(barriers.full, Barriers::kV + v_now);
    ptx::wgmma_pin(o), ptx::wgmma_pin(s), ptx::wgmma_pin(p), ptx::wgmma_pin(t);
    ptx::wgmma_fence();
    if constexpr (kPartFirst) {
      start_part(t, p, smem, v_now, 0);
      start_scores(s, q, smem, q_stage(), k_now);
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_pin(t);
      add_part(0);
      ptx::wgmma_pin(o);
      ptx::wgmma_fence();
      start_part(t, p, smem, v_now, 1);
    } else {
      start_scores(s, q, smem, q_stage(), k_now);
      full.wait(barriers.full, Barriers::kV + v_now);
      ptx::wgmma_fence();
      start_part(t, p, smem, v_now, 0);
    }
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(s);
    release(k_now);
    if constexpr (!Config::q_in_registers) release_q_after(key_tile);
    float next[2];
    compute_probabilities<false>(exponent, next);
    // Never: a branch on all exponentials keeps the assembler from moving the wait above them.
    if (softmax.sum[0] + softmax.sum[1] < 0.f) __nanosleep(1);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(t), ptx::wgmma_pin(p);
#pragma unroll
    for (int part = 2; part < kParts; ++part) {
      add_part(part - 1);
      ptx::wgmma_pin(o);
      ptx::wgmma_fence();
      start_part(t, p, smem, v_now, part);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(t), ptx::wgmma_pin(p);
    }
    release(Barriers::kV + v_now);
    softmax.round(s, p);
    ptx::wgmma_pin(p);
    add_part(kParts - 1);
    weight[0] = next[0], weight[1] = next[1];
    stage = next_stage<kStages>(k_now);
    --key_tile;
  }

  __device__ __forceinline__ void clear() {
    softmax.reset();
    weight[0] = weight[1] = 1.f;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] = 0.f;
  }

  __device__ __forceinline__ void run() {
    slot = slot_of(smem, kSlots - 1);
#pragma unroll 1
    for (;;) {
      slot = next_slot(smem, slot);
      full.wait(barriers.full, Barriers::kQ + q_stage());
      const QueryTile tile = QueryTile::load(slot);
      if (tile.key_tiles < 0) break;
      const KeyWalk mine = walk();
      exponent = exponent_of_scores(params, tile);
      load_q();
      pass(mine.lead);
      clear();
      if (mine.left == 0) {
        release(Barriers::kQ + q_stage());
      } else {
        key_tile = tile.first_key_tile + mine.left - 1;
#pragma unroll 1
        for (;;) {
          general_step();
          // A fast step needs a pending key tile without a mask, too. The loop is unrolled over the
          // rings, so that stages are constants.
          const UnmaskedTiles unmasked = UnmaskedTiles::of(slot);
          if (is_plain() && key_tile < unmasked.last) {
            const int until = max(unmasked.first, QueryTile::load(slot).first_key_tile);
#pragma unroll 1
            while (key_tile >= until) {
#pragma unroll
              for (int u = 0; u < kStages; ++u)
                if (stage == u && key_tile >= until) fast_step(u);
            }
          }
          multiply_pending();
          if (key_tile < QueryTile::load(slot).first_key_tile) break;
        }
      }
      store(QueryTile::load(slot));
    }
  }

  __device__ __forceinline__ void store(const QueryTile& tile) const {
    const blockflash_operand_scales& s = params.scales;
    const blockflash_attention_fwd_params& b = params.fwd.base;
    const int head_kv = tile.head / (b.num_heads_q / b.num_heads_kv);
    const float v_scale =
        s.v == nullptr ? 1.f : s.v[tile.batch * s.v_stride_batch + head_kv * s.v_stride_head];
    store_output(params, tile, o, softmax, v_scale, warpgroup());
  }
};

}  // namespace
}  // namespace blockflash

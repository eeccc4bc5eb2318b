// Shared memory and mbarriers of the Hopper attention kernel.
#pragma once

#include "blockflash/config/attention_bits.cuh"
#include "blockflash/config/attention_hopper.cuh"
#include "blockflash/scheduler.cuh"
#include "cache_tiles.cuh"
#include "query_tiles.cuh"
#include "two_block_rows.cuh"

namespace blockflash {

using Config = AttentionHopperConfig;
using Params = blockflash_attention_fwd_tma_params;
using Origin = OriginOfKeys<Config::cache>;
using KernelParams = ParamsFor<Origin::Params, blockflash_attention_fwd_tma_terms_params>;
using Queue = Origin::Queue<Config::block_q, Config::heads, Config::block_rows>;

constexpr int kDQk = Config::head_dim_qk, kDV = Config::head_dim_v, kBlockKv = Config::block_kv,
              kWarpgroups = Config::warpgroups, kStages = Config::stages;
// Panels have 64 columns: rows of 128 bytes with the 128-byte swizzle.
constexpr int kQkPanels = (kDQk + 63) / 64, kVPanels = (kDV + 63) / 64;
constexpr bool kOnes =
    kDV % 64 == 0 &&
    kDV < 256;  // a panel of ones behind each tile of V; at 256 WGMMA has no columns left
constexpr int kOutColumns = kDV + (kOnes ? 8 : 0);
// Whether the warpgroups have a block row each, with a list of its own.
constexpr bool kTwoBlockRows = Config::block_rows > 1;
// Distance from one warpgroup to the next: in rows of Q, or in heads. Two block rows can be
// anywhere.
constexpr int kRowStep = Config::heads > 1 || kTwoBlockRows ? 0 : 64,
              kHeadStep = Config::heads > 1 ? 1 : 0;
// Warps that look for NaN and infinity in V. Over a cache one of them loads V instead, and where
// there is a bias it loads that.
constexpr int kScanners = Config::cache ? 1 : 2, kReadersOfTiles = 2;
// Q has a single buffer, which becomes free when the scores of the last key tile are complete. The
// scores of the next queries are then issued after P·V of that key tile instead of before it.
constexpr bool kLateQ = !Config::q_in_registers && Config::q_stages == 1;

// Registers per thread of producer and consumers. The scheduler of two block rows, and that of a
// cache, need some more. Together they must not exceed the registers that
// the launch bounds give the CTA, or setmaxnreg would wait for ever.
constexpr bool kWideProducers = kTwoBlockRows || (Config::cache && kWarpgroups == 2);
constexpr int kProducerRegisters = kWideProducers            ? 56
                                   : Config::min_blocks == 3 ? 32
                                   : kWarpgroups == 1        ? 56
                                   : kWarpgroups == 2        ? 40
                                                             : 32;
constexpr int kConsumerRegisters = kWideProducers            ? 224
                                   : Config::min_blocks == 3 ? 128
                                   : Config::min_blocks == 2 ? 200
                                   : kWarpgroups == 1        ? 240
                                   : kWarpgroups == 2        ? 232
                                                             : 160;

// Shared memory: Q by stage and warpgroup; the rings of K and V; a page with tile slots and
// mbarriers; a page of zeros; and, where it fits, a staging area for the output, 16 rows per warp.
constexpr int kVStages = kTwoBlockRows ? 2 : kStages;
constexpr int kPanelBytes = kBlockKv * 128;
constexpr int kQBytes = 64 * 128 * kQkPanels, kOBytes = 64 * 128 * kVPanels,
              kKBytes = kPanelBytes * kQkPanels, kVBytes = kPanelBytes * kVPanels,
              kVStageBytes = kVBytes + kOnes * kPanelBytes;
constexpr int kKOffset = kWarpgroups * Config::q_stages * kQBytes,
              kVOffset = kKOffset + kStages * kKBytes;
// With two block rows, with score terms and where K is wider than V, both stages of V share the
// ones, as a panel that is as far behind the last panel as that one is behind the one before: in
// the first stage by one panel, in the second by one more than there are of V, between which are
// as many of a stage of K, the last ones.
constexpr bool kUnequal = kDQk != kDV;
constexpr bool kSharedOnes =
    kTwoBlockRows || (kAddsTerms && kOnes) || (kUnequal && kOnes && kStages == 2);
constexpr int kOnesOffset = kVOffset + 2 * kVBytes;
// From one stage of K to the next; the first panel of the second stage of V may be between them.
constexpr int kGapBytes = kSharedOnes && !kTwoBlockRows && kVPanels > 1 ? kPanelBytes : 0;
constexpr int kKStageBytes = kKBytes + kGapBytes;
constexpr int kSlotOffset =
                  kSharedOnes ? kOnesOffset + kPanelBytes : kVOffset + kStages * kVStageBytes,
              kSlots = 6, kSlotBytes = 16 * (4 + kWarpgroups | 1);
constexpr int kBarrierOffset = kSlotOffset + kSlots * kSlotBytes, kZerosOffset = kSlotOffset + 1024;
// With score terms a warpgroup has a ring of boxes of 64 × 64 elements of the bias: one more than a
// step takes. In the largest tiles they have the place of the output.
constexpr int kBoxBytes = 8192, kBoxes = kAddsTerms ? kBlockKv / 64 + 1 : 0;
constexpr bool kStaged = !kLateQ && Config::min_blocks == 1 && !kTwoBlockRows && !Config::cache &&
                         !(kAddsTerms && (kDV == 128 || kWarpgroups == 3)) &&
                         !(kUnequal && kSharedOnes);
constexpr int kStagingOffset = kZerosOffset + 1024, kStepOffset = kStagingOffset,
              kBiasOffset = kStagingOffset + kStaged * kWarpgroups * kOBytes;
static_assert(!kHasTerms ||
                  (kBlockKv % 64 == 0 && kBlockKv <= 128 && !kTwoBlockRows && !Config::cache),
              "boxes and bits have 64 keys");
static_assert(!kAddsTerms || kStages == 2, "stages share the ones in pairs");
static_assert(!kTwoBlockRows || (!kUnequal && kVPanels == kScanners),
              "K and V of a step have one size, and a scanner has a panel");
static_assert(!kSharedOnes || kAddsTerms || kVPanels == kScanners, "a scanner has a panel of V");
static_assert(!kSharedOnes || (kVPanels <= 2 && kVPanels <= kQkPanels && kQkPanels <= 3),
              "stages of K and V are interleaved in pairs of panels");
constexpr int kReleases =
    kTwoBlockRows ? 3 : 1;  // K and V are for one of two warpgroups, or for both

// Where a stage begins, and how far apart its panels are.
__device__ __forceinline__ uint32_t k_at(uint32_t smem, int stage) {
  return smem + kKOffset + stage * kKStageBytes + (kTwoBlockRows && stage == 2 ? kPanelBytes : 0);
}
// How far before its place in a row a panel begins: the first of three is before that of V.
__device__ __forceinline__ constexpr int k_panel_shift(int stage, int panel) {
  return panel < kQkPanels - kVPanels ? stage * kGapBytes : 0;
}
__device__ __forceinline__ constexpr int v_panel(int stage) {
  return kSharedOnes && stage != 0 ? (kVPanels + 1) * kPanelBytes : kPanelBytes;
}
__device__ __forceinline__ uint32_t v_at(uint32_t smem, int stage) {
  return kSharedOnes ? smem + kOnesOffset - kVPanels * v_panel(stage)
                     : smem + kVOffset + stage * kVStageBytes;
}

// Tiles of 192 queries divide no block with bits.
constexpr bool kHasBits = kHasTerms && kWarpgroups != 3;

// Each stage of the rings of K, V and Q, and each box of the bias, in this order, has a "full" and
// an "empty" mbarrier and a phase bit; with two block rows a stage of K or V has three of each, by
// the rows that it is for, and only the first "empty" one of them is used.
struct Barriers : TileBarriers<1> {
  static constexpr int kV = kReleases * kStages, kQ = kV + kReleases * kVStages,
                       kBias = kQ + kWarpgroups * Config::q_stages,
                       kCount = kBias + kWarpgroups * kBoxes;
  uint32_t full, empty;
  // Of the NaN scanners: an mbarrier per stage of V; a word per stage and warp.
  uint32_t scanned, has_nonfinite;
  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : TileBarriers(at + 16 * kCount),
        full(at),
        empty(at + 8 * kCount),
        scanned(published + 16),
        has_nonfinite(scanned + 8 * kReleases * kVStages) {}

  // With score terms a word per stage of K and of V: the first bits of its key tile, or -1.
  __device__ __forceinline__ uint32_t bits_of(int stage) const {
    return has_nonfinite + 4 * (kScanners * kVStages + stage);
  }

  __device__ __forceinline__ void init(int all_scanners = kScanners) const {
    for (int i = 0; i < kCount; ++i) {
      // One arrival per warp that reads the stage: one warpgroup for Q, all consumers for K and V,
      // the NaN-scanner warps for V, and for the first Q all warps that learn of a tile by it.
      const int scanners = i >= kBias                               ? 0
                           : i >= kQ && (i - kQ) % kWarpgroups == 0 ? kReadersOfTiles
                           : i >= kV && i < kQ                      ? all_scanners
                                                                    : 0;
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, (i < kQ ? kWarpgroups * 4 : 4) + scanners);
    }
    for (int i = 0; i < kReleases * kVStages; ++i)
      ptx::mbarrier_init(scanned + 8 * i, all_scanners);
    if (kAddsTerms)  // what no scanner writes
      for (int i = 0; i < kScanners * kVStages; ++i) ptx::store_shared(has_nonfinite + 4 * i, 0);
    TileBarriers::init(1);
    ptx::fence_mbarrier_init();
  }
};
static_assert(kSlots * kSlotBytes + 16 * Barriers::kCount + 16 +
                      (8 * kReleases + 4 * kScanners) * kVStages + kHasBits * 8 * kStages <=
                  1024,
              "slots and barriers are a page");
// memcheck of CUDA 13.0 takes the columns of ones of a WGMMA for as many bytes in a row as all its
// columns of values have, which would end behind the last page over a cache.
constexpr int kTailBytes = Config::cache * 1024;
static_assert(kBiasOffset + kWarpgroups * kBoxes * kBoxBytes + kTwoBlockRows * StepRing::kBytes +
                      kTailBytes ==
                  Config::smem_bytes,
              "manifest and kernel disagree on shared memory");

// A slot describes one query tile: the tile, its rows, its list of key tiles and the walk of each
// warpgroup. A count of -1 key tiles ends the queue.
__device__ __forceinline__ uint32_t slot_of(uint32_t smem, int n) {
  return smem + kSlotOffset + n % kSlots * kSlotBytes;
}
// Whether a slot belongs to an odd tile. Slots are an odd multiple of 16 bytes and even in number,
// so the address tells.
__device__ __forceinline__ int slot_parity(uint32_t smem, uint32_t slot) {
  return (slot - slot_of(smem, 0)) >> 4 & 1;
}
constexpr int kRowsInSlot = 32, kListInSlot = 48, kWalkInSlot = 64;
// Of two block rows: the first query of each, in place of the list.
constexpr int kPairInSlot = kListInSlot;

// The box of the bias that a warpgroup takes next: the first one whose phase is that of the last
// one. A counter would need a register.
__device__ __forceinline__ int next_box(const PhaseBits& of, int warpgroup) {
  const int first = warpgroup * kBoxes;
  const uint32_t phases = of.bits >> (Barriers::kBias + first);
  int box = kBoxes - 1;
#pragma unroll
  for (int i = kBoxes - 2; i >= 0; --i)
    if (!((phases ^ phases >> (kBoxes - 1 - i)) >> i & 1)) box = i;
  return first + box;
}

// The key tile at a position of the slot's list.
__device__ __forceinline__ int key_tile_at(uint32_t slot, int position) {
  if constexpr (kHasTerms && !kHasBits) return position;
  return TileList::load(slot + kListInSlot).tile_at(position);
}

}  // namespace blockflash

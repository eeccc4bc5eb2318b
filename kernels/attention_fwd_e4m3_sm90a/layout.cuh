// Shared memory and mbarriers of attention forward in e4m3.
#pragma once

#include <limits.h>

#include "../attention_fwd_sm90a/query_tiles.cuh"
#include "../attention_fwd_sm90a/two_block_rows.cuh"
#include "blockflash/config/attention_e4m3.cuh"
#include "blockflash/params/attention_fwd_e4m3.h"
#include "blockflash/scheduler.cuh"

namespace blockflash {

using Config = AttentionFwdE4m3Config;
using Params = blockflash_attention_fwd_e4m3_params;
using Queue = TileQueue<Config::block_q, 1, 1>;

constexpr int kD = Config::head_dim, kBlockKv = Config::block_kv, kWarpgroups = Config::warpgroups,
              kStages = Config::stages, kLoadedStages = Config::loaded_stages,
              kTurnedStages = Config::turned_stages;
// Q, K and V are in panels whose rows are as wide as their swizzle.
constexpr int kRowBytes = kD < 128 ? kD : 128, kPanels = kD / kRowBytes;
// Columns of the output that are computed at a time: few where registers are.
constexpr int kPartColumns = kWarpgroups == 3 ? 32 : 64, kParts = kD / kPartColumns;
static_assert(kD == 64 || kD % 128 == 0, "rows of a panel are 64 or 128 bytes");
static_assert(kBlockKv == 64 || kBlockKv == 128, "so are rows of V transposed");
static_assert(kStages == kTurnedStages, "consumers have one stage for both rings");
constexpr int kTurners = 2;  // warps that transpose V

// What the scheduler asks of a kernel.
struct Origin {
  static constexpr bool has_block_masks = true;
};
constexpr bool kTwoBlockRows = false, kHasBits = false;
constexpr int kRowStep = 64;  // rows of Q from one warpgroup to the next

// Registers per thread of producer and consumers. Together they must not exceed the registers that
// the launch bounds give the CTA, or setmaxnreg would wait for ever.
constexpr int kProducerRegisters = kWarpgroups == 1 ? 56 : kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = Config::min_blocks == 2 ? 200
                                   : kWarpgroups == 1      ? 240
                                   : kWarpgroups == 2      ? 232
                                                           : 160;

// Shared memory: Q by stage and warpgroup; the rings of K, of V as it is in memory, and of V
// transposed; tile slots and mbarriers.
constexpr int kQBytes = 64 * kD, kKvBytes = kBlockKv * kD;
constexpr int kKOffset = kWarpgroups * Config::q_stages * kQBytes,
              kLoadedOffset = kKOffset + kStages * kKvBytes,
              kVOffset = kLoadedOffset + kLoadedStages * kKvBytes,
              kSlotOffset = kVOffset + kTurnedStages * kKvBytes;
constexpr int kSlots = 6, kSlotBytes = 16 * (4 + kWarpgroups | 1),
              kBarrierOffset = kSlotOffset + kSlots * kSlotBytes;

// Each stage of the rings of K, V, V transposed and Q, in this order, has a "full" and an "empty"
// mbarrier and a phase bit.
struct Barriers : TileBarriers<1> {
  static constexpr int kLoaded = kStages, kV = kLoaded + kLoadedStages, kQ = kV + kTurnedStages,
                       kCount = kQ + kWarpgroups * Config::q_stages;
  uint32_t full, empty;
  uint32_t has_nan;  // a word per stage of V transposed and warp that wrote it

  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : TileBarriers(at + 16 * kCount), full(at), empty(at + 8 * kCount), has_nan(published + 16) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      // One arrival per warp that reads the stage. For the first Q also of the warps that transpose
      // V, which learn of a tile by it.
      const bool loaded = i >= kLoaded && i < kV, turned = i >= kV && i < kQ,
                 first_q = i >= kQ && (i - kQ) % kWarpgroups == 0;
      const int consumers = loaded ? 0 : i < kQ ? 4 * kWarpgroups : 4;
      ptx::mbarrier_init(full + 8 * i, turned ? kTurners : 1);
      ptx::mbarrier_init(empty + 8 * i, consumers + (loaded || first_q ? kTurners : 0));
    }
    TileBarriers::init(1);
    ptx::fence_mbarrier_init();
  }
};
constexpr int kSharedEnd =
    kBarrierOffset + 16 * Barriers::kCount + 16 + 4 * kTurners * kTurnedStages;
static_assert(kSharedEnd <= kSlotOffset + 2048 && kSlotOffset + 2048 == Config::smem_bytes,
              "manifest and kernel disagree on shared memory");

// A slot describes one query tile, as in the kernels of 16 bits.
__device__ __forceinline__ uint32_t slot_of(uint32_t smem, int n) {
  return smem + kSlotOffset + n % kSlots * kSlotBytes;
}
// Whether a slot belongs to an odd tile. Slots are an odd multiple of 16 bytes and even in number,
// so the address tells.
__device__ __forceinline__ int slot_parity(uint32_t smem, uint32_t slot) {
  return (slot - slot_of(smem, 0)) >> 4 & 1;
}
__device__ __forceinline__ uint32_t next_slot(uint32_t smem, uint32_t slot) {
  return slot == slot_of(smem, kSlots - 1) ? slot_of(smem, 0) : slot + kSlotBytes;
}
constexpr int kRowsInSlot = 32, kListInSlot = 48, kWalkInSlot = 64;
constexpr int kPairInSlot = kListInSlot, kStepOffset = 0;  // not used

// The positions of key tiles without a mask for all warpgroups.
struct UnmaskedTiles {
  int first, last;

  static __device__ __forceinline__ UnmaskedTiles of(uint32_t slot) {
    UnmaskedTiles all = {0, INT_MAX};
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const KeyWalk walk = KeyWalk::load(slot + kWalkInSlot + 16 * w);
      if (walk.left > 0)
        all = {max(all.first, walk.unmasked_first), min(all.last, walk.unmasked_last)};
    }
    return all;
  }
  __device__ __forceinline__ bool has(int position) const {
    return position >= first && position <= last;
  }
};

// Where the 16 bytes with this index are in a row of a tile whose rows are as wide as its swizzle.
template <int row_bytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * row_bytes + ((row_bytes == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4) << 4);
}

}  // namespace blockflash

// Shared memory, mbarriers and the producer warpgroup of the Hopper attention kernel.
#pragma once

#include "blockflash/config/attention.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "cache_tiles.cuh"
#include "query_tiles.cuh"

namespace blockflash {

using Config = AttentionFwdHopperConfig;
using Params = blockflash_attention_fwd_tma_params;
using Origin = OriginOfKeys<Config::cache>;
using KernelParams = Origin::Params;
using Queue = Origin::Queue<Config::block_q, Config::heads>;

constexpr int kD = Config::head_dim, kBlockKv = Config::block_kv, kWarpgroups = Config::warpgroups,
              kStages = Config::stages;
constexpr int kPanels =
    (kD + 63) / 64;  // 64 columns each: rows of 128 bytes with the 128-byte swizzle
constexpr bool kOnes =
    kD % 64 == 0 &&
    kD < 256;  // a panel of ones behind each tile of V; at 256 WGMMA has no columns left
constexpr int kOutColumns = kD + (kOnes ? 8 : 0);
constexpr bool kTurns = kWarpgroups > 1;
// Distance from one warpgroup to the next: in rows of Q, or in heads.
constexpr int kRowStep = Config::heads > 1 ? 0 : 64, kHeadStep = Config::heads > 1 ? 1 : 0;
// Warps that look for NaN and infinity in V. Over a cache one of them loads V instead.
constexpr int kCheckers = Config::cache ? 1 : 2, kReadersOfTiles = 2;
// Q has a single buffer, which becomes free when the scores of the last key tile are complete. The
// scores of the next queries are then issued after P·V of that key tile instead of before it.
constexpr bool kLateQ = !Config::q_in_registers && Config::q_stages == 1;

// Registers per thread of producer and consumers. Together they must not exceed the registers that
// the launch bounds give the CTA, or setmaxnreg would wait for ever.
constexpr int kProducerRegisters = Config::min_blocks == 3 ? 32
                                   : kWarpgroups == 1      ? 56
                                   : kWarpgroups == 2      ? 40
                                                           : 32;
constexpr int kConsumerRegisters = Config::min_blocks == 3   ? 128
                                   : Config::min_blocks == 2 ? 200
                                   : kWarpgroups == 1        ? 240
                                   : kWarpgroups == 2        ? 232
                                                             : 160;

// Shared memory: Q by stage and warpgroup; the rings of K and V; a page with tile slots and
// mbarriers; a page of zeros; and, where it fits, a staging area for the output, 16 rows per warp.
constexpr int kQBytes = 64 * 128 * kPanels, kKvBytes = kBlockKv * 128 * kPanels,
              kVStageBytes = kKvBytes + kOnes * kBlockKv * 128;
constexpr int kKOffset = kWarpgroups * Config::q_stages * kQBytes,
              kVOffset = kKOffset + kStages * kKvBytes;
constexpr int kSlotOffset = kVOffset + kStages * kVStageBytes, kSlots = 6,
              kSlotBytes = 16 * (4 + kWarpgroups | 1);
constexpr int kBarrierOffset = kSlotOffset + kSlots * kSlotBytes, kZerosOffset = kSlotOffset + 1024;
constexpr bool kStaged = !kLateQ && Config::min_blocks == 1;
constexpr int kStagingOffset = kZerosOffset + 1024;
static_assert(kSlots * kSlotBytes + 16 * (2 * kStages + kWarpgroups * Config::q_stages) + 16 +
                      (8 + 4 * kCheckers) * kStages <=
                  1024,
              "slots and barriers are a page");
static_assert(kStagingOffset + kStaged * kWarpgroups * kQBytes == Config::smem_bytes,
              "manifest and kernel disagree on shared memory");

// Each stage of the rings of K, V and Q, in this order, has a "full" and an "empty" mbarrier and a
// phase bit.
struct Barriers {
  static constexpr int kCount = 2 * kStages + kWarpgroups * Config::q_stages, kV = kStages,
                       kQ = 2 * kStages;
  uint32_t full, empty;
  uint32_t announced, wanted;   // between scheduler and producer
  uint32_t checked, nonfinite;  // an mbarrier per stage of V; a word per stage and checker warp
  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : full(at),
        empty(at + 8 * kCount),
        announced(at + 16 * kCount),
        wanted(announced + 8),
        checked(announced + 16),
        nonfinite(checked + 8 * kStages) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kCount; ++i) {
      // One arrival per warp that reads the stage: one warpgroup for Q, all consumers for K and V,
      // the checker warps for V, and for the first Q all warps that learn of a tile by it.
      const int checkers = i >= kQ && (i - kQ) % kWarpgroups == 0 ? kReadersOfTiles
                           : i >= kV && i < kQ                    ? kCheckers
                                                                  : 0;
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, (i < kQ ? kWarpgroups * 4 : 4) + checkers);
    }
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(checked + 8 * i, kCheckers);
    ptx::mbarrier_init(announced, 1), ptx::mbarrier_init(wanted, 1);
    ptx::fence_mbarrier_init();
  }
};

struct Phases {
  uint32_t bits;
  __device__ __forceinline__ void peek(uint32_t barriers, int stage) const {
    ptx::mbarrier_wait(barriers + 8 * stage, bits >> stage & 1);
  }
  __device__ __forceinline__ void wait(uint32_t barriers, int stage) {
    peek(barriers, stage);
    bits ^= 1u << stage;
  }
};

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

// The key tile at a position of the slot's list.
__device__ __forceinline__ int key_tile_at(uint32_t slot, int position) {
  return TileList::load(slot + kListInSlot).tile_at(position);
}

// A whole warp takes the next query tile and computes its walks, one number per lane.
__device__ __forceinline__ bool announce(Queue& queue, uint32_t slot) {
  const blockflash_attention_fwd_params& p = queue.params.base;
  const int lane = threadIdx.x % 32;
  QueryTile tile;
  if (!queue.take(tile)) {
    if (lane == 0) QueryTile{0, 0, 0, 0, 0, 0, 0, -1}.store(slot);
    return false;
  }
  const TileList list = Origin::has_block_masks ? TileList::of(p.block_mask, kBlockKv, tile.batch,
                                                               tile.head, tile.q_begin)
                                                : TileList{nullptr, 0, 1};
  // Lanes 0 and 1 find the ends of the whole tile, lanes 4 w + 4 to 4 w + 7 the walk of warpgroup
  // w.
  const int warpgroup = lane / 4 - 1, word = lane % 4;
  const bool whole = warpgroup < 0;
  const KeyLimits limits = KeyLimits::of<kBlockKv>(p, tile, whole ? 0 : warpgroup * kRowStep,
                                                   whole ? Config::block_q : 64);
  const int limit = whole ? (word == 0 ? limits.begin : limits.end)
                          : (word < 2    ? limits.end
                             : word == 2 ? limits.unmasked_begin
                                         : limits.unmasked_end);
  const int position = limit > 0 ? list.lower_bound(limit) : 0,
            first = __shfl_sync(~0u, position, 0);
  const int key_tiles = max(__shfl_sync(~0u, position, 1) - first, 0),
            left = min(max(position - first, 0), key_tiles);
  const int walk = word == 0   ? left
                   : word == 1 ? key_tiles - left
                   : word == 2 ? max(position, first)
                               : position - 1;
  if (!whole && warpgroup < kWarpgroups)
    ptx::store_shared(slot + kWalkInSlot + 16 * warpgroup + 4 * word, walk);
  if (lane == 0) {
    tile.first_key_tile = first, tile.key_tiles = key_tiles;
    tile.store(slot);
    queue.rows_of(tile).store(slot + kRowsInSlot);
    list.store(slot + kListInSlot);
  }
  return true;
}

// The scheduler warp. It prefetches the next query tile kAnnounceAhead key tiles before the
// producer needs it: early enough to hide the lookup, late enough to keep dynamic load balancing.
// The first tile has been announced already.
constexpr int kAnnounceAhead = 8;
__device__ __forceinline__ void schedule(Queue& queue, uint32_t smem, const Barriers& barriers) {
  const auto announced = [&] {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.announced);
  };
  announced();
  ptx::wait_for_predecessors();
  bool more = QueryTile::load(slot_of(smem, 0)).key_tiles >= 0;
  for (int n = 1; more; ++n) {
    ptx::mbarrier_wait(barriers.wanted, (n - 1) & 1);
    __syncwarp();
    queue.advance();
    more = announce(queue, slot_of(smem, n));
    announced();
  }
  if (threadIdx.x % 32 == 0) queue.close();
}

// One thread issues all TMA loads. V of a key tile follows K of the next one, also across query
// tiles. Over a cache a whole warp is here, to look up pages, and another one loads V.
template <class Given>  // KernelParams, as a template so that what the other origin has is
                        // discarded
__device__ __forceinline__ void produce(const Given& kernel_params, uint32_t smem,
                                        const Barriers& barriers) {
  const Params& params = reinterpret_cast<const Params&>(kernel_params);
  const bool issues = Origin::producers == 1 || threadIdx.x == 0;
  Phases empty = {~0u};  // every stage is empty at first
  const auto open = [&](int stage, int bytes) {
    empty.wait(barriers.empty, stage);
    if (issues) ptx::mbarrier_arrive_expect_tx(barriers.full + 8 * stage, bytes);
  };
  const auto copy = [&](int stage, uint32_t dst, int bytes, int rows,
                        const blockflash_tensor_map& map, int row, int head, int batch) {
    open(stage, bytes);
    if (!issues) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tensor_copy_4d(dst + panel * rows * 128, &map, panel * 64, row, head, batch,
                          barriers.full + 8 * stage);
  };
  const auto copy_keys = [&](int stage, uint32_t dst, const blockflash_tensor_map& map,
                             const TileRows& rows, int key_tile, const CachePieces& pieces) {
    if constexpr (!Config::cache) {
      copy(stage, dst, kKvBytes, kBlockKv, map, rows.kv + key_tile * kBlockKv, rows.head_kv,
           rows.batch);
    } else {
      open(stage, kKvBytes);
      pieces.copy<kBlockKv, kPanels>(kernel_params, map, dst, rows.head_kv,
                                     barriers.full + 8 * stage);
    }
  };
  const auto look_up = [&](uint32_t slot, int key_tile) {
    if constexpr (Config::cache)
      return CachePieces::of(kernel_params, QueryTile::load(slot), key_tile * kBlockKv);
    else
      return CachePieces{0, 0};
  };
  int stage = 0;    // stage of the next key tile
  int v_next = -1;  // key tile whose V is still to be loaded, into the stage before `stage`
  const auto copy_v = [&](uint32_t slot) {
    if (Config::cache || v_next < 0) return;
    const TileRows rows = TileRows::load(slot + kRowsInSlot);
    const int v_stage = stage == 0 ? kStages - 1 : stage - 1;
    copy_keys(Barriers::kV + v_stage, smem + kVOffset + v_stage * kVStageBytes, params.v, rows,
              v_next, CachePieces{0, 0});
    v_next = -1;
  };
  const auto copy_q = [&](int n, uint32_t slot, bool wanted) {
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const int at = n % Config::q_stages * kWarpgroups + w;
      if (wanted) {
        const TileRows rows = TileRows::load(slot + kRowsInSlot);
        copy(Barriers::kQ + at, smem + at * kQBytes, kQBytes, 64, params.q, rows.q + w * kRowStep,
             QueryTile::load(slot).head + w * kHeadStep, rows.batch);
      } else {
        empty.wait(barriers.empty, Barriers::kQ + at);
        if (issues) ptx::mbarrier_arrive(barriers.full + 8 * (Barriers::kQ + at));
      }
    }
  };
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (Config::cache) __syncwarp();  // no lane may fall a phase behind
    ptx::mbarrier_wait(barriers.announced, n & 1);
    const uint32_t slot = slot_of(smem, n);
    const int key_tiles = QueryTile::load(slot).key_tiles;
    // Every consumer has one of the two previous tiles or is completing the one before them, so the
    // slot of the next tile is free.
    if (issues && key_tiles >= 0 && key_tiles < kAnnounceAhead)
      ptx::mbarrier_arrive(barriers.wanted);
    if (key_tiles <= 0) copy_v(slot_of(smem, n - 1));
    if (!kLateQ || key_tiles <= 0) copy_q(n, slot, key_tiles > 0);
    if (key_tiles < 0) break;
    Origin::Walk tiles(slot + kListInSlot, QueryTile::load(slot).first_key_tile + key_tiles - 1);
    CachePieces pieces = look_up(slot, tiles.tile());
#pragma unroll 1
    for (int left = key_tiles; left > 0; --left) {
      const int now = tiles.tile();
      tiles.advance();
      const TileRows rows = TileRows::load(slot + kRowsInSlot);
      copy_keys(stage, smem + kKOffset + stage * kKvBytes, params.k, rows, now, pieces);
      copy_v(left == key_tiles ? slot_of(smem, n - 1) : slot);
      if (kLateQ && left == key_tiles) copy_q(n, slot, true);
      v_next = now;
      // While a stage becomes free.
      if (left > 1) pieces = look_up(slot, tiles.tile());
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (issues && left == kAnnounceAhead) ptx::mbarrier_arrive(barriers.wanted);
    }
  }
}

// Over a cache a second warp loads V: one warp alone issues the loads of small pages more slowly
// than the tensor cores multiply. It learns of query tiles as checker warps do.
template <class Given>
__device__ __forceinline__ void produce_values(const Given& kernel_params, uint32_t smem,
                                               const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  Phases empty = {~0u}, full = {0};
  int stage = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int q = Barriers::kQ + n % Config::q_stages * kWarpgroups;
    full.wait(barriers.full, q);
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    const int head_kv = TileRows::load(slot + kRowsInSlot).head_kv;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty + 8 * q);
    if (tile.key_tiles < 0) break;
#pragma unroll 1
    for (int key_tile = tile.first_key_tile + tile.key_tiles - 1; key_tile >= tile.first_key_tile;
         --key_tile) {
      const int at = Barriers::kV + stage;
      const CachePieces pieces = CachePieces::of(kernel_params, tile, key_tile * kBlockKv);
      empty.wait(barriers.empty, at);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barriers.full + 8 * at, kKvBytes);
      __syncwarp();
      pieces.copy<kBlockKv, kPanels>(kernel_params, kernel_params.fwd.v,
                                     smem + kVOffset + stage * kVStageBytes, head_kv,
                                     barriers.full + 8 * at);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }
}

}  // namespace blockflash

// Shared memory, barriers and the producer warpgroup of attention_fwd_sm90a.cu.
#pragma once

#include "attention_tiles.cuh"
#include "config.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace blockflash {

using Config = AttentionFwdHopperConfig;
using Params = blockflash_attention_fwd_tma_params;
using Queue = TileQueue<Config::block_q, Config::block_kv>;

constexpr int kD = Config::head_dim, kBlockKv = Config::block_kv, kWarpgroups = Config::warpgroups, kStages = Config::stages;
constexpr int kPanels = (kD + 63) / 64;               // of 64 columns: a row of 128 bytes, with 128-byte swizzle
constexpr bool kOnes = kD % 64 == 0 && kD < 256;      // a panel of ones behind each tile of V; at 256 a product has no columns left
constexpr int kOutColumns = kD + (kOnes ? 8 : 0);
constexpr bool kTurns = kWarpgroups > 1;
// Scores of the next queries start before the queries before them are finished: Q needs a second place.
constexpr bool kOverlapTiles = Config::q_in_registers || Config::q_stages == 2;

// Shared memory: Q by stage and warpgroup, rings of K and V, a page of tile slots and barriers, one of zeros, and the output on its way to
// global memory, 16 rows per warp. Where tiles do not overlap the output takes the place of Q, which is given back after it.
constexpr int kQBytes = 64 * 128 * kPanels, kKvBytes = kBlockKv * 128 * kPanels, kVStageBytes = kKvBytes + kOnes * kBlockKv * 128;
constexpr int kKOffset = kWarpgroups * Config::q_stages * kQBytes, kVOffset = kKOffset + kStages * kKvBytes;
constexpr int kSlotOffset = kVOffset + kStages * kVStageBytes, kSlots = 4, kSlotBytes = 48 + 16 * kWarpgroups;
constexpr int kBarrierOffset = kSlotOffset + kSlots * kSlotBytes, kZerosOffset = kSlotOffset + 1024;
constexpr bool kStageInQ = !kOverlapTiles;
constexpr int kStagingOffset = kStageInQ ? 0 : kZerosOffset + 1024;
static_assert(kZerosOffset + 1024 + !kStageInQ * kWarpgroups * kQBytes == Config::smem_bytes, "manifest and kernel disagree on smem");

// Each stage of the rings of K, V and Q (in this order) has a barrier for "full" and one for "empty". The rings of K and V restart at stage 0
// for every tile of queries, so that stages are constants in unrolled code; each stage has a phase bit of its own.
struct Barriers {
  static constexpr int kCount = 2 * kStages + kWarpgroups * Config::q_stages, kV = kStages, kQ = 2 * kStages;
  uint32_t full, empty, announced, wanted;  // the last two: between scheduler and producer
  __device__ __forceinline__ explicit Barriers(uint32_t at)
      : full(at), empty(at + 8 * kCount), announced(at + 16 * kCount), wanted(at + 16 * kCount + 8) {}
};

struct Phases {
  uint32_t bits;
  __device__ __forceinline__ void peek(uint32_t barriers, int stage) const { ptx::mbarrier_wait(barriers + 8 * stage, bits >> stage & 1); }
  __device__ __forceinline__ void wait(uint32_t barriers, int stage) {
    peek(barriers, stage);
    bits ^= 1u << stage;
  }
};

// A slot tells about one tile of queries: the tile, its rows, and the walk of each warpgroup. No key tiles: -1 at the end of the queue.
__device__ __forceinline__ uint32_t slot_of(uint32_t smem, int n) { return smem + kSlotOffset + n % kSlots * kSlotBytes; }

__device__ __forceinline__ bool announce(Queue& queue, uint32_t slot) {
  if (!queue.take(slot)) {
    QueryTile{0, 0, 0, 0, 0, 0, 0, -1}.store(slot);
    return false;
  }
  // From memory again and again: the producer has few registers.
  TileRows::of<kBlockKv>(queue.params.base, QueryTile::load(slot)).store(slot + 32);
#pragma unroll 1
  for (int w = 0; w < kWarpgroups; ++w) KeyWalk::of<kBlockKv>(queue.params.base, QueryTile::load(slot), w * 64).store(slot + 48 + 16 * w);
  return true;
}

// One thread takes tiles from the queue, some key tiles before the producer needs the next one, since it takes a while; not earlier, since
// whoever is slow should take fewer. It has announced the first one already.
constexpr int kAnnounceAhead = 8;
__device__ __forceinline__ void schedule(Queue& queue, uint32_t smem, const Barriers& barriers) {
  ptx::mbarrier_arrive(barriers.announced);
  ptx::wait_for_predecessors();
  bool more = QueryTile::load(slot_of(smem, 0)).key_tiles >= 0;
  for (int n = 1; more; ++n) {
    ptx::mbarrier_wait(barriers.wanted, (n - 1) & 1);
    queue.advance();
    more = announce(queue, slot_of(smem, n));
    ptx::mbarrier_arrive(barriers.announced);
  }
  queue.close();
}

// One thread starts the copies. V of a key tile follows K of the next one, also across tiles of queries.
__device__ __forceinline__ void produce(const Params& params, uint32_t smem, const Barriers& barriers) {
  Phases empty = {~0u};  // everything is empty at first
  const auto copy = [&](int stage, uint32_t dst, int bytes, int rows, const blockflash_tensor_map& map, int row, int head, int batch) {
    empty.wait(barriers.empty, stage);
    ptx::mbarrier_arrive_expect_tx(barriers.full + 8 * stage, bytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tensor_copy_4d(dst + panel * rows * 128, &map, panel * 64, row, head, batch, barriers.full + 8 * stage);
  };
  uint32_t v_slot = 0;
  int v_next = -1;  // key tile whose V has not been copied
  const auto copy_v = [&] {
    if (v_next < 0) return;
    const TileRows rows = TileRows::load(v_slot + 32);
    const int stage = v_next % kStages;
    copy(Barriers::kV + stage, smem + kVOffset + stage * kVStageBytes, kKvBytes, kBlockKv, params.v, rows.last_key - v_next * kBlockKv,
         rows.head_kv, rows.batch);
    v_next = -1;
  };
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(barriers.announced, n & 1);
    const uint32_t slot = slot_of(smem, n);
    const int key_tiles = QueryTile::load(slot).key_tiles;
    if (!kOverlapTiles || key_tiles <= 0) copy_v();
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const int at = n % Config::q_stages * kWarpgroups + w;
      if (key_tiles > 0) {
        const TileRows rows = TileRows::load(slot + 32);
        copy(Barriers::kQ + at, smem + at * kQBytes, kQBytes, 64, params.q, rows.q + w * 64, QueryTile::load(slot).head, rows.batch);
      } else {
        empty.wait(barriers.empty, Barriers::kQ + at);
        ptx::mbarrier_arrive(barriers.full + 8 * (Barriers::kQ + at));
      }
    }
    if (key_tiles < 0) break;
    // All consumers have this tile or the one before, so the slot of the next is free.
    if (key_tiles == 0) ptx::mbarrier_arrive(barriers.wanted);
#pragma unroll 1
    for (int i = 0; i < key_tiles; ++i) {
      const TileRows rows = TileRows::load(slot + 32);
      const int stage = i % kStages;
      copy(stage, smem + kKOffset + stage * kKvBytes, kKvBytes, kBlockKv, params.k, rows.last_key - i * kBlockKv, rows.head_kv, rows.batch);
      copy_v();
      v_slot = slot, v_next = i;
      if (i == max(key_tiles - kAnnounceAhead, 0)) ptx::mbarrier_arrive(barriers.wanted);
    }
  }
}

}  // namespace blockflash

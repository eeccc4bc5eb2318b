// The producer warps of the Hopper attention kernel.
#pragma once

#include "blockflash/ptx/launch.cuh"
#include "layout.cuh"
#include "scheduler.cuh"
#include "terms_producer.cuh"

namespace blockflash {

// The number of panels of a tile, as a type.
template <int panels>
struct Panels {};

// One thread issues all TMA loads. V of a key tile follows K of the next one, also across query
// tiles. Over a cache a whole warp is here, to look up pages, and another one loads V.
template <class Given>  // KernelParams, as a template so that what the other origin has is
                        // discarded
__device__ __forceinline__ void produce(const Given& kernel_params, uint32_t smem,
                                        const Barriers& barriers) {
  const Params& params = reinterpret_cast<const Params&>(kernel_params);
  const bool issues = Origin::producers == 1 || threadIdx.x == 0;
  PhaseBits empty = PhaseBits::producer();
  const auto open = [&](int stage, int bytes) {
    empty.wait(barriers.empty, stage);
    if (issues) ptx::mbarrier_arrive_expect_tx(barrier_of(barriers.full, stage), bytes);
  };
  // Panels begin at `dst`, but the first one `apart` bytes before it.
  const auto copy = [&]<int panels>(Panels<panels>, int stage, uint32_t dst, int bytes,
                                    int panel_bytes, const blockflash_tensor_map& map, int row,
                                    int head, int batch, int apart = 0) {
    open(stage, bytes);
    if (!issues) return;
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
      ptx::tensor_copy_4d(dst + panel * panel_bytes - (panel == 0 ? apart : 0), &map, panel * 64,
                          row, head, batch, barrier_of(barriers.full, stage));
  };
  const auto copy_keys = [&](auto panels, int stage, uint32_t dst, int bytes, int panel_bytes,
                             const blockflash_tensor_map& map, const TileRows& rows, int key_tile,
                             const CachePieces& pieces, int apart = 0) {
    if constexpr (!Config::cache) {
      copy(panels, stage, dst, bytes, panel_bytes, map, rows.kv + key_tile * kBlockKv, rows.head_kv,
           rows.batch, apart);
    } else {
      open(stage, bytes);
      pieces.copy<kBlockKv, kQkPanels>(kernel_params.cache, map, dst, rows.head_kv,
                                       barrier_of(barriers.full, stage));
    }
  };
  const auto look_up = [&](uint32_t slot, int key_tile) {
    if constexpr (Config::cache)
      return CachePieces::of(kernel_params.cache, QueryTile::load(slot), key_tile * kBlockKv);
    else
      return CachePieces{0, 0};
  };
  int stage = 0;    // stage of the next key tile
  int v_next = -1;  // key tile whose V is still to be loaded, into the stage before `stage`
  // Tells the readers of a stage of K or V which bits its key tile has.
  const auto announce = [&](int stage, int bits) {
    empty.peek(barriers.empty, stage);
    ptx::store_shared(barriers.bits_of(stage), bits);
  };
  const auto copy_v = [&](uint32_t slot) {
    if (Config::cache || v_next < 0) return;
    const TileRows rows = TileRows::load(slot + kRowsInSlot);
    const int v_stage = previous_stage<kStages>(stage);
    if constexpr (kHasBits)
      announce(Barriers::kV + v_stage, ptx::load_shared(barriers.bits_of(v_stage)));
    copy_keys(Panels<kVPanels>{}, Barriers::kV + v_stage, v_at(smem, v_stage), kVBytes,
              v_panel(v_stage), params.v, rows, v_next, CachePieces{0, 0});
    v_next = -1;
  };
  const auto copy_q = [&](int n, uint32_t slot, bool has_keys) {
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const int at = n % Config::q_stages * kWarpgroups + w;
      if (has_keys) {
        const TileRows rows = TileRows::load(slot + kRowsInSlot);
        if constexpr (Config::cache) {
          const CacheRows packed = CacheRows::of(kernel_params);
          copy(Panels<kQkPanels>{}, Barriers::kQ + at, smem + at * kQBytes,
               packed.count() * 128 * kQkPanels, 8192, params.q, QueryTile::load(slot).head,
               rows.q + w * packed.queries, rows.batch);
        } else {
          copy(Panels<kQkPanels>{}, Barriers::kQ + at, smem + at * kQBytes, kQBytes, 8192, params.q,
               rows.q + w * kRowStep, QueryTile::load(slot).head + w * kHeadStep, rows.batch);
        }
      } else {
        empty.wait(barriers.empty, Barriers::kQ + at);
        if (issues) ptx::mbarrier_arrive(barrier_of(barriers.full, Barriers::kQ + at));
      }
    }
  };
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (Config::cache) __syncwarp();  // no lane may fall a phase behind
    barriers.wait_published(n);
    const uint32_t slot = slot_of(smem, n);
    const int key_tiles = QueryTile::load(slot).key_tiles;
    // Every consumer has one of the two previous tiles or is completing the one before them, so the
    // slot of the next tile is free.
    if (issues && key_tiles >= 0 && key_tiles < kRequestAhead)
      ptx::mbarrier_arrive(barriers.requested_of(n + 1));
    if (key_tiles <= 0) copy_v(slot_of(smem, n - 1));
    if (!kLateQ || key_tiles <= 0) copy_q(n, slot, key_tiles > 0);
    if (key_tiles < 0) break;
    auto tiles = walk_of(kernel_params, slot, QueryTile::load(slot).first_key_tile + key_tiles - 1);
    CachePieces pieces = look_up(slot, tiles.tile());
#pragma unroll 1
    for (int left = key_tiles; left > 0; --left) {
      const int now = tiles.tile();
      if constexpr (kHasBits)
        announce(stage, tiles.bits());
      else
        tiles.advance();
      const TileRows rows = TileRows::load(slot + kRowsInSlot);
      copy_keys(Panels<kQkPanels>{}, stage, smem + kKOffset + stage * kKStageBytes, kKBytes,
                kPanelBytes, params.k, rows, now, pieces, k_panel_shift(stage, 0));
      if constexpr (kHasBits) tiles.prefetch_bits(), tiles.advance();
      // With bits the thread has no register for the number of key tiles.
      const bool is_first = left == (kHasBits ? QueryTile::load(slot).key_tiles : key_tiles);
      copy_v(is_first ? slot_of(smem, n - 1) : slot);
      if (kLateQ && is_first) copy_q(n, slot, true);
      v_next = now;
      // While a stage becomes free.
      if (left > 1) pieces = look_up(slot, tiles.tile());
      stage = next_stage<kStages>(stage);
      if (issues && left == kRequestAhead) ptx::mbarrier_arrive(barriers.requested_of(n + 1));
    }
  }
}

// Two block rows: one thread issues all TMA loads, V of a step after K of the second one behind it.
__device__ __forceinline__ void produce_two_block_rows(const Params& params, uint32_t smem,
                                                       const Barriers& barriers) {
  const StepRing ring{smem + kStepOffset};
  PhaseBits empty = PhaseBits::producer();
  // Loads both key tiles of a step. In place of a warpgroup that it is not for, this thread
  // releases the stage.
  const auto copy_step = [&](const blockflash_tensor_map& map, int position, uint32_t slot,
                             int mbarrier, int stages, int stage, uint32_t dst, int panel_bytes) {
    const KeyStep step = ring.step(position);
    const TileRows rows = TileRows::load(slot + kRowsInSlot);
    empty.wait(barriers.empty, mbarrier + stage);
    if (step.rows() != 3) ptx::mbarrier_arrive_as(barrier_of(barriers.empty, mbarrier + stage), 4);
    const uint32_t full = barrier_of(barriers.full, mbarrier + step.rows() % 3 * stages + stage);
    ptx::mbarrier_arrive_expect_tx(full, kKBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int panel = 0; panel < kQkPanels; ++panel)
        ptx::tensor_copy_4d(dst + panel * panel_bytes + half * 8192, &map, panel * 64,
                            rows.kv + step.tile(half) * 64, rows.head_kv, rows.batch, full);
  };
  int v_left = 0;                  // steps whose V is still to be loaded
  int v_position = 0, v_tile = 0;  // the first of them, and its query tile
  const auto copy_k = [&](int n, int position) {
    const int stage = position % kStages;
    copy_step(params.k, position, slot_of(smem, n), 0, kStages, stage, k_at(smem, stage),
              kPanelBytes);
    if (v_left++ == 0) v_position = position, v_tile = n;
  };
  const auto copy_v = [&](int left) {
    for (; v_left > left; --v_left, --v_position) {
      while (v_position < QueryTile::load(slot_of(smem, v_tile)).first_key_tile) ++v_tile;
      const int stage = v_position % kVStages;
      copy_step(params.v, v_position, slot_of(smem, v_tile), Barriers::kV, kVStages, stage,
                v_at(smem, stage), v_panel(stage));
    }
  };
  const auto copy_q = [&](uint32_t slot, bool has_keys) {
    const TileRows rows = TileRows::load(slot + kRowsInSlot);
    const QueryTile tile = QueryTile::load(slot);
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const uint32_t full = barrier_of(barriers.full, Barriers::kQ + w);
      empty.wait(barriers.empty, Barriers::kQ + w);
      if (!has_keys) {
        ptx::mbarrier_arrive(full);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(full, kQBytes);
      const int row = tile.q_offset + ptx::load_shared(slot + kPairInSlot + 4 * w);
#pragma unroll
      for (int panel = 0; panel < kQkPanels; ++panel)
        ptx::tensor_copy_4d(smem + w * kQBytes + panel * 8192, &params.q, panel * 64, row,
                            tile.head, rows.batch, full);
    }
  };
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    barriers.wait_published(n);
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    if (tile.key_tiles >= 0 && tile.key_tiles < kRequestAhead)
      ptx::mbarrier_arrive(barriers.requested_of(n + 1));
    // A consumer takes its next queries after it has waited for V of all steps but the last one.
    copy_v(tile.key_tiles > 0 ? 1 : 0);
    copy_q(slot, tile.key_tiles > 0);
    if (tile.key_tiles < 0) break;
#pragma unroll 1
    for (int left = tile.key_tiles; left > 0; --left) {
      copy_k(n, tile.first_key_tile + left - 1);
      copy_v(2);
      if (left == kRequestAhead) ptx::mbarrier_arrive(barriers.requested_of(n + 1));
    }
  }
}

// Over a cache a second warp loads V: one warp alone issues the loads of small pages more slowly
// than the tensor cores multiply. It learns of query tiles as NaN-scanner warps do.
template <class Given>
__device__ __forceinline__ void produce_values(const Given& kernel_params, uint32_t smem,
                                               const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  PhaseBits empty = PhaseBits::producer(), full = PhaseBits::consumer();
  int stage = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int q = Barriers::kQ + n % Config::q_stages * kWarpgroups;
    full.wait(barriers.full, q);
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    const int head_kv = TileRows::load(slot + kRowsInSlot).head_kv;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, q));
    if (tile.key_tiles < 0) break;
#pragma unroll 1
    for (int key_tile = tile.first_key_tile + tile.key_tiles - 1; key_tile >= tile.first_key_tile;
         --key_tile) {
      const int at = Barriers::kV + stage;
      const CachePieces pieces = CachePieces::of(kernel_params.cache, tile, key_tile * kBlockKv);
      empty.wait(barriers.empty, at);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier_of(barriers.full, at), kVBytes);
      __syncwarp();
      pieces.copy<kBlockKv, kVPanels>(kernel_params.cache, kernel_params.cache.fwd.v,
                                      smem + kVOffset + stage * kVStageBytes, head_kv,
                                      barrier_of(barriers.full, at));
      stage = next_stage<kStages>(stage);
    }
  }
}

}  // namespace blockflash

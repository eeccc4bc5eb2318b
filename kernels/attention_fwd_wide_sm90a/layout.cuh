// Shared memory, barriers, and what a CTA computes.
#pragma once

#include "../attention_fwd_sm90a/query_tiles.cuh"
#include "blockflash/config/attention_wide.cuh"
#include "blockflash/pipeline.cuh"

namespace blockflash {

using Config = AttentionWideConfig;
using Element = Config::Element;
using Params = blockflash_attention_fwd_tma_params;
using Queue = TileQueue<Config::block_q, 1, 1>;

constexpr int kRows = Config::block_q, kKeys = Config::block_kv;
static_assert(kRows == 64, "a warpgroup multiplies 64 rows at once");
static_assert(kKeys == 64, "rows of probabilities are as wide as a swizzle");
static_assert(Config::head_dim == 512, "two warpgroups have 256 columns of the output each");

// Panels of 64 columns with rows of 128 bytes, the layout of the 128-byte swizzle. Two panels of
// keys or values are a chunk, which is loaded and released at once.
constexpr int kPanelBytes = kKeys * 128, kPanels = Config::head_dim / 64;
constexpr int kChunks = 4, kChunkPanels = kPanels / kChunks;
constexpr int kChunkBytes = kChunkPanels * kPanelBytes, kTileBytes = kPanels * kPanelBytes;
constexpr int kParts = kChunks / 2;  // chunks of values of a warpgroup
// Tiles of probabilities. The place of a tile is written again three tiles later, by the warpgroup
// that has read it.
constexpr int kProbabilityTiles = 3;

constexpr int kQOffset = 0, kKOffset = kQOffset + kTileBytes, kVOffset = kKOffset + kTileBytes,
              kProbabilitiesOffset = kVOffset + kTileBytes,
              kSharedOffset = kProbabilitiesOffset + kProbabilityTiles * kPanelBytes;

constexpr int kConsumers = 256;  // threads
// Named barriers.
constexpr int kProbabilitiesReady = 1;  // + warpgroup
constexpr int kWarpgroupBarrier = 3;    // + warpgroup
constexpr int kConsumerBarrier = 5;

struct Shared {
  QueryTile tile;
  float references[kRows];  // of the rows, behind the last tile
  float denominators[2][kRows];
  uint64_t barriers[5 * kChunks + 1];
};
static_assert(sizeof(Shared) <= 2048 && Config::smem_bytes == kSharedOffset + 2048,
              "manifest and kernel disagree on smem");

// A "full" and an "empty" mbarrier for each chunk of keys and of values. Keys of even and of odd
// tiles have "full" ones of their own: a warpgroup waits for every second tile, and could not tell
// a phase that it has skipped from the one before.
struct Barriers {
  uint32_t k_full, k_empty, v_full, v_empty, q_full;  // of k_full those of even tiles come first

  __device__ __forceinline__ explicit Barriers(Shared& shared)
      : k_full(static_cast<uint32_t>(__cvta_generic_to_shared(shared.barriers))),
        k_empty(barrier_of(k_full, 2 * kChunks)),
        v_full(barrier_of(k_empty, kChunks)),
        v_empty(barrier_of(v_full, kChunks)),
        q_full(barrier_of(v_empty, kChunks)) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kChunks; ++i) {
      ptx::mbarrier_init(barrier_of(k_full, i), 1);
      ptx::mbarrier_init(barrier_of(k_full, kChunks + i), 1);
      ptx::mbarrier_init(barrier_of(v_full, i), 1);
      // One warpgroup reads a chunk.
      ptx::mbarrier_init(barrier_of(k_empty, i), 4);
      ptx::mbarrier_init(barrier_of(v_empty, i), 4);
    }
    ptx::mbarrier_init(q_full, 1);
    ptx::fence_mbarrier_init();
  }
};

// The key tiles that some query of a tile sees, in pairs. What a row does not see is masked.
struct Work {
  QueryTile tile;
  int first_tile, pairs;
  int unmasked_begin, unmasked_end;  // key tiles that all rows see completely

  __device__ __forceinline__ Work(const Params& params, const QueryTile& tile) : tile(tile) {
    const auto limits = KeyLimits::of<kKeys>(params.base, tile, 0, kRows);
    first_tile = limits.begin;
    pairs = max(limits.end - limits.begin + 1, 0) / 2;
    unmasked_begin = limits.unmasked_begin, unmasked_end = limits.unmasked_end;
  }
  __device__ __forceinline__ bool is_masked(int key_tile) const {
    return key_tile < unmasked_begin || key_tile >= unmasked_end;
  }
};

}  // namespace blockflash

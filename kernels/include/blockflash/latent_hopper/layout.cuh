// Shared memory, barriers and the order of tiles.
#pragma once

#include <type_traits>

#include "blockflash/decode/run_ending.cuh"
#include "blockflash/decode/run_results.cuh"
#include "blockflash/decode/runs.cuh"
#include "blockflash/params/kv_cache_latent.h"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/mbarrier.cuh"

namespace blockflash {
namespace {

constexpr int kRows = Config::rows, kKeys = 64;
static_assert(kRows == 64, "a warpgroup multiplies 64 rows at once");
static_assert(Config::head_dim_v == 512, "two warpgroups have 256 columns of the output each");

// Panels of 64 columns with rows of 128 bytes, the layout of the 128-byte swizzle.
constexpr int kPanelBytes = kKeys * 128, kQPanelBytes = kRows * 128;
constexpr int kPanels = Config::head_dim_qk / 64, kValuePanels = Config::head_dim_v / 64;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kStages = 2;  // tile t is in stage t % 2

// The probabilities of a tile take the place of the panel that only scores need, where there is
// one.
constexpr bool kSparePanel = kPanels > kValuePanels;
constexpr int kQOffset = kStages * kTileBytes,
              kProbabilitiesOffset = kQOffset + kPanels * kQPanelBytes;
constexpr int kSharedOffset = kProbabilitiesOffset + (kSparePanel ? 0 : kStages * kPanelBytes);

__device__ __forceinline__ constexpr int probabilities_at(int stage) {
  return kSparePanel ? stage * kTileBytes + kValuePanels * kPanelBytes
                     : kProbabilitiesOffset + stage * kPanelBytes;
}

// A tile is loaded in two parts, as they become free: the columns of the first warpgroup, and those
// of the second. The last panel belongs to the part of the warpgroup that reads the probabilities
// of the tile from there, which is not the one that computes them.
__device__ __forceinline__ constexpr int part_of(int panel, int stage) {
  return panel < kValuePanels / 2 ? 0 : panel < kValuePanels ? 1 : 1 - stage;
}
__device__ __forceinline__ constexpr int part_bytes(int part, int stage) {
  const bool has_last = kSparePanel && part == part_of(kValuePanels, stage);
  return (kValuePanels / 2 + has_last) * kPanelBytes;
}

// Named barriers besides that of the team.
constexpr int kReferencesReady = 2;     // + stage
constexpr int kProbabilitiesReady = 4;  // + stage
constexpr int kWarpgroupBarrier = 6;    // + warpgroup

// With lists: the keys that are listed and seen, of the tiles of two pairs. A word of 16 bits is of
// the rows that one warp copies, 4 w + r + 16 i in bit 4 i + r.
struct ListedTiles {
  alignas(8) uint16_t of[2][2][4];  // by the pair, the tile in it, and the warp
};
struct NumberedTiles {};  // which keys a row sees follows from their numbers

struct Shared {
  DecodeRun items[2];       // item n in slot n % 2
  float references[kRows];  // of the rows, behind the last tile
  float denominators[2][kRows];
  LaunchWords launch_words;
  Arrivals arrivals;  // if there is a workspace
  Ending ending;
  uint64_t barriers[kStages * 4 + 4];
  std::conditional_t<Config::has_lists, ListedTiles, NumberedTiles> listed;
};
static_assert(sizeof(Shared) <= 2048 && Config::smem_bytes == kSharedOffset + 2048,
              "manifest and kernel disagree on smem");

struct Barriers {
  uint32_t full, empty;  // of stage s and part p it is number 2 s + p
  uint32_t item_full, item_empty;
  static constexpr int kReaders = 9;  // of an item: the producer, and warps
  // Of a part: one thread announces what TMA copies, or four warps copy rows, and say so before
  // what they have started arrives.
  static constexpr int kWriters = Config::has_lists ? 4 * kWarpSize + 4 : 1;

  __device__ __forceinline__ explicit Barriers(Shared& shared)
      : full(static_cast<uint32_t>(__cvta_generic_to_shared(shared.barriers))),
        empty(full + 16 * kStages),
        item_full(empty + 16 * kStages),
        item_empty(item_full + 16) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2 * kStages; ++i) {
      ptx::mbarrier_init(full + 8 * i, kWriters);
      ptx::mbarrier_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(item_full + 8 * i, 1);
      ptx::mbarrier_init(item_empty + 8 * i, kReaders);
    }
    ptx::fence_mbarrier_init();
  }
};

// The tiles of an item: from a multiple of 64 on, so that boxes are in one page, and in pairs. What
// is outside of the item's keys is masked.
struct Tiles {
  int first_key, pairs;

  __device__ __forceinline__ explicit Tiles(const DecodeRun& item)
      : first_key(item.keys.begin & ~(kKeys - 1)),
        pairs(item.keys.end <= item.keys.begin
                  ? 0
                  : (item.keys.end - first_key + 2 * kKeys - 1) / (2 * kKeys)) {}
};

}  // namespace
}  // namespace blockflash

// The order of f32 sums in the workspace of the attention backward: tiles of 64 rows (queries of
// dq, keys of dk and dv) and all columns of a kernel's tile, as eight warps hold them in
// accumulators: four have the first columns of 16 rows each, four the other columns.
#pragma once

#include <stdint.h>

#include "blockflash/params/attention_fwd.h"

namespace blockflash {

template <int columns>
struct SumsOrder {
  // Half of the columns, rounded up to what is stored at a time.
  static constexpr int kFirst = (columns / 2 + 31) / 32 * 32, kSecond = columns - kFirst;

  // Where a warp begins in a tile. Its groups of eight columns follow each other, four values per
  // lane.
  static __device__ __forceinline__ int of_warp(int warp) {
    return warp * (16 * kSecond) + min(warp, 4) * (16 * (kFirst - kSecond));
  }
  // Where a group of all columns begins for the 16 rows that are a warp's own.
  static __device__ __forceinline__ int of_group(int warp, int group) {
    constexpr int kGroups = kFirst / 8;
    return group < kGroups ? of_warp(warp) + group * 128
                           : of_warp(warp + 4) + (group - kGroups) * 128;
  }
};

// Tiles of 64 keys of each part of dk and dv: a kernel's tile has 64 or 128 keys.
__device__ __forceinline__ int key_tiles(const blockflash_attention_fwd_params& p) {
  return (p.seqlen_kv + 127) / 128 * 2;
}

}  // namespace blockflash

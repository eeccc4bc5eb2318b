// Tiles of neighbouring queries that visit the union of their lists: how they are numbered, and
// what the kernel that unites lists tells the one that computes attention.
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/config/base.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/params/index_union.h"

namespace blockflash {

// A tile has two row groups. What is listed for them is of three kinds: for the first one alone,
// for the second one alone, and for both.
constexpr int kRowGroups = 2, kKinds = 3, kBothKind = 2;

// A tile in the workspace.
struct IndexTile {
  int sequence;         // -1: there is no such tile, and none behind it
  int unit, row_group;  // the first of its row groups
  int q_begin, q_length;
  int kv_begin, kv_length;
  int listed[kKinds];  // entries of each kind
  int unused[BLOCKFLASH_INDEX_TILE_WORDS - 10];
};
static_assert(sizeof(IndexTile) == 4 * BLOCKFLASH_INDEX_TILE_WORDS, "the host makes room for them");

// Bits below a number from 0 to 64.
__device__ __forceinline__ uint64_t bits_below(int count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// The queries [begin, end) of a row group, none if it does not exist, and its pack of heads.
struct RowGroup {
  int begin, end, pack;

  static __device__ __forceinline__ RowGroup of(const blockflash_index_unions& unions,
                                                const IndexTile& tile, int which) {
    const int row_group = tile.row_group + which, group = row_group / unions.packs;
    const int begin = group * unions.pack_queries;
    return {begin, max(min(begin + unions.pack_queries, tile.q_length), begin),
            row_group - group * unions.packs};
  }
  __device__ __forceinline__ int queries() const { return end - begin; }
};

// The places of the entries of a tile in the workspace. Those of the first row group alone ascend
// from the first place of the first half on; those of both descend from its last one on; those of
// the second row group alone ascend in the second half. So there is room for each kind, whatever
// the lists have in common.
struct ListedPlaces {
  int64_t first;
  int half;

  __device__ __forceinline__ ListedPlaces(const blockflash_index_unions& unions, int capacity,
                                          int tile)
      : first(static_cast<int64_t>(tile) * kRowGroups * unions.pack_queries * capacity),
        half(unions.pack_queries * capacity) {}
  __device__ __forceinline__ int64_t of(int kind, int entry) const {
    return first + (kind == 0 ? entry : kind == 1 ? half + entry : half - 1 - entry);
  }
};

__device__ __forceinline__ AttentionMask mask_of(const blockflash_attention_index_params& p,
                                                 const IndexTile& tile) {
  return AttentionMask::of(p.scaled.decode.scores.window, tile.q_length, tile.kv_length);
}

// Tiles of a unit of a sequence.
__device__ __forceinline__ int index_tiles_of(const blockflash_index_unions& unions, int queries) {
  const int row_groups = (queries + unions.pack_queries - 1) / unions.pack_queries * unions.packs;
  return (row_groups + kRowGroups - 1) / kRowGroups;
}

// Finds a tile by its number with the lanes of a warp, which get the same result, and where it has
// none, in `beyond` by how much the number exceeds the last one.
__device__ __forceinline__ IndexTile find_index_tile(const blockflash_index_union_params& params,
                                                     int number, int lane, int& beyond) {
  const blockflash_attention_index_params& p = params.index;
  const blockflash_attention_decode_params& d = p.scaled.decode;
  IndexTile tile = {};
  int first = 0, of_unit;
  if (d.cu_seqlens_q == nullptr) {
    of_unit = index_tiles_of(params.unions, d.seqlen_q);
    tile.sequence = number / (of_unit * p.units);
    first = tile.sequence * of_unit * p.units;
    tile.q_length = d.seqlen_q;
    if (tile.sequence >= d.batch) beyond = number - d.batch * of_unit * p.units, tile.sequence = -1;
  } else {
    for (int sequences = 0;; sequences += kWarpSize) {
      if (sequences >= d.batch) {
        beyond = number - first, tile.sequence = -1;
        break;
      }
      const int sequence = min(sequences + lane, d.batch - 1);
      const PackedRows queries = PackedRows::of(d.cu_seqlens_q, sequence, d.total_q, d.seqlen_q);
      // Offsets that do not ascend must not lead to sums beyond 2^31.
      constexpr int kMost = INT32_MAX / 64;
      const int tiles = min(index_tiles_of(params.unions, queries.length), kMost / p.units);
      const int here = sequences + lane < d.batch ? tiles * p.units : 0;
      int end = here;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int others = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += others;
      }
      end += first;
      const unsigned later = __ballot_sync(~0u, number < end);
      if (later == 0) {
        first = __shfl_sync(~0u, end, kWarpSize - 1);
        continue;
      }
      const int owner = __ffs(static_cast<int>(later)) - 1;
      tile.sequence = sequences + owner;
      tile.q_begin = __shfl_sync(~0u, queries.begin, owner);
      tile.q_length = __shfl_sync(~0u, queries.length, owner);
      of_unit = __shfl_sync(~0u, tiles, owner);
      first = __shfl_sync(~0u, end - here, owner);
      break;
    }
  }
  if (tile.sequence < 0) return tile;
  const int within = number - first;
  tile.unit = within / of_unit;
  tile.row_group = (of_unit - 1 - (within - tile.unit * of_unit)) * kRowGroups;
  if (p.cu_seqlens_kv != nullptr) {
    const PackedRows keys =
        PackedRows::of(p.cu_seqlens_kv, tile.sequence, d.cache.page_size, d.cache.capacity);
    tile.kv_begin = keys.begin, tile.kv_length = keys.length;
  } else {
    tile.kv_length = keys_of_sequence(d.cache, tile.sequence);
  }
  return tile;
}

}  // namespace blockflash

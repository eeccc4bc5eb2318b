// How attention walks a block mask: the order in which query tiles are taken, and the key tiles
// that each of them visits.
#pragma once

#include <stdint.h>

#include "blockflash/params/block_mask.h"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {

// Offset of a head's first entry in row_ptr or row_order, where each group has `entries` of them.
// Less than 2^31 entries in all.
__device__ __forceinline__ int group_offset(const blockflash_block_mask& m, int entries, int batch,
                                            int head) {
  return (batch * m.groups_per_batch + head / m.heads_per_group) * entries;
}

// The block rows of a batch entry: the first one in its groups, and their number. The sequences of
// a packed batch share the groups.
struct BlockRows {
  int first, count;

  static __device__ __forceinline__ BlockRows of(const blockflash_block_mask& m, int batch) {
    if (m.cu_rows == nullptr) return {0, m.rows};
    const int first = m.cu_rows[batch];
    return {first, m.cu_rows[batch + 1] - first};
  }
};

// Number of query tiles of a head. Under a block mask every block row has equally many, and tiles
// past the last query have nothing to compute.
__device__ __forceinline__ int tiles_of_queries(const blockflash_block_mask& m, int seqlen_q,
                                                int tile_block_q) {
  if (m.row_ptr == nullptr) return (seqlen_q + tile_block_q - 1) / tile_block_q;
  return (seqlen_q + m.block_q - 1) / m.block_q * (m.block_q / tile_block_q);
}

// The query tile of a head that is taken `rank`-th of `tiles`. Long tiles should not start last:
// with an order given the longest block row comes first, otherwise the last tile, which is the
// longest under a causal mask.
__device__ __forceinline__ int tile_of_queries(const blockflash_block_mask& m, BlockRows rows,
                                               int tiles, int tile_block_q, int batch, int head,
                                               int rank) {
  if (m.row_ptr == nullptr || m.row_order == nullptr) return tiles - 1 - rank;
  const int tiles_per_row = m.block_q / tile_block_q;
  int row = rank / tiles_per_row;
  const int before_last = rank - row * tiles_per_row;
  // A sequence that is shorter than `tiles` has no more rows to order.
  if (row < rows.count) row = m.row_order[group_offset(m, m.rows, batch, head) + rows.first + row];
  return row * tiles_per_row + (tiles_per_row - 1 - before_last);
}

// The key tiles that a query tile visits, by position: position p is key tile tile_at(p), and tiles
// ascend with positions. Without a block mask p is the key tile itself.
struct TileList {
  const int32_t* cols;  // columns of the block row, ascending; null: every key tile is visited
  int32_t count;        // columns in the list
  int32_t tiles_per_col;

  // The query tile is inside one block row, since the tile's block_q divides the mask's.
  static __device__ __forceinline__ TileList of(const blockflash_block_mask& m, BlockRows rows,
                                                int tile_block_kv, int batch, int head,
                                                int q_begin) {
    if (m.row_ptr == nullptr) return {nullptr, 0, 1};
    const int at = q_begin / m.block_q;
    if (at >= rows.count)
      return {m.col_idx, 0, 1};  // cu_seqlens that do not belong to the mask: an empty list
    const int32_t* const row =
        m.row_ptr + group_offset(m, m.rows + 1, batch, head) + rows.first + at;
    return {m.col_idx + row[0], row[1] - row[0], m.block_kv / tile_block_kv};
  }
  static __device__ __forceinline__ TileList of(const blockflash_block_mask& m, int tile_block_kv,
                                                int batch, int head, int q_begin) {
    return of(m, BlockRows::of(m, batch), tile_block_kv, batch, head, q_begin);
  }

  // Takes 16 bytes of shared memory.
  static __device__ __forceinline__ TileList load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem);
    return {
        reinterpret_cast<const int32_t*>(static_cast<uint64_t>(static_cast<uint32_t>(a.y)) << 32 |
                                         static_cast<uint32_t>(a.x)),
        a.z, a.w};
  }
  __device__ __forceinline__ void store(uint32_t smem) const {
    const uint64_t at = reinterpret_cast<uint64_t>(cols);
    ptx::store_shared_int4(
        smem, make_int4(static_cast<int>(at), static_cast<int>(at >> 32), count, tiles_per_col));
  }

  __device__ __forceinline__ int tile_at(int position) const {
    if (cols == nullptr) return position;
    const int listed = position / tiles_per_col;
    return cols[listed] * tiles_per_col + (position - listed * tiles_per_col);
  }

  // The first position whose tile is not before `key_tile`; the number of positions if there is
  // none.
  __device__ __forceinline__ int lower_bound(int key_tile) const {
    if (cols == nullptr) return key_tile;
    const int col = key_tile / tiles_per_col;
    // Steps that double from the end, where most limits are.
    int first = 0, length = count;
    for (int step = 1; length > 0; step *= 2) {
      const int at = max(length - step, 0);
      if (cols[at] < col) {
        first = at + 1, length -= first;
        break;
      }
      length = at;
    }
    while (length > 0) {
      const int half = length / 2;
      const bool before = cols[first + half] < col;
      first = before ? first + half + 1 : first;
      length = before ? length - half - 1 : half;
    }
    const bool found = first < count && cols[first] == col;
    return first * tiles_per_col + (found ? key_tile - col * tiles_per_col : 0);
  }
};

// Walks a list in shared memory downwards from a position. Each column is prefetched when the one
// after it begins, so a step neither divides nor waits for memory.
struct DescendingTiles {
  uint32_t list;
  int within, first_tile;  // tiles left in the column below this one; the first tile of the column
  int listed, column;      // columns left in the list; the prefetched column

  __device__ __forceinline__ DescendingTiles(uint32_t list_smem, int position)
      : list(list_smem), within(position), first_tile(0), listed(0), column(0) {
    const TileList tiles = TileList::load(list);
    // An empty list has no position. There may not even be memory before its first column.
    if (tiles.cols == nullptr || position < 0) return;
    listed = position / tiles.tiles_per_col, within = position - listed * tiles.tiles_per_col;
    first_tile = tiles.cols[listed] * tiles.tiles_per_col;
    if (listed > 0) column = tiles.cols[--listed];
  }
  __device__ __forceinline__ int tile() const { return first_tile + within; }
  __device__ __forceinline__ void advance() {
    if (--within >= 0) return;
    const TileList tiles = TileList::load(list);
    within = tiles.tiles_per_col - 1, first_tile = column * tiles.tiles_per_col;
    if (listed > 0) column = tiles.cols[--listed];
  }
};

}  // namespace blockflash

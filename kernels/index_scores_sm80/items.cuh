// How the work is divided into items: a tile of keys of one key head, and a tile of queries of the
// same sequence, `item_queries` neighbours or the rest of them.
#pragma once

#include "blockflash/index_rows.cuh"
#include "blockflash/quotient.cuh"
#include "tile.cuh"

namespace blockflash {
namespace {

using Params = blockflash_index_scores_params;

__device__ __forceinline__ int ceil_quotient(int a, int b) { return small_quotient(a + b - 1, b); }

// Tiles of keys [begin, end).
struct KeyTiles {
  int begin, end;

  // Those that some query of [first, last] sees.
  static __device__ __forceinline__ KeyTiles of(const AttentionMask& mask, int first, int last) {
    const KeyRange any = mask.keys_of_any(first, last);
    if (first > last || any.begin >= any.end) return {0, 0};
    return {any.begin / kTileKeys, (any.end - 1) / kTileKeys + 1};
  }
};

struct Item {
  int sequence;  // -1: there is none
  int head_k;
  int first, queries;  // of the sequence: [first, first + queries)
  int row;             // of the first of them
  int key, keys;       // the first key of the tile; keys of the sequence
  int heads, groups;   // of a group; of the key head
  int products;        // of 16 columns each
  // Query i of the item sees the keys [begin + i, end + i) as far as they exist.
  int begin, end;
  bool sees_all;               // every query sees every key of the tile
  int64_t piece[kTilePieces];  // where 16 keys each begin, in elements

  __device__ __forceinline__ KeyRange keys_of(int query) const {
    return {max(begin + query, 0), min(end + query, keys)};
  }
};

// Products of all columns, which are the heads of queries and groups.
__device__ __forceinline__ int products_of(int queries, int groups, int heads) {
  const int outputs = queries * groups;
  return Config::is_wide ? outputs * ((heads + kColumns - 1) / kColumns)
                         : (outputs + kColumns - 1) / kColumns * heads;
}

// A window's side as a bound that may be added to a query without overflow.
__device__ __forceinline__ int bounded(int64_t key) {
  constexpr int64_t kMost = 1 << 30;
  return static_cast<int>(key < -kMost ? -kMost : key > kMost ? kMost : key);
}

// Finds items by number, in ascending order, with the lanes of a warp, each of which looks at one
// tile of queries: of neighbouring sequences, which have one each, or of one sequence.
struct ItemWalk {
  int sequence = 0, query_tile = 0;  // of lane 0
  int before = 0;                    // items before that tile of queries

  // Writes item `number` to `item` and returns true, or returns false behind the last one.
  __device__ __forceinline__ bool find(const Params& p, int number, Item& item, int lane) {
    const blockflash_index_rows& rows = p.rows;
    const bool one_tile = rows.seqlen_q <= p.item_queries;
    IndexSequence s;
    KeyTiles tiles;
    int own_sequence, first, last, begin, owner;
    while (true) {
      if (sequence >= rows.batch) return false;
      own_sequence = one_tile ? sequence + lane : sequence;
      s = IndexSequence::of(rows, min(own_sequence, rows.batch - 1));
      const int own_tile = one_tile ? 0 : query_tile + lane;
      // Tiles that do not exist have no queries.
      first = min(own_tile * p.item_queries, s.queries.length);
      last = min(first + p.item_queries, s.queries.length) - 1;
      if (own_sequence >= rows.batch) last = first - 1;
      tiles = KeyTiles::of(s.mask(rows), first, last);
      const int items = (tiles.end - tiles.begin) * p.num_heads_k;
      int end = items;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int others = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += others;
      }
      end += before;
      begin = end - items;
      const unsigned later = __ballot_sync(~0u, number < end);
      if (later != 0) {
        owner = __ffs(static_cast<int>(later)) - 1;
        break;
      }
      before = __shfl_sync(~0u, end, kWarpSize - 1);
      query_tile += kWarpSize;
      if (one_tile)
        sequence += kWarpSize;
      else if (query_tile * p.item_queries >= __shfl_sync(~0u, s.queries.length, 0))
        ++sequence, query_tile = 0;
    }
    const auto from_owner = [&](int x) { return __shfl_sync(~0u, x, owner); };
    const int within = number - from_owner(begin);
    const int tile = small_quotient(within, p.num_heads_k);
    const int key = (from_owner(tiles.begin) + tile) * kTileKeys;
    own_sequence = from_owner(own_sequence), first = from_owner(first), last = from_owner(last);
    s = {{from_owner(s.queries.begin), from_owner(s.queries.length)},
         from_owner(s.keys),
         from_owner(s.slot)};
    const int head_k = within - tile * p.num_heads_k;
    // Numbers of pages are data that nobody has validated.
    if (lane < kTilePieces)
      item.piece[lane] =
          piece_at(rows, own_sequence, s, key + lane * 16) + head_k * rows.cache.k_stride_head;
    if (lane > 0) return true;
    item.sequence = own_sequence, item.head_k = head_k;
    item.first = first, item.queries = last - first + 1, item.row = s.queries.begin + first;
    item.key = key, item.keys = s.keys;
    item.heads = small_quotient(p.num_heads, p.groups);
    item.groups = small_quotient(p.groups, p.num_heads_k);
    item.products = products_of(item.queries, item.groups, item.heads);
    const int64_t center = static_cast<int64_t>(s.keys) - s.queries.length + first;
    const blockflash_window& window = rows.window;
    item.begin = window.left == BLOCKFLASH_WINDOW_UNBOUNDED ? bounded(INT64_MIN)
                                                            : bounded(center - window.left);
    item.end = window.right == BLOCKFLASH_WINDOW_UNBOUNDED ? bounded(INT64_MAX)
                                                           : bounded(center + window.right + 1);
    item.sees_all =
        item.keys_of(item.queries - 1).begin <= key && item.keys_of(0).end >= key + kTileKeys;
    return true;
  }

 private:
  // Where the keys from `key` on begin that are in one page; beyond the last key anywhere.
  static __device__ __forceinline__ int64_t piece_at(const blockflash_index_rows& rows,
                                                     int sequence, const IndexSequence& s,
                                                     int key) {
    const blockflash_kv_cache& cache = rows.cache;
    const bool exists = key < s.keys;
    int64_t page = sequence, slot = key;
    if (rows.cu_seqlens_kv != nullptr) page = 0, slot += s.slot;
    if (cache.block_table != nullptr && exists) {
      const int column = key / cache.page_size;
      slot = key - column * cache.page_size;
      page = page_of_column(cache, sequence, column);
    }
    return exists ? page * cache.k_stride_page + slot * cache.k_stride_slot : 0;
  }
};

}  // namespace
}  // namespace blockflash

// Where the Hopper attention kernel finds keys and query tiles: in tensors, or in the pages of a
// cache, where the device alone knows how many keys a sequence has.
#pragma once

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/tensor_copy.cuh"
#include "query_tiles.cuh"

namespace blockflash {

// The queue of query tiles of attention over a cache, sequence by sequence, on which a whole warp
// works. Sequences with few queries have none. As in TileQueue, heads are taken in sections, and
// within a section the queries that see the most keys come first.
template <int block_q>
struct CacheQueue : QueueCounter {
  const blockflash_attention_cache_params& all;
  int sequences = 0, base = 0;  // the 32 sequences that the lanes look at, and their first index

  __device__ __forceinline__ explicit CacheQueue(const blockflash_attention_cache_params& all)
      : QueueCounter(all.fwd), all(all) {}

  // The tile at `index` without its key tiles; false past the end.
  __device__ __forceinline__ bool take(QueryTile& tile) {
    const blockflash_attention_fwd_params& p = params.base;
    const int lane = threadIdx.x % 32;
    int at, tiles_q;
    for (;;) {
      if (sequences >= p.batch) return false;
      const int sequence = min(sequences + lane, p.batch - 1);
      const PackedRows queries =
          p.cu_seqlens_q == nullptr
              ? PackedRows{0, p.seqlen_q}
              : PackedRows::of(p.cu_seqlens_q, sequence, p.total_q, p.seqlen_q);
      const bool is_here = sequences + lane < p.batch && queries.length >= all.fewest_queries;
      tiles_q = is_here ? (queries.length + block_q - 1) / block_q : 0;
      const int tiles = tiles_q * p.num_heads_q;
      int end = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int others = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += others;
      }
      end += base;
      const unsigned later = __ballot_sync(~0u, index < end);
      if (later != 0) {
        const int owner = __ffs(static_cast<int>(later)) - 1;
        // Lengths may change meanwhile, so one lane decides for all.
        const int length = __shfl_sync(~0u, keys_of_sequence(all.cache, sequence), owner);
        tile = {sequences + owner,
                0,
                0,
                __shfl_sync(~0u, queries.begin, owner),
                __shfl_sync(~0u, queries.length, owner),
                length,
                0,
                0};
        at = index - __shfl_sync(~0u, end - tiles, owner);
        tiles_q = __shfl_sync(~0u, tiles_q, owner);
        break;
      }
      base = __shfl_sync(~0u, end, 31);
      sequences += 32;
    }
    const int heads = p.num_heads_q, per_section = params.heads_per_section;
    const int section = at / (per_section * tiles_q) * per_section, rest = at - section * tiles_q;
    const int width = min(per_section, heads - section), row = rest / width;
    tile.head = section + rest - row * width;
    tile.q_begin = (tiles_q - 1 - row) * block_q;
    return true;
  }

  __device__ __forceinline__ TileRows rows_of(const QueryTile& tile) const {
    const blockflash_attention_fwd_params& p = params.base;
    return {tile.q_offset + tile.q_begin, tile.head / (p.num_heads_q / p.num_heads_kv), 0,
            p.cu_seqlens_q != nullptr ? 0 : tile.batch};
  }
};

// The pieces of a key tile, each of which is in one page: lane i of a warp knows piece i.
struct CachePieces {
  int page, slot;

  // A piece behind the last key is in the page behind the last one, which TMA reads as zeros.
  // Slots behind the last key in a page hold anything; their scores are masked. Queries that see no
  // keys ask for the tile before the first one, whose keys are negative: it has no place in the
  // block table.
  static __device__ __forceinline__ CachePieces of(const blockflash_attention_cache_params& p,
                                                   const QueryTile& tile, int first_key) {
    const int key = first_key + static_cast<int>(threadIdx.x) % 32 * p.box_rows;
    if (key < 0 || key >= tile.seqlen_kv) return {p.cache.pages, 0};
    const int column = key / p.cache.page_size;
    return {page_of_column(p.cache, tile.batch, column), key - column * p.cache.page_size};
  }

  // Starts the TMA loads of all pieces into a tile of `rows` keys.
  template <int rows, int panels>
  __device__ __forceinline__ void copy(const blockflash_attention_cache_params& p,
                                       const blockflash_tensor_map& map, uint32_t dst, int head_kv,
                                       uint32_t barrier) const {
    const int row = static_cast<int>(threadIdx.x) % 32 * p.box_rows;
    if (row >= rows) return;
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
      ptx::tensor_copy_4d(dst + (panel * rows + row) * 128, &map, panel * 64, slot, head_kv, page,
                          barrier);
  }
};

// Walks all key tiles downwards from one.
struct AllTilesBelow {
  int now;
  __device__ __forceinline__ AllTilesBelow(uint32_t, int last) : now(last) {}
  __device__ __forceinline__ int tile() const { return now; }
  __device__ __forceinline__ void advance() { --now; }
};

// What differs.
template <bool cache>
struct OriginOfKeys {
  using Params = blockflash_attention_fwd_tma_params;
  template <int block_q, int tile_heads, int block_rows>
  using Queue = TileQueue<block_q, tile_heads, block_rows>;
  using Walk = DescendingTiles;
  static constexpr bool has_block_masks = true;
  static constexpr int producers = 1;  // threads
};
template <>
struct OriginOfKeys<true> {
  using Params = blockflash_attention_cache_params;
  template <int block_q, int tile_heads, int block_rows>
  using Queue = CacheQueue<block_q>;
  using Walk = AllTilesBelow;
  static constexpr bool has_block_masks = false;
  static constexpr int producers = 32;  // they look up pages together
};

// The parameters of both begin with these. A reference that a function returns would change the
// machine code of dense attention.
static_assert(offsetof(blockflash_attention_cache_params, fwd) == 0);

}  // namespace blockflash

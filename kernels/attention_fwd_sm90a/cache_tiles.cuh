// Where the Hopper attention kernel finds keys and query tiles: in tensors, or in the pages of a
// cache, where the device alone knows how many keys a sequence has.
#pragma once

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/config/attention_hopper.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/params/kv_cache_splits.h"
#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/quotient.cuh"
#include "query_tiles.cuh"

namespace blockflash {

// The parameters of a kernel over a cache, which begin with those of one without.
__device__ __forceinline__ const blockflash_attention_cache_split_params& cache_params_of(
    const blockflash_attention_fwd_tma_params& params) {
  return reinterpret_cast<const blockflash_attention_cache_split_params&>(params);
}

// Over a cache the 64 rows of a warpgroup are queries times a pack of heads that share keys, heads
// fastest. Rows behind the last whole query are zeros.
struct CacheRows {
  int pack, queries;

  static __device__ __forceinline__ CacheRows of(const blockflash_attention_cache_split_params& p) {
    return {p.pack, p.pack_queries};
  }
  __device__ __forceinline__ int count() const { return pack * queries; }
  __device__ __forceinline__ int query_of(int row) const { return small_quotient(row, pack); }
};

// The queue of query tiles of attention over a cache, sequence by sequence, on which a whole warp
// works. Sequences with few queries have none. As in TileQueue, heads are taken in sections, and
// within a section the queries that see the most keys come first. Splits are the outermost: as many
// as the host says or, where the device alone knows the lengths, so many that the splits of all
// sequences are about equally long.
template <int warpgroups, int block_kv>
struct CacheQueue : QueueCounter {
  const blockflash_attention_cache_split_params& all;
  int sequences = 0, base = 0;  // the 32 sequences that the lanes look at, and their first index
  int split = 0, splits = 1;    // of the tile that was taken last
  int usual = 0;  // key tiles of a split, where the device divides; 0: not counted yet

  __device__ __forceinline__ explicit CacheQueue(const blockflash_attention_cache_split_params& all)
      : QueueCounter(all.cache.fwd), all(all) {}

  // Key tiles that the queries of a sequence see, at most.
  __device__ __forceinline__ int key_tiles_of(int queries, int length) const {
    const int left = params.base.scores.window.left;
    const int seen = left < length ? min(length, left + queries) : length;
    return (seen + block_kv - 1) / block_kv;
  }

  // Key tiles of a split with which there are about as many splits as CTAs. Shorter ones than
  // kShortest would take longer to combine than to compute.
  __device__ __forceinline__ int count_usual() const {
    constexpr int kShortest = 4;
    const blockflash_attention_fwd_params& p = params.base;
    float total = 0.f;
    for (int sequence = static_cast<int>(threadIdx.x) % 32; sequence < p.batch; sequence += 32)
      total +=
          static_cast<float>(key_tiles_of(p.seqlen_q, keys_of_sequence(all.cache.cache, sequence)));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      total += __shfl_xor_sync(~0u, total, distance);
    const int block_q = warpgroups * all.pack_queries;
    const int tiles = (p.seqlen_q + block_q - 1) / block_q * p.num_heads_kv * all.packs;
    const float of_cta = total * static_cast<float>(tiles) / static_cast<float>(gridDim.x);
    return max(kShortest, static_cast<int>(ceilf(of_cta)));
  }

  // The tile at `index` without its key tiles; false past the end.
  __device__ __forceinline__ bool take(QueryTile& tile) {
    const blockflash_attention_fwd_params& p = params.base;
    const int lane = threadIdx.x % 32, block_q = warpgroups * all.pack_queries;
    const int packs = p.num_heads_kv * all.packs;
    const bool divides = all.splits > 1 && all.cache.cache.seqused != nullptr;
    if (divides && usual == 0) usual = count_usual();
    int at, tiles_q;
    for (;;) {
      if (sequences >= p.batch) return false;
      const int sequence = min(sequences + lane, p.batch - 1);
      const PackedRows queries =
          p.cu_seqlens_q == nullptr
              ? PackedRows{0, p.seqlen_q}
              : PackedRows::of(p.cu_seqlens_q, sequence, p.total_q, p.seqlen_q);
      const bool is_here = sequences + lane < p.batch && queries.length >= all.cache.fewest_queries;
      tiles_q = is_here ? (queries.length + block_q - 1) / block_q : 0;
      const int length = keys_of_sequence(all.cache.cache, sequence);
      splits = all.splits;
      if (divides)
        splits = min(max((key_tiles_of(p.seqlen_q, length) + usual / 2) / usual, 1), splits);
      const int tiles = tiles_q * packs * splits;
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
        splits = __shfl_sync(~0u, splits, owner);
        tile = {sequences + owner,
                0,
                0,
                __shfl_sync(~0u, queries.begin, owner),
                __shfl_sync(~0u, queries.length, owner),
                __shfl_sync(~0u, length, owner),
                0,
                0};
        at = index - __shfl_sync(~0u, end - tiles, owner);
        tiles_q = __shfl_sync(~0u, tiles_q, owner);
        break;
      }
      base = __shfl_sync(~0u, end, 31);
      sequences += 32;
    }
    split = at / (packs * tiles_q), at -= split * packs * tiles_q;
    const int per_section = params.heads_per_section;
    const int section = at / (per_section * tiles_q) * per_section, rest = at - section * tiles_q;
    const int width = min(per_section, packs - section), row = rest / width;
    const int pack = section + rest - row * width, head_kv = pack / all.packs;
    tile.head =
        head_kv * (p.num_heads_q / p.num_heads_kv) + (pack - head_kv * all.packs) * all.pack;
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
  using Params = blockflash_attention_cache_split_params;
  template <int block_q, int tile_heads, int block_rows>
  using Queue = CacheQueue<block_q / 64, AttentionHopperConfig::block_kv>;
  using Walk = AllTilesBelow;
  static constexpr bool has_block_masks = false;
  static constexpr int producers = 32;  // they look up pages together
};

// The parameters of both begin with these. A reference that a function returns would change the
// machine code of dense attention.
static_assert(offsetof(blockflash_attention_cache_params, fwd) == 0 &&
              offsetof(blockflash_attention_cache_split_params, cache) == 0);

}  // namespace blockflash

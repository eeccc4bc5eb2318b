// How the Hopper attention kernel splits its work into query tiles, and which key tiles each
// visits.
#pragma once

#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/config/attention_bits.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/params/attention_terms.h"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {

// A query tile of one head, or of several heads from `head` on, and the key tiles that it visits:
// positions (TileList) from first_key_tile on.
struct QueryTile {
  int batch, head, q_begin, q_offset;  // q_offset: first row of the sequence in packed tensors
  int seqlen_q, seqlen_kv, first_key_tile, key_tiles;

  __device__ __forceinline__ AttentionMask mask(const blockflash_attention_fwd_params& p) const {
    return AttentionMask::of(p.scores.window, seqlen_q, seqlen_kv);
  }
  static __device__ __forceinline__ QueryTile load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem), b = ptx::load_shared_int4(smem + 16);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  __device__ __forceinline__ void store(uint32_t smem) const {
    ptx::store_shared_int4(smem, make_int4(batch, head, q_begin, q_offset));
    ptx::store_shared_int4(smem + 16, make_int4(seqlen_q, seqlen_kv, first_key_tile, key_tiles));
  }
};

// Coordinates of a query tile for the tensor maps: first row of Q, head and first row of K and V,
// batch.
struct TileRows {
  int q, head_kv, kv, batch;

  static __device__ __forceinline__ TileRows of(const blockflash_attention_fwd_params& p,
                                                const QueryTile& tile) {
    const bool packed = p.cu_seqlens_kv != nullptr;
    const int first_key =
        packed ? PackedRows::of(p.cu_seqlens_kv, tile.batch, p.total_kv, p.seqlen_kv).begin : 0;
    return {tile.q_offset + tile.q_begin, tile.head / (p.num_heads_q / p.num_heads_kv), first_key,
            packed ? 0 : tile.batch};
  }
  static __device__ __forceinline__ TileRows load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem);
    return {a.x, a.y, a.z, a.w};
  }
  __device__ __forceinline__ void store(uint32_t smem) const {
    ptx::store_shared_int4(smem, make_int4(q, head_kv, kv, batch));
  }
};

// The walk over the key tiles of 64 queries, from the last to the first: `lead` of them are passed
// over, then `left` are computed.
struct KeyWalk {
  int left, lead, unmasked_first,
      unmasked_last;  // positions in [unmasked_first, unmasked_last] need no mask

  static __device__ __forceinline__ KeyWalk load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem);
    return {a.x, a.y, a.z, a.w};
  }
};

// The key tiles of which some query in [first_row, first_row + rows) sees a key, and the key tiles
// that every one of these queries sees completely.
struct KeyLimits {
  int begin, end, unmasked_begin, unmasked_end;

  template <int block_kv>
  static __device__ __forceinline__ KeyLimits of(const blockflash_attention_fwd_params& p,
                                                 const QueryTile& tile, int first_row, int rows) {
    const int q_first = tile.q_begin + first_row, q_last = min(q_first + rows, tile.seqlen_q) - 1;
    const AttentionMask mask = tile.mask(p);
    const KeyRange all = mask.keys_of_all<int>(q_first, q_last),
                   any = mask.keys_of_any<int>(q_first, q_last);
    const int end = q_last < q_first ? 0 : (any.end + block_kv - 1) / block_kv;
    return {any.begin / block_kv, end, (all.begin + block_kv - 1) / block_kv, all.end / block_kv};
  }
};

// The parameters of a kernel with score terms, which begin with those of one without.
__device__ __forceinline__ const blockflash_attention_fwd_tma_terms_params& terms_of(
    const blockflash_attention_fwd_tma_params& params) {
  return reinterpret_cast<const blockflash_attention_fwd_tma_terms_params&>(params);
}
static_assert(offsetof(blockflash_attention_fwd_tma_terms_params, fwd) == 0);

// Hands out the indices of query tiles to CTAs. With a counter, those that finish early take more.
struct QueueCounter {
  const blockflash_attention_fwd_tma_params& params;
  int index = blockIdx.x;

  __device__ __forceinline__ explicit QueueCounter(
      const blockflash_attention_fwd_tma_params& params)
      : params(params) {}
  __device__ __forceinline__ explicit QueueCounter(
      const blockflash_attention_fwd_tma_terms_params& all)
      : QueueCounter(all.fwd) {}

  __device__ __forceinline__ void advance() {
    if (params.tile_counter != nullptr) {
      const uint32_t taken = threadIdx.x % 32 == 0 ? atomicAdd(params.tile_counter, 1u) : 0;
      index = gridDim.x + __shfl_sync(~0u, taken, 0);
    } else {
      index += gridDim.x;
    }
  }

  // Whether batch entries read the same bias. Packed ones have none.
  __device__ __forceinline__ bool shares_bias() const {
    const blockflash_score_terms& terms = terms_of(params).terms;
    return terms.bias != nullptr && terms.bias_stride_batch == 0;
  }

  // The last CTA resets the counters for the next launch.
  __device__ __forceinline__ void close() const {
    if (params.tile_counter == nullptr) return;
    __threadfence();
    if (atomicAdd(params.tile_counter + 1, 1u) == gridDim.x - 1)
      params.tile_counter[0] = params.tile_counter[1] = 0;
  }
};

// The queue of query tiles, on which a whole warp works. Heads are taken in sections whose keys and
// values fit into L2 together; within a section the queries that see the most keys come first.
// Under a block mask the longest eighth of the rows of all heads comes before the sections, since a
// long row that starts late would end long after everything else. `tile_heads` heads share a tile.
template <int block_q, int tile_heads, int block_rows>
struct TileQueue : QueueCounter {
  int batch = 0,
      base = 0;  // packed: the sequence that holds `index`, and the index of its first tile

  using QueueCounter::QueueCounter;

  static __device__ __forceinline__ int row_groups_of(int tiles) {
    return (tiles + block_rows - 1) / block_rows;
  }

  // The tile at `index` without its key tiles; false past the end. Of several block rows each lane
  // gets one, or none.
  __device__ __forceinline__ bool take(QueryTile& tile) {
    const blockflash_attention_fwd_params& p = params.base;
    const bool packed = p.cu_seqlens_q != nullptr;
    tile = {0, 0, 0, 0, p.seqlen_q, p.seqlen_kv, 0, 0};
    // From here on heads are counted in units of tile_heads.
    const int heads_q = p.num_heads_q / tile_heads,
              heads_per_section = params.heads_per_section / tile_heads;
    int heads = p.batch * heads_q;
    if (packed) {
      heads = heads_q;
      for (;; ++batch) {
        if (batch == p.batch) return false;
        const PackedRows queries = PackedRows::of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
        tile.q_offset = queries.begin, tile.seqlen_q = queries.length;
        const int tiles =
            row_groups_of(tiles_of_queries(p.block_mask, tile.seqlen_q, block_q)) * heads;
        if (index - base < tiles) break;
        base += tiles;
      }
      tile.seqlen_kv = PackedRows::of(p.cu_seqlens_kv, batch, p.total_kv, p.seqlen_kv).length;
    }
    const int tiles_q = tiles_of_queries(p.block_mask, tile.seqlen_q, block_q);
    const int row_groups = row_groups_of(tiles_q);
    const int early = p.block_mask.row_order != nullptr && !packed ? row_groups / 8 : 0;
    int at = index - base, first_row = 0, rows_here = early;
    if (at >= early * heads) at -= early * heads, first_row = early, rows_here = row_groups - early;
    if (at >= rows_here * heads) return false;
    const int section = at / (heads_per_section * rows_here) * heads_per_section,
              rest = at - section * rows_here;
    const int width = min(heads_per_section, heads - section), row = rest / width,
              head = section + rest - row * width;
    if (kAddsTerms && shares_bias()) {
      // Tiles that read the same bias follow one another.
      tile.head = head / p.batch;
      tile.batch = head - tile.head * p.batch, tile.head *= tile_heads;
    } else {
      tile.batch = packed ? batch : head / heads_q;
      tile.head = (packed ? head : head - tile.batch * heads_q) * tile_heads;
    }
    const BlockRows rows = BlockRows::of(p.block_mask, tile.batch);
    int row_group = first_row + row;
    if constexpr (block_rows > 1) {
      // Where the number of rows is odd, the first CTA has one row: the rows of larger blocks then
      // have the neighbours that they have without a mask, and so the same bits.
      row_group = row_group * block_rows + static_cast<int>(threadIdx.x) % block_rows -
                  (row_groups * block_rows - tiles_q);
      tile.q_begin = tile.seqlen_q;  // no such row
      if (row_group < 0) return true;
    }
    tile.q_begin =
        tile_of_queries(p.block_mask, rows, tiles_q, block_q, tile.batch, tile.head, row_group) *
        block_q;
    return true;
  }

  __device__ __forceinline__ TileRows rows_of(const QueryTile& tile) const {
    return TileRows::of(params.base, tile);
  }
};

}  // namespace blockflash

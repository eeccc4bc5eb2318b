// How attention is cut into tiles of queries, and which key tiles each of them visits.
#pragma once

#include "mask.cuh"
#include "params.h"
#include "ptx/shared.cuh"

namespace blockflash {

// A tile of queries of one head and the key tiles [first_key_tile, first_key_tile + key_tiles) that it visits.
struct QueryTile {
  int batch, head, q_begin, q_offset;  // q_offset: first row of the sequence in packed tensors
  int seqlen_q, seqlen_kv, first_key_tile, key_tiles;

  __device__ __forceinline__ AttentionMask mask(const blockflash_attention_fwd_params& p) const {
    return {seqlen_kv, p.align_bottom_right ? seqlen_kv - seqlen_q : 0, p.window_left, p.window_right};
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

// Where the rows of a tile of queries are for the tensor maps: first row of Q, head and last row of K and V, batch.
struct TileRows {
  int q, head_kv, last_key, batch;

  template <int block_kv>
  static __device__ __forceinline__ TileRows of(const blockflash_attention_fwd_params& p, const QueryTile& tile) {
    const bool packed = p.cu_seqlens_kv != nullptr;
    const int kv_offset = packed ? p.cu_seqlens_kv[tile.batch] : 0;
    return {tile.q_offset + tile.q_begin, tile.head / (p.num_heads_q / p.num_heads_kv),
            kv_offset + (tile.first_key_tile + tile.key_tiles - 1) * block_kv, packed ? 0 : tile.batch};
  }
  static __device__ __forceinline__ TileRows load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem);
    return {a.x, a.y, a.z, a.w};
  }
  __device__ __forceinline__ void store(uint32_t smem) const { ptx::store_shared_int4(smem, make_int4(q, head_kv, last_key, batch)); }
};

// The key tiles of 64 queries of a tile, from the last to the first: they pass over `lead` of them, and `left` concern them.
struct KeyWalk {
  int left, lead, unmasked_first, unmasked_last;  // key tiles in [unmasked_first, unmasked_last] need no mask

  template <int block_kv>
  static __device__ __forceinline__ KeyWalk of(const blockflash_attention_fwd_params& p, const QueryTile& tile, int first_row) {
    const int q_first = tile.q_begin + first_row, q_last = min(q_first + 64, tile.seqlen_q) - 1;
    const AttentionMask mask = tile.mask(p);
    const KeyRange all = mask.keys_of_all<int>(q_first, q_last), any = mask.keys_of_any<int>(q_first, q_last);
    const int left = min(max((any.end + block_kv - 1) / block_kv - tile.first_key_tile, 0), tile.key_tiles);
    const int mine = q_last < q_first ? 0 : left;
    return {mine, tile.key_tiles - mine, max((all.begin + block_kv - 1) / block_kv, tile.first_key_tile), all.end / block_kv - 1};
  }
  static __device__ __forceinline__ KeyWalk load(uint32_t smem) {
    const int4 a = ptx::load_shared_int4(smem);
    return {a.x, a.y, a.z, a.w};
  }
  __device__ __forceinline__ void store(uint32_t smem) const {
    ptx::store_shared_int4(smem, make_int4(left, lead, unmasked_first, unmasked_last));
  }
};

// The queue of tiles. Heads are taken in sections whose keys fit into L2 together; in a section the last queries, which see the most
// keys under a causal mask, come first. Blocks that are done early take more, where the launch has a counter.
template <int block_q, int block_kv>
struct TileQueue {
  const blockflash_attention_fwd_tma_params& params;
  int index = blockIdx.x;
  int batch = 0, base = 0;  // packed: the sequence that holds `index`, and the index of its first tile

  __device__ __forceinline__ explicit TileQueue(const blockflash_attention_fwd_tma_params& params) : params(params) {}

  __device__ __forceinline__ void advance() {
    if (params.tile_counter != nullptr)
      index = gridDim.x + atomicAdd(params.tile_counter, 1u);
    else
      index += gridDim.x;
  }

  // Stores the tile at `index`. False past the end.
  __device__ __forceinline__ bool take(uint32_t smem) {
    const blockflash_attention_fwd_params& p = params.base;
    const bool packed = p.cu_seqlens_q != nullptr;
    QueryTile tile = {0, 0, 0, 0, p.seqlen_q, p.seqlen_kv, 0, 0};
    int heads = p.batch * p.num_heads_q;
    if (packed) {
      heads = p.num_heads_q;
      for (;; ++batch) {
        if (batch == p.batch) return false;
        tile.q_offset = p.cu_seqlens_q[batch], tile.seqlen_q = p.cu_seqlens_q[batch + 1] - tile.q_offset;
        const int tiles = (tile.seqlen_q + block_q - 1) / block_q * heads;
        if (index - base < tiles) break;
        base += tiles;
      }
      tile.seqlen_kv = p.cu_seqlens_kv[batch + 1] - p.cu_seqlens_kv[batch];
    }
    const int tiles_q = (tile.seqlen_q + block_q - 1) / block_q, at = index - base;
    if (at >= tiles_q * heads) return false;
    const int section = at / (params.heads_per_section * tiles_q) * params.heads_per_section, rest = at - section * tiles_q;
    const int width = min(params.heads_per_section, heads - section), row = rest / width, head = section + rest - row * width;
    tile.q_begin = (tiles_q - 1 - row) * block_q;
    tile.batch = packed ? batch : head / p.num_heads_q;
    tile.head = packed ? head : head - tile.batch * p.num_heads_q;
    const KeyRange any = tile.mask(p).keys_of_any<int>(tile.q_begin, min(tile.q_begin + block_q, tile.seqlen_q) - 1);
    tile.first_key_tile = any.begin / block_kv;
    tile.key_tiles = max((any.end + block_kv - 1) / block_kv - tile.first_key_tile, 0);
    tile.store(smem);
    return true;
  }

  // The last block leaves the counters as it found them.
  __device__ __forceinline__ void close() const {
    if (params.tile_counter == nullptr) return;
    __threadfence();
    if (atomicAdd(params.tile_counter + 1, 1u) == gridDim.x - 1) params.tile_counter[0] = params.tile_counter[1] = 0;
  }
};

}  // namespace blockflash

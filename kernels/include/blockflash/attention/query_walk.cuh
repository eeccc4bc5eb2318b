// The work of one CTA of the backward kernels for keys and values: its keys, and the query tiles
// that it visits.
#pragma once

#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/params/attention_bwd.h"

namespace blockflash {
namespace {

// Which queries see a key: the mask of the forward pass, read from the side of the keys.
struct QueryRange {
  AttentionMask mask;
  int seqlen_q;

  __device__ __forceinline__ KeyRange queries_of(int key) const {
    if (key >= mask.seqlen_kv) return {0, 0};
    const int64_t center = static_cast<int64_t>(key) - mask.diagonal;
    const int64_t begin =
        mask.window_right == BLOCKFLASH_WINDOW_UNBOUNDED ? 0 : center - mask.window_right;
    const int64_t end =
        mask.window_left == BLOCKFLASH_WINDOW_UNBOUNDED ? seqlen_q : center + mask.window_left + 1;
    const auto clamped = [&](int64_t x) {
      return static_cast<int>(x < 0 ? 0 : x > seqlen_q ? seqlen_q : x);
    };
    return {clamped(begin), clamped(end)};
  }

  // Whether some pair of a tile is masked.
  __device__ __forceinline__ bool is_masked(int first_key, int keys, int first_query,
                                            int queries) const {
    const KeyRange all = mask.keys_of_all(first_query, min(first_query + queries, seqlen_q) - 1);
    return first_key < all.begin || first_key + keys > all.end;
  }
};

// The keys of a CTA, block_kv of them.
template <int block_kv>
struct KeyWork {
  int batch, head_kv;
  BlockRows rows;  // of the transposed block mask
  int k_begin;     // first key of the tile, within its sequence
  int seqlen_q, seqlen_kv;
  int64_t q_offset, kv_offset;  // first row of the sequence in packed tensors

  // Early key tiles are seen by the most queries of a causal mask, so they come first.
  __device__ __forceinline__ explicit KeyWork(const blockflash_attention_bwd_params& params)
      : KeyWork(params, blockIdx.x / tiles_of_keys(params), blockIdx.x % tiles_of_keys(params)) {}

  static __device__ __forceinline__ int tiles_of_keys(
      const blockflash_attention_bwd_params& params) {
    return tiles_of_queries(params.block_mask_t, params.base.seqlen_kv, block_kv);
  }

  __device__ __forceinline__ KeyWork(const blockflash_attention_bwd_params& params, int batch_head,
                                     int tile) {
    const blockflash_attention_fwd_params& p = params.base;
    batch = batch_head / p.num_heads_kv;
    head_kv = batch_head % p.num_heads_kv;
    k_begin = tile * block_kv;
    rows = BlockRows::of(params.block_mask_t, batch);
    seqlen_q = p.seqlen_q;
    seqlen_kv = p.seqlen_kv;
    q_offset = kv_offset = 0;
    if (p.cu_seqlens_q != nullptr) {
      const PackedRows queries = PackedRows::of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
      const PackedRows keys = PackedRows::of(p.cu_seqlens_kv, batch, p.total_kv, p.seqlen_kv);
      q_offset = queries.begin, seqlen_q = queries.length;
      kv_offset = keys.begin, seqlen_kv = keys.length;
    }
  }

  __device__ __forceinline__ QueryRange range(const blockflash_attention_fwd_params& p) const {
    return {AttentionMask::of(p.scores.window, seqlen_q, seqlen_kv), seqlen_q};
  }

  // Offsets may change while the kernel runs. One thread reads them for all, since threads that
  // read them separately could disagree about how often they meet at a barrier.
  static __device__ __forceinline__ KeyWork& shared() {
    __shared__ __align__(16) unsigned char bytes[sizeof(KeyWork)];
    return reinterpret_cast<KeyWork&>(bytes);
  }
  template <class Read>
  static __device__ __forceinline__ const KeyWork& agreed(const Read& read) {
    if (threadIdx.x == 0) shared() = read();
    __syncthreads();
    return shared();
  }
};

// The query tiles of one head that the keys of a CTA visit: `tiles` positions of the list from
// `first` on, in ascending order.
template <int block_q, int block_kv>
struct QueryWalk {
  TileList list;
  int first, tiles;

  __device__ __forceinline__ QueryWalk(const blockflash_attention_bwd_params& params,
                                       const KeyWork<block_kv>& work, int head) {
    const QueryRange range = work.range(params.base);
    const int last_key = min(work.k_begin + block_kv, work.seqlen_kv) - 1;
    const int begin = range.queries_of(work.k_begin).begin, end = range.queries_of(last_key).end;
    list = TileList::of(params.block_mask_t, work.rows, block_q, work.batch, head, work.k_begin);
    first = list.lower_bound(begin / block_q);
    // Keys that no query sees visit nothing, not even the tile in which their empty range is: the
    // semaphore of a tile counts only blocks of keys that it sees.
    tiles = begin < end ? list.lower_bound((end + block_q - 1) / block_q) - first : 0;
  }

  // The first query of the i-th tile. Statistics end with the last tile of a sequence, and a list
  // that does not ascend could lead beyond it.
  __device__ __forceinline__ int first_query(int i, int seqlen_q) const {
    return min(list.tile_at(first + i), (seqlen_q - 1) / block_q) * block_q;
  }

  // One thread reads the list for all: see KeyWork::agreed. A walk is only replaced once all
  // threads have read the one before it.
  static __device__ __forceinline__ const QueryWalk& agreed(
      const blockflash_attention_bwd_params& params, const KeyWork<block_kv>& work, int head) {
    __shared__ __align__(16) unsigned char bytes[sizeof(QueryWalk)];
    QueryWalk& shared = reinterpret_cast<QueryWalk&>(bytes);
    __syncthreads();
    if (threadIdx.x == 0) shared = QueryWalk(params, work, head);
    __syncthreads();
    return shared;
  }
};

}  // namespace
}  // namespace blockflash

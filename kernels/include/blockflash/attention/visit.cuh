// The work of one CTA that owns queries: its queries, and the key tiles that it visits.
#pragma once

#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/quotient.cuh"

namespace blockflash {
namespace {

// The part of the problem that one CTA computes, block_q queries.
template <int block_q>
struct Work {
  int batch, head, head_kv;
  BlockRows rows;  // of the block mask
  int q_begin;     // first query row of the tile, within its sequence
  int seqlen_q, seqlen_kv;
  int64_t q_offset, kv_offset;  // first row of the sequence in packed tensors

  Work() = default;
  __device__ __forceinline__ explicit Work(const blockflash_attention_fwd_params& p) {
    const int tiles = tiles_of_queries(p.block_mask, p.seqlen_q, block_q);
    const int batch_head = blockIdx.x / tiles;
    batch = batch_head / p.num_heads_q;
    head = batch_head % p.num_heads_q;
    rows = BlockRows::of(p.block_mask, batch);
    q_begin = tile_of_queries(p.block_mask, rows, tiles, block_q, batch, head, blockIdx.x % tiles) *
              block_q;
    head_kv = head / (p.num_heads_q / p.num_heads_kv);
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
};

// Whether the work of a CTA follows from the parameters alone.
__device__ __forceinline__ bool is_dense(const blockflash_attention_fwd_params& p) {
  return p.cu_seqlens_q == nullptr && p.block_mask.row_ptr == nullptr;
}

// The work of a CTA and the key tiles that it visits, from the last to the first: the `tiles`
// positions of the list that end with `last`.
template <int block_q, int block_kv>
struct Visit {
  Work<block_q> work;
  TileList list;
  int last, tiles;

  __device__ __forceinline__ AttentionMask mask(const blockflash_attention_fwd_params& p) const {
    return AttentionMask::of(p.scores.window, work.seqlen_q, work.seqlen_kv);
  }
  __device__ __forceinline__ int q_last() const {
    return min(work.q_begin + block_q, work.seqlen_q) - 1;
  }

  Visit() = default;
  __device__ __forceinline__ explicit Visit(const blockflash_attention_fwd_params& p) : work(p) {
    const KeyRange any = mask(p).keys_of_any(work.q_begin, q_last());
    list = TileList::of(p.block_mask, work.rows, block_kv, work.batch, work.head, work.q_begin);
    last = list.lower_bound((any.end + block_kv - 1) / block_kv) - 1;
    tiles = last + 1 - list.lower_bound(any.begin / block_kv);
  }

  // The first key of the i-th tile.
  __device__ __forceinline__ int first_key_of(int i) const {
    return i < tiles ? list.tile_at(last - i) * block_kv : 0;
  }

  // The same with few instructions where the problem is dense: a CTA's first load waits for them.
  static __device__ __forceinline__ Visit dense(const blockflash_attention_fwd_params& p) {
    const bool few = gridDim.x < 1u << 20;
    const auto quotient = [&](int a, int b) { return few ? small_quotient(a, b) : a / b; };
    const int q_tiles = (p.seqlen_q + block_q - 1) / block_q, block = blockIdx.x;
    const int batch_head = quotient(block, q_tiles);
    Visit visit;
    Work<block_q>& work = visit.work;
    work.batch = quotient(batch_head, p.num_heads_q);
    work.head = batch_head - work.batch * p.num_heads_q;
    work.head_kv = quotient(work.head, quotient(p.num_heads_q, p.num_heads_kv));
    work.rows = {0, 0};
    work.q_begin = (q_tiles - 1 - (block - batch_head * q_tiles)) * block_q;
    work.seqlen_q = p.seqlen_q, work.seqlen_kv = p.seqlen_kv;
    work.q_offset = work.kv_offset = 0;
    const KeyRange any = visit.mask(p).keys_of_any(work.q_begin, visit.q_last());
    visit.list = {nullptr, 0, 1};
    visit.last = (any.end + block_kv - 1) / block_kv - 1;
    visit.tiles = visit.last + 1 - any.begin / block_kv;
    return visit;
  }

  // Offsets and lists may change while the kernel runs. One thread reads them for all, since
  // threads that read them separately could disagree about how often they meet at a barrier.
  static __device__ __forceinline__ Visit& shared() {
    __shared__ __align__(16) unsigned char bytes[sizeof(Visit)];
    return reinterpret_cast<Visit&>(bytes);
  }
  static __device__ __forceinline__ const Visit& agreed(const blockflash_attention_fwd_params& p) {
    if (threadIdx.x == 0) shared() = Visit(p);
    __syncthreads();
    return shared();
  }
};

}  // namespace
}  // namespace blockflash

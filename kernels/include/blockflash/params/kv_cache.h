/* Parameters of the kernels for key-value caches. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_H
#define BLOCKFLASH_PARAMS_KV_CACHE_H

#include <stdint.h>

#include "blockflash/params/attention_fwd.h"

/* Keys and values of a cache: one page per sequence, or pages that a block table names.
 *
 * Key j of sequence b is in slot j % page_size of page block_table[b, j / page_size], or of page
 * b without a table. What the device alone knows is clamped: page numbers to [0, pages), lengths to
 * [0, capacity]. Keys from the length on are never read. */
typedef struct blockflash_kv_cache {
  const void* k; /* [pages, page_size, num_heads_kv, head_dim_qk], or any other order by strides */
  const void* v; /* the same with head_dim_v */
  const int32_t* block_table; /* [batch, ceil(capacity / page_size)]; null: page b for sequence b */
  const int32_t* seqused;     /* [batch] keys of each sequence; null: all have `capacity` */
  int64_t k_stride_page, k_stride_slot, k_stride_head;
  int64_t v_stride_page, v_stride_slot, v_stride_head;
  int64_t block_table_stride; /* of sequences */
  int32_t pages;     /* of k and v, at least 1 unless capacity is 0; `batch` without a table */
  int32_t page_size; /* slots of a page: a multiple of 16 unless a sequence has one page only */
  int32_t capacity;  /* the most keys of a sequence: page_size · columns of the table */
} blockflash_kv_cache;

/* Attention of few queries to the keys of a cache. Options are those of attention forward.
 *
 * Rows are the queries of a sequence times the num_heads_q / num_heads_kv heads that share a key
 * head, heads fastest; a row tile has the tile's `rows` of them. The keys that some query of a
 * sequence attends to, from a multiple of 16 on, are divided into splits of `chunk` keys:
 *
 *   chunk = ceil64(max(clamp(ceil(keys / splits), chunk_min, chunk_max), ceil(keys / 256)))
 *   n     = max(1, ceil(keys / chunk))
 *
 * An item is a run of 2^run_log2 splits, or the rest of them, for one row tile of one key head. The
 * items of a sequence are numbered as (run · row tiles + row tile) · num_heads_kv + head, those of
 * the next sequence follow. The CTA that completes a row tile combines the results of its splits,
 * in groups of 16, so that results do not depend on the length of the runs. */
typedef struct blockflash_attention_decode_params {
  const void* q; /* [batch, seqlen_q, num_heads_q, head_dim_qk]; packed: [total_q, …] */
  void* o;       /* the same with head_dim_v */
  float* lse; /* [batch, num_heads_q, seqlen_q], natural logarithm; packed: [num_heads_q, total_q]
                 with a stride of 0 for the batch; may be null */
  const int32_t* cu_seqlens_q; /* [batch + 1] offsets into packed queries; null: all sequences have
                                  seqlen_q */
  blockflash_kv_cache cache;
  const int32_t* page_list;  /* [batch, num_heads_kv, page_list_capacity] columns of the block table
                                that each key head visits, ascending and without repeats; null: all.
                                Clamped to the columns of the table */
  const int32_t* page_count; /* [batch] listed pages, the same for all heads; clamped to
                                [0, page_list_capacity] */
  float* partial_sums;       /* workspace, [slots, partial_rows, head_dim_v] with items · 2^run_log2
                                slots; null if no sequence can have more than one split */
  float* partial_logs;    /* workspace, [slots, partial_rows, 2]: log2 reference and denominator */
  uint64_t* arrivals;     /* workspace, [2 + slots], zeros before the first launch that uses them */
  uint32_t* tile_counter; /* two zeros, left as zeros: {next item, CTAs that are done}; not used if
                             the grid has a CTA for each item */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t o_stride_batch, o_stride_seq, o_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t group;                   /* num_heads_q / num_heads_kv */
  int32_t seqlen_q;                /* the longest sequence of queries when packed */
  int32_t total_q;                 /* rows of q and o when packed; offsets are clamped to them */
  int32_t head_dim_qk, head_dim_v; /* multiples of 8, each at most the tile's */
  int32_t
      most_queries; /* sequences with more queries belong to another kernel and are left alone */
  int32_t page_list_capacity;
  int32_t items;        /* room in the workspace. Items beyond it, which only offsets that do not
                           ascend can have, are not computed */
  int32_t partial_rows; /* min(rows, seqlen_q · num_heads_q / num_heads_kv) */
  int32_t splits;       /* of a sequence of medium length */
  int32_t chunk_min, chunk_max; /* keys of a split, multiples of 64, at most 2^20 */
  int32_t run_log2;             /* splits of an item, at most 16 */
  blockflash_scores scores;
} blockflash_attention_decode_params;

/* Attention of many queries to the keys of a cache, with the tiles of attention forward.
 *
 * In `fwd`, cu_seqlens_q tells whether queries are packed, seqlen_kv is the capacity, and k, v,
 * cu_seqlens_kv and the block mask are null. The maps of k and v have the dimensions (head_dim_qk
 * or head_dim_v, slot, head, page) and boxes of 64 columns and `box_rows` slots, which are in one
 * page. */
typedef struct blockflash_attention_cache_params {
  blockflash_attention_fwd_tma_params fwd;
  blockflash_kv_cache cache;
  int32_t fewest_queries; /* sequences with fewer queries belong to another kernel */
  int32_t box_rows;       /* a divisor of the tile's block_kv and, with several pages per sequence,
                             of page_size */
} blockflash_attention_cache_params;

/* Combines attention over disjoint sets of keys: o and lse of all keys from those of each set, in
 * ascending order. */
typedef struct blockflash_attention_merge_params {
  const void* parts;      /* [count, rows, num_heads_q, head_dim_v] */
  const float* parts_lse; /* [count, num_heads_q, rows], natural logarithm; null: parts are added */
  void* o;                /* [rows, num_heads_q, head_dim_v] */
  float* lse;             /* [num_heads_q, rows]; may be null */
  int64_t parts_stride_part, parts_stride_row, parts_stride_head;
  int64_t parts_lse_stride_part, parts_lse_stride_row, parts_lse_stride_head;
  int64_t o_stride_row, o_stride_head;
  int64_t lse_stride_row, lse_stride_head;
  int32_t count, rows, num_heads_q;
  int32_t head_dim_v;  /* a multiple of 8 */
  int32_t parts_dtype; /* BLOCKFLASH_DTYPE_… */
  int32_t o_dtype;     /* BLOCKFLASH_DTYPE_… */
} blockflash_attention_merge_params;

#endif

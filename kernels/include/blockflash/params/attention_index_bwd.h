/* Parameters of the gradients of attention in which lists tell each query the keys that it attends
 * to. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_INDEX_BWD_H
#define BLOCKFLASH_PARAMS_ATTENTION_INDEX_BWD_H

#include <stdint.h>

#include "blockflash/params/attention_bwd.h"
#include "blockflash/params/attention_index.h"

#define BLOCKFLASH_INDEX_COUNT 0  /* entries of each slab of queries by bin */
#define BLOCKFLASH_INDEX_SUM 1    /* visits of each bin, and of the slabs before each slab */
#define BLOCKFLASH_INDEX_DIVIDE 2 /* where bins begin, and their items */
#define BLOCKFLASH_INDEX_LIST 3   /* visits by bin, and the position of each entry */

#define BLOCKFLASH_INDEX_SLAB 256        /* queries of a slab, and threads of a CTA */
#define BLOCKFLASH_INDEX_COUNT_BINS 8192 /* bins of a CTA of step COUNT */
#define BLOCKFLASH_INDEX_LIST_BINS 1024  /* of step LIST */

/* Steps of attention_index_bwd_sums_sm80, whose CTAs have 256 threads. */
#define BLOCKFLASH_INDEX_SUM_KEYS 0    /* dk and dv of bins with several items or none */
#define BLOCKFLASH_INDEX_SUM_QUERIES 1 /* dq of the pass, 8 columns of a head per thread */

/* Neighbouring visits of a bin, which CTAs compute one after another. */
typedef struct blockflash_index_item {
  BLOCKFLASH_ALIGNAS(16) int32_t bin; /* -1: no item */
  int32_t begin, visits;              /* the first one, and how many */
  int32_t part; /* where dk and dv of the item go in key_parts; -1 if the bin has one item */
} blockflash_index_item;

/* Gradients of attention by lists.
 *
 * They are computed by blocks of keys, for which the lists are transposed. A bin is the keys
 * [i · width, (i + 1) · width) of a sequence, width = max(64, 2^granularity_log2), and is visited
 * by the queries with an entry in it of which some key is visible. Bins of a packed sequence b
 * begin with bin cu_seqlens_kv[b] / width + b, others with bin b · ceil(seqlen_kv / width).
 *
 * Heads that share a list and a key head are the `group` heads of a unit, as in the forward pass. A
 * set of lists is transposed together: those of one key head, or, with fewer lists than key heads,
 * one list. Key head h has set h · sets / num_heads_kv, and of list l of its set the query heads
 * h · num_heads_q / num_heads_kv + l · group to `group` further.
 *
 * Queries are computed in passes, since each visit leaves its part of dq in the workspace. A pass
 * has the rows [first_query, first_query + queries) of all sequences and is one launch of each of
 *
 *   index_transpose_sm80   COUNT   sets · slabs · ceil(bins / BLOCKFLASH_INDEX_COUNT_BINS) CTAs
 *                          SUM     sets · ceil(bins / BLOCKFLASH_INDEX_SLAB)
 *                          DIVIDE  sets
 *                          LIST    sets · slabs · ceil(bins / BLOCKFLASH_INDEX_LIST_BINS)
 *   attention_index_bwd_kv_sm80    num_heads_kv · max_items · width / block_kv
 *   attention_index_bwd_sums_sm80
 *                          SUM_KEYS     num_heads_kv · bins · width / 64
 *                          SUM_QUERIES  ceil(queries · num_heads_q · head_dim_qk / 8 / 256)
 *
 * Query v of a set, v < set_queries = set_lists · queries, is query first_query + v % queries of
 * list v / queries of the set. Its entry i is entry v · capacity + i of the set. */
typedef struct blockflash_attention_index_bwd_params {
  blockflash_attention_bwd_params
      bwd; /* without a block mask and semaphores; o and lse are not read: deltas and negative_logs
              are those of attention_bwd_delta_sm80 */
  blockflash_index_lists lists;
  blockflash_index_item* items; /* workspace, [sets, max_items] */
  int32_t* counts;              /* workspace, [sets, slabs, bins] */
  int32_t* lengths;             /* workspace, [sets, bins]: visits */
  int32_t* begins;              /* workspace, [sets, bins]: the first visit */
  int32_t*
      first_part;   /* workspace, [sets, bins]: the part of the first item, if there are several */
  uint32_t* visits; /* workspace, [sets, entries], entries = set_queries · capacity: query v of the
                       set, shifted by 6 - granularity_log2 if that is positive, and which run of
                       2^granularity_log2 keys of the bin. By bin, then by entry */
  int32_t* places;  /* workspace, [sets, entries]: the visit of each entry, or -1 */
  uint16_t* dq_parts; /* workspace, f16 [num_heads_kv, width / block_kv, entries · group,
                         head_dim_qk]: dq / scale of each visit, times a power of two */
  float* dq_factors;  /* workspace, [num_heads_kv, width / block_kv, entries · group, dq_columns]:
                         the inverse of that power, for equal parts of the tile's columns */
  float* key_parts;   /* workspace, [num_heads_kv, max_parts, width / block_kv, dk and dv, block_kv,
                         head_dim of the tile] */
  float* key_sums;    /* workspace, [num_heads_kv, bins, width / block_kv, dk and dv, block_kv,
                         head_dim of the tile]: sums of the passes so far; null with one pass */
  int32_t sets;       /* min(lists.groups, num_heads_kv) */
  int32_t set_lists;  /* lists.groups / sets */
  int32_t group;      /* num_heads_q / max(lists.groups, num_heads_kv) */
  int32_t bins; /* total_kv / width + batch when packed, else batch · ceil(seqlen_kv / width) */
  int32_t first_query,
      queries;         /* of the pass. The words of visits and `entries` fit into 31 bits */
  int32_t slabs;       /* ceil(set_queries / BLOCKFLASH_INDEX_SLAB) */
  int32_t item_visits; /* the most visits of an item */
  int32_t max_items;   /* bins + entries / item_visits */
  int32_t max_parts;   /* 2 · (entries / item_visits) */
  int32_t first_pass, last_pass; /* whether the pass is */
  int32_t step;                  /* BLOCKFLASH_INDEX_… */
  int32_t block_kv;              /* keys of a tile of attention_index_bwd_kv_sm80 */
  int32_t tile_head_dim;         /* head_dim of that tile */
  int32_t dq_columns;            /* parts of the tile's columns of dq */
} blockflash_attention_index_bwd_params;

#endif

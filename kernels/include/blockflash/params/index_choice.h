/* Parameters of the kernels that score blocks of keys for each query and choose the largest. */
#ifndef BLOCKFLASH_PARAMS_INDEX_CHOICE_H
#define BLOCKFLASH_PARAMS_INDEX_CHOICE_H

#include <stdint.h>

#include "blockflash/params/kv_cache.h"

/* How the scores of the keys of a block become one. */
#define BLOCKFLASH_INDEX_MAX 0
#define BLOCKFLASH_INDEX_MEAN 1 /* of the keys that the query sees */

/* What happens to a scaled product before it is weighted. */
#define BLOCKFLASH_INDEX_IDENTITY 0
#define BLOCKFLASH_INDEX_RELU 1

/* The most entries of a list that top_k writes. */
#define BLOCKFLASH_TOP_K_MOST 2048

/* The queries of a batch and the keys that each of them sees.
 *
 * Row r is query r of packed queries, or query r % seqlen_q of sequence r / seqlen_q. Query i of n
 * of a sequence with `length` keys stands at key length - n + i and sees the keys of the window.
 * Offsets and lengths are data on the device and are clamped. A row that is in no sequence sees
 * nothing. */
typedef struct blockflash_index_rows {
  const int32_t* cu_seqlens_q;  /* [batch + 1] offsets into packed queries; null: all sequences have
                                   seqlen_q */
  const int32_t* cu_seqlens_kv; /* [batch + 1] offsets into packed keys, which are the slots of page
                                   0 of the cache: it has no block table and no seqused, one page
                                   of total_kv slots, and the longest sequence as its capacity;
                                   null: the keys of a sequence are as the cache says */
  blockflash_kv_cache cache; /* v is not read; top_k reads seqused, page_size and capacity alone */
  int32_t batch;
  int32_t seqlen_q;         /* the longest sequence of queries when packed */
  int32_t rows;             /* total_q when packed, to which offsets are clamped; else batch ·
                               seqlen_q */
  blockflash_window window; /* align_bottom_right is 1 */
} blockflash_index_rows;

/* Scores of blocks of keys. Entry b of row t of group s is the maximum or the mean, over the keys j
 * of [b · granularity, (b + 1) · granularity) that the query sees, of
 *
 *   sum over the heads h of the group of  weights[t, h] · activation(scale · q[t, h] · k[j])
 *
 * and -inf if the query sees none of them. A NaN among what is summed makes the entry NaN.
 *
 * Group s has the query heads [s · num_heads / groups, (s + 1) · num_heads / groups), which have
 * one key head, s · num_heads_k / groups: num_heads_k divides groups, and groups num_heads. */
typedef struct blockflash_index_scores_params {
  blockflash_index_rows rows;
  const void* q;        /* [batch, seqlen_q, num_heads, head_dim]; packed: [rows, …] */
  const float* weights; /* [rows, num_heads]; null: 1 */
  const float*
      k_scales;  /* factors of keys of 8 bits, by page, slot and head as the keys; null: 1 */
  float* scores; /* [groups, rows, blocks] */
  uint32_t* tile_counter; /* two zeros, left as zeros: {next item, CTAs that are done} */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t weights_stride_row, weights_stride_head;
  int64_t k_scales_stride_page, k_scales_stride_slot, k_scales_stride_head;
  int64_t scores_stride_group, scores_stride_row;
  int32_t num_heads, num_heads_k, groups;
  int32_t head_dim;      /* a multiple of 8, at most the tile's */
  int32_t granularity;   /* 1, 4, 16, 64 or 128 */
  int32_t blocks;        /* ceil(capacity / granularity) */
  int32_t reduction;     /* BLOCKFLASH_INDEX_MAX or _MEAN */
  int32_t activation;    /* BLOCKFLASH_INDEX_IDENTITY or _RELU */
  float scale;           /* finite and positive */
  int32_t item_queries;  /* queries that a CTA multiplies with one tile of keys, at least 1; decides
                            times alone */
  int32_t leaves_hidden; /* 1: entries of blocks that a query does not see may be left as they are,
                            which top_k with the same rows does not read */
} blockflash_index_scores_params;

/* The k largest scores of each row, as columns in ascending order, of equal scores the lower
 * columns; -1 behind the last one. Neither -inf nor NaN is chosen.
 *
 * A row's columns are those of the blocks that its query sees: [begin / granularity, ceil(end /
 * granularity)) if it sees the keys [begin, end). Of these the ones below `first` and the last
 * `last` ones are chosen whatever their scores are, and count in k. */
typedef struct blockflash_top_k_params {
  blockflash_index_rows rows;
  const float* scores;  /* [groups, rows, blocks] */
  int32_t* chosen;      /* [groups, rows, k] */
  uint64_t* candidates; /* workspace, [groups · rows, parts, k]; null with one part */
  uint32_t* counts;     /* workspace, [groups · rows, parts]; null with one part */
  uint64_t* arrivals;   /* workspace, [2 + groups · rows], zeros before the first launch; null with
                           one part */
  int64_t scores_stride_group, scores_stride_row;
  int64_t chosen_stride_group, chosen_stride_row;
  int32_t groups;
  int32_t granularity; /* 1, 4, 16, 64 or 128 */
  int32_t blocks;      /* columns of scores, at most 2^20; those that a query sees are clamped to
                          them */
  int32_t k;           /* from 1 to BLOCKFLASH_TOP_K_MOST */
  int32_t first, last; /* not negative, at most k in all */
  int32_t parts;       /* CTAs that share a row, from 1 to 128; decides times alone */
} blockflash_top_k_params;

#endif

/* Parameters of the kernels that choose the pages of a cache. */
#ifndef BLOCKFLASH_PARAMS_PAGE_CHOICE_H
#define BLOCKFLASH_PARAMS_PAGE_CHOICE_H

#include <stdint.h>

#include "blockflash/params/kv_cache.h"

/* What is kept of the keys of each page and head, in the element type of the cache: their mean, or
 * their minimum and then their maximum, element by element. */
typedef struct blockflash_page_summaries {
  void* rows; /* [pages, statistics, num_heads_kv, head_dim] */
  int64_t stride_page, stride_statistic, stride_head;
  int32_t statistics; /* 1: mean, 2: minimum and maximum */
} blockflash_page_summaries;

/* Summaries of the pages that hold the last tokens of each sequence. Those of other pages are not
 * written. */
typedef struct blockflash_page_summaries_params {
  blockflash_kv_cache cache; /* v is not read */
  blockflash_page_summaries summaries;
  int32_t batch, num_heads_kv;
  int32_t head_dim;   /* a multiple of 8, at most 256 */
  int32_t tokens;     /* the last ones of each sequence */
  int32_t most_pages; /* that `tokens` tokens of a sequence can be in */
} blockflash_page_summaries_params;

/* The pages that each key head of a sequence visits: the first one, the last one, and those with
 * the largest scores, of equal scores the first ones. */
typedef struct blockflash_page_choice_params {
  const void* q;               /* [batch, seqlen_q, num_heads_q, head_dim]; packed: [total_q, …] */
  const int32_t* cu_seqlens_q; /* [batch + 1] offsets into packed queries; null: all sequences have
                                  seqlen_q */
  blockflash_kv_cache cache;   /* k and v are not read */
  blockflash_page_summaries summaries;
  float* scores;      /* workspace, [batch, num_heads_kv, max_pages] */
  uint64_t* arrivals; /* workspace, [2 + batch · num_heads_kv], zeros before the first launch */
  int32_t* lists;     /* [batch, num_heads_kv, list_capacity] columns of the block table, ascending;
                         zeros behind the last one */
  int32_t* counts;    /* [batch] listed pages */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int32_t batch, num_heads_kv;
  int32_t group;         /* num_heads_q / num_heads_kv */
  int32_t seqlen_q;      /* the longest sequence of queries when packed */
  int32_t total_q;       /* rows of q when packed; offsets are clamped to them */
  int32_t head_dim;      /* a multiple of 8, at most 256 */
  int32_t list_capacity; /* at least 2 */
  int32_t max_pages;     /* ceil(capacity of the cache / page_size) */
  int32_t parts;         /* CTAs that share the pages of a sequence and key head */
} blockflash_page_choice_params;

#endif

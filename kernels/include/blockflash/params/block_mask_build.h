/* Parameters of the kernels that build block masks. */
#ifndef BLOCKFLASH_PARAMS_BLOCK_MASK_BUILD_H
#define BLOCKFLASH_PARAMS_BLOCK_MASK_BUILD_H

#include <stdint.h>

#include "blockflash/params/block_mask.h"
#include "blockflash/params/scores.h"

/* Sources of a block mask. */
#define BLOCKFLASH_BLOCK_SOURCE_BOOL \
  0 /* uint8_t [batch, heads, rows, cols]: nonzero blocks are visited */
#define BLOCKFLASH_BLOCK_SOURCE_LISTS \
  1 /* int32_t [batch, heads, rows, k]: columns in any order, -1 for none */
#define BLOCKFLASH_BLOCK_SOURCE_SCORES                                                             \
  2 /* float [batch, heads, rows, cols]: the k largest scores among the blocks that the token mask \
       does not hide entirely */

/* Steps of building a block mask: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_MASK_CHOOSE 0 /* source to bits, lengths and slab_lengths */
#define BLOCKFLASH_BLOCK_MASK_LIST 1   /* these to row_ptr, col_idx and row_order */

/* Problems with a row that are found while a mask is built. */
#define BLOCKFLASH_BLOCK_PROBLEM_NO_COLUMN \
  0 /* a list has a column that does not exist, which is left out */
#define BLOCKFLASH_BLOCK_PROBLEM_TWICE 1 /* a list has a column twice, which counts once */
#define BLOCKFLASH_BLOCK_PROBLEM_NAN 2   /* a score is NaN and is never chosen */
#define BLOCKFLASH_BLOCK_PROBLEM_CAPACITY \
  3 /* col_idx has no room for the columns from this position on, nor for later rows */

/* Block mask: the source's blocks and the blocks of `always`, without the blocks that the token
 * mask hides entirely, as index arrays in BSR.
 *
 * Row r of a batch entry and head is row (batch·heads + head)·rows + r of all rows. A slab is as
 * many neighbouring rows of one head as a CTA has warps; the last slab of a head may have fewer. */
typedef struct blockflash_block_mask_build_params {
  const void* source;
  blockflash_block_mask always; /* visited whatever the source says; none if row_ptr is null */
  uint32_t* bits;   /* [batch, heads, rows, ceil(cols / 32)] columns of each row, the first in the
                       lowest bit */
  int32_t* lengths; /* [batch, heads, rows] columns of each row, whatever the capacity */
  int32_t* slab_lengths; /* [batch, heads, slabs] sums of lengths */
  int32_t* row_ptr;      /* [batch, heads, rows + 1] */
  int32_t* col_idx;      /* [capacity] */
  int32_t* row_order;    /* [batch, heads, rows] rows by descending length, the last one first among
                            equally long rows */
  uint64_t* problems;    /* [2], lowered by every launch: {row << 33 | position << 2 | problem,
                            ~(number of blocks that col_idx would have to hold)} */
  int32_t step;          /* BLOCKFLASH_BLOCK_MASK_… */
  int32_t source_kind;   /* BLOCKFLASH_BLOCK_SOURCE_… */
  int32_t k;             /* unused for booleans */
  int32_t batch, heads, rows, cols;
  int32_t capacity;
  int32_t seqlen_q, seqlen_kv, block_q, block_kv;
  blockflash_window window; /* the token mask, as for attention */
} blockflash_block_mask_build_params;

/* Steps of transposing a block mask: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_MASK_GATHER 0 /* row_ptr and col_idx to bits and counts */
#define BLOCKFLASH_BLOCK_MASK_LIST_T 1 /* these to row_ptr_t and col_idx_t */

/* The transpose of a block mask: for each block column the block rows that visit it, in BSR.
 *
 * A slab is as many neighbouring rows of one head as the tile says, a strip 32 neighbouring
 * columns; the last ones may have fewer. A head's part of col_idx_t starts where that of col_idx
 * does. */
typedef struct blockflash_block_mask_transpose_params {
  const int32_t* row_ptr; /* [batch, heads, rows + 1] */
  const int32_t* col_idx; /* columns that do not exist are left out */
  uint32_t* bits;         /* [batch, heads, ceil(rows / 32), 32·strips] rows of each column, 32 per
                             word, the first in the lowest bit; 16-byte aligned */
  int32_t* counts;        /* [batch, heads, strips, slabs] visited blocks */
  int32_t* row_ptr_t;     /* [batch, heads, cols + 1] */
  int32_t* col_idx_t;     /* [capacity] rows of each column, ascending */
  int32_t step;           /* BLOCKFLASH_BLOCK_MASK_… */
  int32_t batch, heads, rows, cols;
  int32_t capacity;
} blockflash_block_mask_transpose_params;

/* Steps of scoring blocks: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_SCORES_MEANS 0    /* q and k to q_means and k_means */
#define BLOCKFLASH_BLOCK_SCORES_PRODUCTS 1 /* these to scores */

/* Scores of blocks: the mean query of each block row times the mean key of each block column. */
typedef struct blockflash_block_scores_params {
  const void* q;  /* [batch, seqlen_q, num_heads_q, head_dim] */
  const void* k;  /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  float* q_means; /* [batch, num_heads_q, rows, head_dim] */
  float* k_means; /* [batch, num_heads_kv, cols, head_dim] */
  float* scores;  /* [batch, num_heads_q, rows, cols] */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t k_stride_batch, k_stride_seq, k_stride_head;
  int32_t step; /* BLOCKFLASH_BLOCK_SCORES_… */
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t seqlen_q, seqlen_kv, block_q, block_kv;
  int32_t rows, cols; /* ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv) */
  int32_t head_dim;   /* a multiple of 8, at most 256 */
} blockflash_block_scores_params;

#endif

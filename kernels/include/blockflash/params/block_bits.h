/* Parameters of the kernel that makes partial blocks. */
#ifndef BLOCKFLASH_PARAMS_BLOCK_BITS_H
#define BLOCKFLASH_PARAMS_BLOCK_BITS_H

#include <stdint.h>

#include "blockflash/params/scores.h"

/* Sources of the pairs that are visible. */
#define BLOCKFLASH_PAIRS_BOOL 0 /* uint8_t [batch, heads, seqlen_q, seqlen_kv]: 0 is hidden */
#define BLOCKFLASH_PAIRS_RANGES \
  1 /* int32_t [batch, heads, seqlen_q, 2 * ranges]: keys [begin, end) that a query sees */
#define BLOCKFLASH_PAIRS_DOCUMENTS \
  2 /* int32_t [batch, seqlen_q] and, as ids_kv, [batch, seqlen_kv]: equal ids; negative: none */
#define BLOCKFLASH_PAIRS_TREE                                                                    \
  3 /* int32_t [batch, seqlen_q]: parents of the nodes, which are the last keys; a node sees the \
       keys before them, itself and its ancestors. A parent that is no lower node is none. */
#define BLOCKFLASH_PAIRS_STRIDED 4      /* no tensor: query + diagonal - key divides by stride */
#define BLOCKFLASH_PAIRS_NEIGHBORHOOD 5 /* no tensor: grid, window and dilation */

/* Steps: one launch each. Before those that gather, lists are built of `visited`. */
#define BLOCKFLASH_BLOCK_BITS_CLASSIFY                                                             \
  0                                      /* a CTA per cols_of_cta blocks: → visited, first, bits \
                                          */
#define BLOCKFLASH_BLOCK_BITS_GATHER 1   /* a warp per row of the lists: first → block_bits */
#define BLOCKFLASH_BLOCK_BITS_GATHER_T 2 /* the same of the transposed lists */
#define BLOCKFLASH_BLOCK_BITS_JUMPS 3    /* a CTA per 1024 nodes of trees: source → jumps; first */

#define BLOCKFLASH_BLOCK_BITS_AXES 4 /* of a grid, at most */

typedef struct blockflash_block_bits_params {
  const void* source;
  const int32_t* ids_kv;    /* of documents */
  int32_t* jumps;           /* [batch, seqlen_q, 4] of trees: ancestors in the same 64 nodes, as 64
                               bits; the first one outside of them, and of 1024 nodes; or -1 */
  uint8_t* visited;         /* [batch, heads, rows, cols] 1: some pair of the block is visible */
  int32_t* first;           /* [batch, heads, rows, cols] first tile of a block, or -1: full */
  int32_t* counter;         /* [2] tiles that were asked for: since it was set to 0, and at most */
  uint32_t* bits;           /* [capacity, 128] */
  uint32_t* bits_t;         /* the same of the transposed blocks; null: none */
  const int32_t* row_ptr;   /* of the lists whose block_bits are gathered */
  const int32_t* col_idx;   /* of the lists, [blocks] */
  int32_t* block_bits;      /* [blocks] */
  int32_t step;             /* BLOCKFLASH_BLOCK_BITS_… */
  int32_t source_kind;      /* BLOCKFLASH_PAIRS_… */
  blockflash_window within; /* pairs outside of it are hidden, whatever the source says */
  int32_t ranges;           /* of a query */
  int32_t stride, diagonal; /* stride at least 1; query + diagonal - key within 32 bits */
  int32_t axes;             /* of a grid, 1 to 4: the last one has neighbouring tokens */
  /* Of each axis its positions, how many of them are seen, and how far apart. All are at
   * least 1, and window * dilation at most grid. */
  int32_t grid[BLOCKFLASH_BLOCK_BITS_AXES];
  int32_t window[BLOCKFLASH_BLOCK_BITS_AXES];
  int32_t dilation[BLOCKFLASH_BLOCK_BITS_AXES];
  int32_t batch, heads; /* of the mask */
  int32_t seqlen_q, seqlen_kv;
  int32_t block_q, block_kv; /* multiples of 64, with up to VARIANT_MAX_TILES tiles of 64 × 64 */
  int32_t rows, cols;        /* ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv) */
  int32_t cols_of_cta;       /* neighbours in a row that a CTA classifies, up to VARIANT_THREADS */
  int32_t capacity;          /* tiles in bits, a multiple of those of a block */
} blockflash_block_bits_params;

#endif

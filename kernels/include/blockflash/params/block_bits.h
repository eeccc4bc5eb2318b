/* Parameters of the kernel that makes partial blocks. */
#ifndef BLOCKFLASH_PARAMS_BLOCK_BITS_H
#define BLOCKFLASH_PARAMS_BLOCK_BITS_H

#include <stdint.h>

/* Sources of the pairs that are visible. */
#define BLOCKFLASH_PAIRS_BOOL 0 /* uint8_t [batch, heads, seqlen_q, seqlen_kv]: 0 is hidden */
#define BLOCKFLASH_PAIRS_RANGES \
  1 /* int32_t [batch, heads, seqlen_q, 2 * ranges]: keys [begin, end) that a query sees */

/* Steps: one launch each. Between the first and the others, lists are built of `visited`. */
#define BLOCKFLASH_BLOCK_BITS_CLASSIFY 0 /* a CTA per block: source → visited, first, bits */
#define BLOCKFLASH_BLOCK_BITS_GATHER 1   /* a warp per row of the lists: first → block_bits */
#define BLOCKFLASH_BLOCK_BITS_GATHER_T 2 /* the same of the transposed lists */

typedef struct blockflash_block_bits_params {
  const void* source;
  uint8_t* visited;       /* [batch, heads, rows, cols] 1: some pair of the block is visible */
  int32_t* first;         /* [batch, heads, rows, cols] first tile of a block, or -1: full */
  int32_t* counter;       /* [2] tiles that were asked for: since it was set to 0, and at most */
  uint32_t* bits;         /* [capacity, 128] */
  uint32_t* bits_t;       /* the same of the transposed blocks; null: none */
  const int32_t* row_ptr; /* of the lists whose block_bits are gathered */
  const int32_t* col_idx; /* of the lists, [blocks] */
  int32_t* block_bits;    /* [blocks] */
  int32_t step;           /* BLOCKFLASH_BLOCK_BITS_… */
  int32_t source_kind;    /* BLOCKFLASH_PAIRS_… */
  int32_t ranges;         /* of a query */
  int32_t batch, heads;   /* of the mask */
  int32_t seqlen_q, seqlen_kv;
  int32_t block_q, block_kv; /* multiples of 64, with up to VARIANT_MAX_TILES tiles of 64 × 64 */
  int32_t rows, cols;        /* ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv) */
  int32_t capacity;          /* tiles in bits, a multiple of those of a block */
} blockflash_block_bits_params;

#endif

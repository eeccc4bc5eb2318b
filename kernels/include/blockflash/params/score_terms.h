/* What may be added to a score of attention beyond scores.h: bias, ALiBi, bits of blocks. */
#ifndef BLOCKFLASH_PARAMS_SCORE_TERMS_H
#define BLOCKFLASH_PARAMS_SCORE_TERMS_H

#include <stdint.h>

/* Words of the bits of a tile of 64 queries × 64 keys. The lane 4·(row % 8) + column % 8 / 2 of an
 * MMA accumulator has word 32·(row / 16) + lane: bit 16·(row % 16 / 8) + 2·(column / 8) + column %
 * 2 is set where the pair is visible. */
#define BLOCKFLASH_BIT_TILE_WORDS 128

/* Score terms, in this order: once the score of query i and key j has been scaled and capped, the
 * bias is added, then ALiBi, slope·-|i + seqlen_kv - seqlen_q - j|; pairs whose bit is 0 are masked
 * as those outside the window. */
typedef struct blockflash_score_terms {
  const void* bias; /* [batch, num_heads_q, seqlen_q, seqlen_kv] with any strides, 0 where it
                       broadcasts; null: none */
  int64_t bias_stride_batch, bias_stride_head, bias_stride_q, bias_stride_kv;
  const float* alibi; /* slopes, [batch, num_heads_q]; null: none */
  int64_t alibi_stride_batch, alibi_stride_head;
  const int32_t* block_bits; /* beside col_idx of the block mask: the tile of 64 × 64 bits with
                                which the bits of a listed block begin, or -1 where all pairs of the
                                block are visible; null: all pairs of all listed blocks are */
  const uint32_t* bits;      /* [bit_tiles, 128]. A block has its tiles in row-major order */
  int32_t bit_tiles;         /* tiles are clamped to them */
  int32_t bias_type;         /* BLOCKFLASH_DTYPE_… */
} blockflash_score_terms;

#endif

/* Parameters of the attention kernels with score terms. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_TERMS_H
#define BLOCKFLASH_PARAMS_ATTENTION_TERMS_H

#include <stdint.h>

#include "blockflash/params/attention_bwd.h"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/params/base.h"
#include "blockflash/params/score_terms.h"

/* In all of them scale_log2 of the scores, a factor of what the terms have been added to, is
 * log2(e) where there is a bias or ALiBi, as where scores are capped. */
typedef struct blockflash_attention_fwd_terms_params {
  blockflash_attention_fwd_params base;
  blockflash_score_terms terms;
} blockflash_attention_fwd_terms_params;

/* Attention forward by TMA. The map of a bias of 16 bits has the dimensions (key, query, head,
 * batch), of which those that broadcast have one entry. */
typedef struct blockflash_attention_fwd_tma_terms_params {
  blockflash_attention_fwd_tma_params fwd;
  blockflash_score_terms terms;
  blockflash_tensor_map bias; /* zeros where kernels read the bias otherwise, or there is none */
} blockflash_attention_fwd_tma_terms_params;

/* Attention backward. */
typedef struct blockflash_attention_bwd_terms_params {
  blockflash_attention_bwd_params bwd;
  blockflash_score_terms terms;
  const int32_t* block_bits_t; /* block_bits beside col_idx of block_mask_t */
  const uint32_t* bits_t;      /* [bit_tiles_t, 128]: each block of `bits` transposed, so that rows
                                  are keys */
  int32_t bit_tiles_t;         /* values of block_bits_t are clamped to them */
} blockflash_attention_bwd_terms_params;

/* Attention backward by CTAs that load tiles by TMA. Their kernels take no bias. */
typedef struct blockflash_attention_bwd_tma_terms_params {
  blockflash_attention_bwd_tma_params bwd;
  blockflash_score_terms terms;
  const int32_t* block_bits_t; /* as above */
  const uint32_t* bits_t;
  int32_t bit_tiles_t;
} blockflash_attention_bwd_tma_terms_params;

/* The gradient of the bias: that of the scores, summed over the axes along which it broadcasts. */
typedef struct blockflash_attention_bwd_bias_params {
  blockflash_attention_bwd_terms_params base;
  void* d_bias; /* [batch, heads, rows, cols] */
  int64_t d_bias_stride_batch, d_bias_stride_head, d_bias_stride_q, d_bias_stride_kv;
  int32_t batch, heads, rows, cols; /* those of the scores, or 1 where the bias broadcasts */
  int32_t d_bias_type;              /* BLOCKFLASH_DTYPE_… */
} blockflash_attention_bwd_bias_params;

#endif

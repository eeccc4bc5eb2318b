/* Parameters of the attention forward kernels. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_FWD_H
#define BLOCKFLASH_PARAMS_ATTENTION_FWD_H

#include <stdint.h>

#include "blockflash/params/base.h"
#include "blockflash/params/block_mask.h"
#include "blockflash/params/scores.h"

/* Attention forward: o = softmax(scores(q·kᵀ))·v for each batch entry and head. */
typedef struct blockflash_attention_fwd_params {
  const void* q; /* [batch, seqlen_q, num_heads_q, head_dim_qk] */
  const void* k; /* [batch, seqlen_kv, num_heads_kv, head_dim_qk] */
  const void* v; /* [batch, seqlen_kv, num_heads_kv, head_dim_v] */
  void* o;       /* [batch, seqlen_q, num_heads_q, head_dim_v] */
  float* lse; /* [batch, num_heads_q, seqlen_q], natural logarithm; may be null. Kernels without the
                 log-sum-exp ignore it */
  const int32_t*
      cu_seqlens_q; /* [batch + 1] offsets into packed queries; null when not variable-length */
  const int32_t*
      cu_seqlens_kv; /* [batch + 1] offsets into packed keys; null exactly when cu_seqlens_q is */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t k_stride_batch, k_stride_seq, k_stride_head;
  int64_t v_stride_batch, v_stride_seq, v_stride_head;
  int64_t o_stride_batch, o_stride_seq, o_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t seqlen_q, seqlen_kv; /* the longest sequence of the batch when variable-length */
  int32_t total_q, total_kv;   /* rows of q and o, and of k and v, when variable-length; offsets are
                                  clamped to them */
  int32_t head_dim_qk, head_dim_v; /* multiples of 8, each at most the tile's */
  blockflash_scores scores;
  blockflash_block_mask block_mask;
} blockflash_attention_fwd_params;

/* Attention forward by persistent CTAs that load tiles by TMA.
 *
 * The maps have the dimensions (head_dim_qk of q and k or head_dim_v of v and o, sequence, head,
 * batch), boxes of 64 columns and 64
 * rows (q), the tile's block_kv rows (k, v) or 16 rows (o), and a swizzle of 128 bytes. Packed
 * sequences are one sequence of a batch of 1. */
typedef struct blockflash_attention_fwd_tma_params {
  blockflash_tensor_map q;
  blockflash_tensor_map k, v; /* zeros when there are no keys */
  blockflash_tensor_map o;
  blockflash_attention_fwd_params base;
  uint32_t* tile_counter;    /* two zeros, left as zeros: {next tile, CTAs that are done}; null: a
                                fixed order of tiles */
  int32_t heads_per_section; /* heads computed together, whose keys and values should fit into L2 */
} blockflash_attention_fwd_tma_params;

#endif

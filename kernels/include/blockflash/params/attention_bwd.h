/* Parameters of the attention backward kernels. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_BWD_H
#define BLOCKFLASH_PARAMS_ATTENTION_BWD_H

#include <stdint.h>

#include "blockflash/params/attention_fwd.h"

/* Attention backward: the gradients of attention forward with the same options.
 *
 * In `base`, o and lse are results of the forward pass and are read. The workspace holds two f32
 * numbers per query and head: -lse·log2(e) (-inf for a query that sees nothing, -2·lse where that
 * is beyond kFusedLimit of exponent.cuh) and delta = rowsum(d_o∘o). Each sequence has room for its
 * length rounded up to 64 rows; packed sequences begin at the multiple of 64 below their first row
 * + 64·(number of the sequence). */
typedef struct blockflash_attention_bwd_params {
  blockflash_attention_fwd_params base;
  const void* d_o;      /* [batch, seqlen_q, num_heads_q, head_dim_v] */
  void* dq;             /* [batch, seqlen_q, num_heads_q, head_dim_qk] */
  void* dk;             /* [batch, seqlen_kv, num_heads_kv, head_dim_qk] */
  void* dv;             /* [batch, seqlen_kv, num_heads_kv, head_dim_v] */
  float* d_sink;        /* [num_heads_q], null exactly when base.scores.sink is */
  float* negative_logs; /* workspace, [batch, num_heads_q, padded rows] */
  float* deltas;        /* the same */
  uint32_t* semaphores; /* workspace, per 64 rows of the statistics: how many blocks of keys have
                      been added to dq; null where dq has a kernel of its own */
  int64_t d_o_stride_batch, d_o_stride_seq, d_o_stride_head;
  int64_t dq_stride_batch, dq_stride_seq, dq_stride_head;
  int64_t dk_stride_batch, dk_stride_seq, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_seq, dv_stride_head;
  int64_t statistics_stride_batch, statistics_stride_head; /* of both arrays of the workspace */
  blockflash_block_mask block_mask_t; /* base.block_mask transposed: rows are blocks of keys,
                                         columns blocks of queries; row_order is ignored */
} blockflash_attention_bwd_params;

/* Attention backward by CTAs that load tiles by TMA. The maps have the dimensions of the forward
 * pass and boxes of 64 columns and 64 rows (q, d_o) or 128 rows (k, v). */
typedef struct blockflash_attention_bwd_tma_params {
  blockflash_tensor_map q, d_o;
  blockflash_tensor_map k, v; /* zeros when there are no keys */
  blockflash_attention_bwd_params base;
  /* For the kernel that computes dq beside dk and dv, in tiles of 64 queries that are in the order
   * of the statistics. */
  float* dq_sums; /* workspace, [tiles, 64·head_dim_qk of the tile] in the kernel's own order */
  uint32_t* tile_counter; /* two zeros, left as zeros: {next block of keys, CTAs that are done} */
  /* Key heads whose blocks of keys start together. Under a mask with a right limit these are the
   * last ones, if there is more than one; before them blocks start head by head, the last first. */
  int32_t heads_per_section;
  /* How many CTAs share the query heads of each block of keys: 1 to those of a group. Beyond 1 each
   * leaves its part of dk and dv in the workspace, and every part counts as a key head above. */
  int32_t head_parts;
  /* Workspace, [batch, num_heads_kv, head_parts, tiles of 64 keys (an even number), dk and dv,
   * 64·head_dim of the tile] in the kernel's own order; null where head_parts is 1. */
  float* key_parts;
} blockflash_attention_bwd_tma_params;

#endif

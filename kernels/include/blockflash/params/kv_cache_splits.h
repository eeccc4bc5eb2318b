/* Parameters of the Hopper kernels for many rows of queries over a cache. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_SPLITS_H
#define BLOCKFLASH_PARAMS_KV_CACHE_SPLITS_H

#include <stdint.h>

#include "blockflash/params/kv_cache.h"

/* How heads and keys are divided, beside what both are.
 *
 * The 64 rows of a warpgroup are queries times the heads of a pack, heads fastest. The heads of q
 * that share a head of k are `packs` packs. The map of q has the dimensions (head_dim_qk, head,
 * row, batch) and boxes of 64 columns, `pack` heads and `pack_queries` queries; o has no map.
 * `cache.fwd.heads_per_section` counts packs.
 *
 * The key tiles that the queries of a tile see are divided into `splits` equal parts, or fewer
 * where lengths are on the device. With more than one, each leaves its output and log-sum-exp in
 * the workspace. */
typedef struct blockflash_attention_cache_split_params {
  blockflash_attention_cache_params cache;
  float* parts;     /* workspace, [splits, batch, seqlen_q, num_heads_q, head_dim_v]; null with one
                       split */
  float* parts_lse; /* workspace, [splits, num_heads_q, batch, seqlen_q], natural logarithm */
  int32_t pack;     /* at most 64, and at most num_heads_q / num_heads_kv */
  int32_t pack_queries; /* 64 / pack */
  int32_t packs;        /* ceil(num_heads_q / num_heads_kv / pack) */
  int32_t splits;       /* at most 32; 1 for packed sequences */
} blockflash_attention_cache_split_params;

/* Combines the splits of a call: o and lse of all keys from those of each split. */
typedef struct blockflash_attention_combine_params {
  const float* parts;     /* as the kernel before it left them */
  const float* parts_lse; /* likewise */
  void* o;                /* [batch, seqlen_q, num_heads_q, head_dim_v] */
  float* lse;             /* [batch, num_heads_q, seqlen_q]; may be null */
  int64_t o_stride_batch, o_stride_seq, o_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, seqlen_q, num_heads_q; /* their product is below 2^31 */
  int32_t lines;      /* rows of a head of a CTA: 1, 2, 4 or 8; the threads of each are at least
                         head_dim_v / 4 */
  int32_t head_dim_v; /* a multiple of 8, at most 512 */
  int32_t splits;     /* at most 32 */
  int32_t o_dtype;    /* BLOCKFLASH_DTYPE_F16 or BLOCKFLASH_DTYPE_BF16 */
} blockflash_attention_combine_params;

#endif

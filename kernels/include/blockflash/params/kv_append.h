/* Parameters of the kernel that appends to a cache and applies rotary embeddings. */
#ifndef BLOCKFLASH_PARAMS_KV_APPEND_H
#define BLOCKFLASH_PARAMS_KV_APPEND_H

#include "blockflash/params/base.h"
#include "blockflash/params/kv_cache.h"

/* Which elements of a row are rotated together. */
#define BLOCKFLASH_ROTARY_HALVES 0      /* i and i + dim / 2 */
#define BLOCKFLASH_ROTARY_INTERLEAVED 1 /* 2i and 2i + 1 */

/* A rotary embedding: pair i of a row at position p is rotated by the angle whose cosine and sine
 * are cos[p, i] and sin[p, i]. */
typedef struct blockflash_rotary {
  const void* cos; /* [positions, dim / 2]; null: rows stay as they are */
  const void* sin;
  int64_t cos_stride, sin_stride; /* of positions */
  int32_t positions;              /* positions of rows are clamped to [0, positions) */
  int32_t dim; /* even, at most head_dim_qk; the elements of a row from there on stay as they are */
  int32_t pairs; /* BLOCKFLASH_ROTARY_… */
  int32_t dtype; /* BLOCKFLASH_DTYPE_… of cos and sin */
} blockflash_rotary;

/* Appends new keys and values to a cache, and rotates new keys and queries by their positions.
 *
 * cache.seqused counts the new keys already. Token i of the n tokens of a sequence, be it a new key
 * or a query, has position seqused - n + i, where seqused may be any number. A new key at a
 * position below 0, or from the capacity on, is dropped. */
typedef struct blockflash_kv_append_params {
  blockflash_kv_cache cache; /* k and v are written; null if nothing is appended */
  const void* k_new; /* [batch, seqlen_new, num_heads_kv, head_dim_qk]; packed: [total_new, …];
                        null: nothing is appended */
  const void* v_new; /* the same with head_dim_v */
  const int32_t* cu_seqlens_new; /* [batch + 1] offsets; null: all sequences have seqlen_new */
  const void* q;  /* [batch, seqlen_q, num_heads_q, head_dim_qk]; packed: [total_q, …]; null: no
                     queries are rotated */
  void* q_turned; /* like q */
  const int32_t* cu_seqlens_q; /* [batch + 1] offsets; null: all sequences have seqlen_q */
  blockflash_rotary rotary_new, rotary_q;
  int64_t k_new_stride_batch, k_new_stride_seq, k_new_stride_head;
  int64_t v_new_stride_batch, v_new_stride_seq, v_new_stride_head;
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t q_turned_stride_batch, q_turned_stride_seq, q_turned_stride_head;
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t head_dim_qk, head_dim_v; /* multiples of 8 */
  int32_t seqlen_new, total_new;   /* when packed, offsets are clamped to total_new rows and to */
  int32_t seqlen_q, total_q;       /* seqlen_new rows of a sequence, and so with q */
} blockflash_kv_append_params;

#endif

/* Parameters of attention of few queries to a cache of 8-bit keys and values. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_SCALED_H
#define BLOCKFLASH_PARAMS_KV_CACHE_SCALED_H

#include <stdint.h>

#include "blockflash/params/base.h"
#include "blockflash/params/kv_cache.h"

/* Element types chosen at run time, of 8 bits: see base.h. */
#define BLOCKFLASH_DTYPE_E4M3 5
#define BLOCKFLASH_DTYPE_E5M2 6
#define BLOCKFLASH_DTYPE_I8 7

/* What the codes of a cache are multiplied with: the scale of key j of sequence b and head h is
 *
 *   k[b · k_stride_sequence + page · k_stride_page + slot · k_stride_slot + h · k_stride_head]
 *
 * with the page and the slot of the key in blockflash_kv_cache. Strides are 0 where all have the
 * same scale; that of sequences or those of pages and slots are. Scales may hold anything. */
typedef struct blockflash_cache_scales {
  const float* k; /* null: 1 */
  const float* v; /* null: 1 */
  int64_t k_stride_sequence, k_stride_page, k_stride_slot, k_stride_head;
  int64_t v_stride_sequence, v_stride_page, v_stride_slot, v_stride_head;
} blockflash_cache_scales;

/* Attention of few queries to the codes of a cache times their scales. */
typedef struct blockflash_attention_decode_scaled_params {
  blockflash_attention_decode_params decode;
  blockflash_cache_scales scales;
  int32_t q_dtype; /* BLOCKFLASH_DTYPE_F16 or _BF16, of q and o */
} blockflash_attention_decode_scaled_params;

#endif

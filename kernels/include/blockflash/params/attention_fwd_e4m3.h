/* Parameters of attention forward with queries, keys and values in e4m3. */
#ifndef BLOCKFLASH_PARAMS_ATTENTION_FWD_E4M3_H
#define BLOCKFLASH_PARAMS_ATTENTION_FWD_E4M3_H

#include <stdint.h>

#include "blockflash/params/attention_fwd.h"

/* What the codes of q, k and v are multiplied with: the scale of sequence b and head h is
 *
 *   k[b · k_stride_batch + h · k_stride_head]
 *
 * where h counts heads of q / q_heads_per_scale, or heads of k and v. Strides are 0 where all have
 * the same scale. Scales may hold anything. */
typedef struct blockflash_operand_scales {
  const float* q; /* null: 1 */
  const float* k; /* null: 1 */
  const float* v; /* null: 1 */
  int64_t q_stride_batch, q_stride_head;
  int64_t k_stride_batch, k_stride_head;
  int64_t v_stride_batch, v_stride_head;
  int32_t q_heads_per_scale; /* heads of q that share a scale of q: 1, or those that share keys */
} blockflash_operand_scales;

/* The maps of q, k and v have elements of a byte and boxes of 128 columns, or of 64 with a swizzle
 * of 64 bytes where the tile has 64; that of o is not used. The element type of o is the kernel's.
 */
typedef struct blockflash_attention_fwd_e4m3_params {
  blockflash_attention_fwd_tma_params fwd;
  blockflash_operand_scales scales;
} blockflash_attention_fwd_e4m3_params;

#endif

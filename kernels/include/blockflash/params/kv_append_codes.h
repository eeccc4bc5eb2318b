/* Parameters of the kernel that appends to a cache of 8-bit codes. */
#ifndef BLOCKFLASH_PARAMS_KV_APPEND_CODES_H
#define BLOCKFLASH_PARAMS_KV_APPEND_CODES_H

#include <stdint.h>

#include "blockflash/params/kv_append.h"
#include "blockflash/params/kv_cache_scaled.h"

/* Appends the codes of new keys and values divided by their scales, after the keys are rotated.
 *
 * A code is the nearest one, with ties to even, and the greatest one beyond it. NaN is 0x7f, and 0
 * as an int8, whose codes are -127 to 127. */
typedef struct blockflash_kv_append_codes_params {
  blockflash_kv_append_params append; /* the cache has 8-bit elements */
  blockflash_cache_scales scales;     /* of the rows that are appended */
  int32_t chooses_k; /* 1: the scales of the new keys, which are one for each slot and head, are */
  int32_t chooses_v; /* written: the greatest magnitude of the row, NaN aside, divided by the
                        greatest code, or 1 if that is 0 */
  int32_t cache_dtype; /* BLOCKFLASH_DTYPE_E4M3, _E5M2 or _I8 */
  int32_t new_dtype;   /* BLOCKFLASH_DTYPE_F16 or _BF16, of k_new and v_new */
  int32_t q_dtype;     /* BLOCKFLASH_DTYPE_F16 or _BF16, of q and q_turned */
} blockflash_kv_append_codes_params;

#endif

/* Parameters of attention to a cache whose values are the first columns of its keys, on Hopper. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_LATENT_H
#define BLOCKFLASH_PARAMS_KV_CACHE_LATENT_H

#include <stdint.h>

#include "blockflash/params/kv_cache_runs.h"

/* In `runs`, the cache has no v, and items are single splits (run is 1).
 *
 * The map of the keys has the dimensions (head_dim_qk, slot, head, page), boxes of 64 columns and
 * `box_rows` slots, which are in one page, and a swizzle of 128 bytes. */
typedef struct blockflash_attention_latent_params {
  blockflash_tensor_map keys;
  blockflash_attention_decode_runs_params runs;
  int32_t box_rows; /* 16, 32 or 64; with several pages per sequence a divisor of page_size */
} blockflash_attention_latent_params;

#endif

/* Parameters of attention of few queries to a cache with score terms. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_TERMS_H
#define BLOCKFLASH_PARAMS_KV_CACHE_TERMS_H

#include "blockflash/params/kv_cache.h"
#include "blockflash/params/score_terms.h"
#include "blockflash/params/tail_mask.h"

/* scale_log2 of the scores is log2(e) where there is a bias or ALiBi, as where scores are
 * capped. */
typedef struct blockflash_attention_decode_terms_params {
  blockflash_attention_decode_params base;
  blockflash_score_terms terms; /* without bits; the keys of the bias are the capacity */
  blockflash_tail_mask tail_mask;
} blockflash_attention_decode_terms_params;

#endif

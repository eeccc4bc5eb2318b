/* Parameters of attention of several queries to a cache on Hopper. */
#ifndef BLOCKFLASH_PARAMS_KV_CACHE_RUNS_H
#define BLOCKFLASH_PARAMS_KV_CACHE_RUNS_H

#include <stdint.h>

#include "blockflash/params/kv_cache.h"
#include "blockflash/params/tail_mask.h"

/* Attention of several queries to the keys of a cache, without lists of pages.
 *
 * An item is a run of `run` splits, which it combines, for one row tile of one key head, and the
 * workspace has a slot for each run. The results of four splits are combined one after another, the
 * results of fours in pairs, and pairs of pairs, always in ascending order, so the length of runs
 * shows in no bit.
 *
 * With even_ctas, splits are also at least as long as those of all sequences should be to occupy as
 * many CTAs evenly (decode/runs.cuh). */
typedef struct blockflash_attention_decode_runs_params {
  blockflash_attention_decode_params base; /* items, partial_rows, …: of runs and their row tiles */
  int32_t run;                             /* splits of an item: 1, 4 or 8 */
  int32_t even_ctas; /* CTAs at a time that share the keys of all sequences, which then have lengths
                        on the device and equally many queries; 0: splits of a sequence follow from
                        its own length */
  blockflash_tail_mask tail_mask;
} blockflash_attention_decode_runs_params;

#endif

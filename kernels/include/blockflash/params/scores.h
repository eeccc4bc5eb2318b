/* What happens to a score of attention: scale, softcap, mask, sink, in this order. */
#ifndef BLOCKFLASH_PARAMS_SCORES_H
#define BLOCKFLASH_PARAMS_SCORES_H

#include <stdint.h>

/* A window side without a limit. */
#define BLOCKFLASH_WINDOW_UNBOUNDED INT32_MAX

/* Which keys a query attends to: query i attends to key j when -left <= j - (i + diagonal) <=
 * right, where diagonal is seqlen_kv - seqlen_q when align_bottom_right is set and 0 otherwise;
 * causal is right = 0. */
typedef struct blockflash_window {
  int32_t left, right;
  int32_t align_bottom_right;
} blockflash_window;

/* The scores q·kᵀ are multiplied by `scale` and capped; those of keys outside the window become
 * -inf; the sink joins the denominator of the softmax. */
typedef struct blockflash_scores {
  const float* sink; /* [num_heads_q] logits without a value; may be null */
  float scale;       /* of the softmax, finite and positive */
  /* Derived from the options on the host. Neighbours are loaded together, so their order decides
   * which of them take registers. */
  float scale_log2;         /* factor of q·k, or of a capped score, in the exponent of 2:
                               log2(e)·scale, or log2(e) with a softcap */
  float inverse_scale_log2; /* 1 / scale_log2 */
  float scale_over_cap;     /* scale / softcap, 0 without a softcap */
  float softcap;            /* 0 turns it off, else scores become softcap·tanh(score / softcap) */
  blockflash_window window;
} blockflash_scores;

#endif

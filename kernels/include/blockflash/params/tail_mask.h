/* Parameters of a mask of the last keys of a sequence, such as a tree of drafted tokens has. */
#ifndef BLOCKFLASH_PARAMS_TAIL_MASK_H
#define BLOCKFLASH_PARAMS_TAIL_MASK_H

#include <stdint.h>

/* Query i of a sequence sees key seqlen_kv - tail + j only where entry j of its row is not 0, and
 * where the window shows it, too. Keys before the tail follow the window alone. Entries of keys
 * below 0 are not read. */
typedef struct blockflash_tail_mask {
  const uint8_t* visible; /* [batch, seqlen_q, tail]; packed [total_q, tail]; null: none */
  int64_t stride_batch;   /* 0 where one entry serves all, and when packed */
  int64_t stride_q;
  int32_t tail; /* from 1 to the capacity of the cache */
} blockflash_tail_mask;

#endif

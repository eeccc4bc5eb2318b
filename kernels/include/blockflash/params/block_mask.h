/* The block mask of attention. */
#ifndef BLOCKFLASH_PARAMS_BLOCK_MASK_H
#define BLOCKFLASH_PARAMS_BLOCK_MASK_H

#include <stdint.h>

/* The blocks of queries × keys that attention visits, in BSR. Block row r of group g has the
 * block columns col_idx[row_ptr[g·(rows + 1) + r]] up to, not including, col_idx[row_ptr[g·(rows
 * + 1) + r + 1]], ascending. A batch entry and head of q belong to the group
 * batch·groups_per_batch + head / heads_per_group.
 *
 * The sequences of a packed batch follow one another in the rows of a group: row i of sequence b
 * is r = cu_rows[b] + i. Rows in row_order and block columns count from the start of their
 * sequence. */
typedef struct blockflash_block_mask {
  const int32_t*
      row_ptr; /* [groups, rows + 1], less than 2^31 entries; null: every block is visited */
  const int32_t* col_idx;
  const int32_t* row_order; /* [groups, rows] order in which the rows of a group or sequence are
                               computed, longest first; null: last first */
  const int32_t* cu_rows; /* [batch + 1] first row of each sequence, then `rows`; null exactly when
                             cu_seqlens are */
  int32_t rows; /* ceil(seqlen_q / block_q); for a packed batch the sum over its sequences */
  int32_t block_q, block_kv; /* multiples of the tile's block_q and block_kv */
  int32_t groups_per_batch;  /* 0: the same for all batch entries, and for a packed batch */
  int32_t heads_per_group;
} blockflash_block_mask;

#endif

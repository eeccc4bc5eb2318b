/* Parameters of the kernel that copies rows. */
#ifndef BLOCKFLASH_PARAMS_ROW_COPY_H
#define BLOCKFLASH_PARAMS_ROW_COPY_H

#include <stdint.h>

#define BLOCKFLASH_ROW_COPIES 4

/* Rows of one tensor to rows of another one. Addresses, pitches and rows are multiples of 16 bytes,
 * and rows of `to` do not overlap. */
typedef struct blockflash_row_copy {
  const void* from;
  void* to;
  int64_t from_pitch, to_pitch; /* bytes between rows */
  int32_t rows;
  int32_t pieces; /* of 16 bytes in a row */
} blockflash_row_copy;

typedef struct blockflash_row_copy_params {
  blockflash_row_copy copies[BLOCKFLASH_ROW_COPIES];
  int32_t count; /* copies, one after another, at least 1 */
} blockflash_row_copy_params;

#endif

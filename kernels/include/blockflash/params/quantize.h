/* Parameters of the kernel that turns rows of attention into codes of 8 bits. */
#ifndef BLOCKFLASH_PARAMS_QUANTIZE_H
#define BLOCKFLASH_PARAMS_QUANTIZE_H

#include <stdint.h>

#include "blockflash/params/base.h"
#include "blockflash/params/kv_cache_scaled.h"

/* What a launch does; a call launches those that it needs, in this order. */
#define BLOCKFLASH_QUANTIZE_SUMS 0     /* the mean of a sequence of one chunk; of others the sums */
                                       /* of each chunk, into the rows of its codes */
#define BLOCKFLASH_QUANTIZE_MEANS 1    /* the mean from those, and zeros where a scale is chosen */
                                       /* for many tokens */
#define BLOCKFLASH_QUANTIZE_GREATEST 2 /* these scales but for 0 */
#define BLOCKFLASH_QUANTIZE_CODES 3    /* codes, the scales of tokens, and 1 in place of scales */
                                       /* that are 0 */

/* Which elements share a scale. */
#define BLOCKFLASH_QUANTIZE_GIVEN 0 /* scales are read */
#define BLOCKFLASH_QUANTIZE_TENSOR 1
#define BLOCKFLASH_QUANTIZE_HEAD 2
#define BLOCKFLASH_QUANTIZE_TOKEN 3

/* Tokens of a chunk. The last one of a sequence has what remains: 128 to 255 tokens, or all of a
 * shorter sequence. */
#define BLOCKFLASH_QUANTIZE_CHUNK 128

/* Rows x[b, token, head] and their codes. Those of a packed batch have no dimension b, and their
 * offsets may hold anything. Scales and means begin with the sequence, scales of tokens are in the
 * layout of rows. */
typedef struct blockflash_quantize_params {
  const void* x;             /* rows at multiples of 16 bytes */
  void* codes;               /* rows at multiples of 8 bytes */
  float* scale;              /* null: nobody takes the scales of tokens */
  float* mean;               /* rows at multiples of 16 bytes; null: none is subtracted */
  const int32_t* cu_seqlens; /* null: not packed */
  int64_t x_stride_batch, x_stride_seq, x_stride_head;
  int64_t codes_stride_batch, codes_stride_seq, codes_stride_head;
  int64_t scale_stride_batch, scale_stride_seq, scale_stride_head;
  int64_t mean_stride_batch, mean_stride_head;
  int32_t batch; /* sequences */
  int32_t num_heads;
  int32_t head_dim;    /* a multiple of 8, at most 256 */
  int32_t seqlen;      /* tokens of a sequence, of the longest one when packed */
  int32_t total;       /* rows of the packed tensors */
  int32_t tokens;      /* of a CTA, where maxima are found and codes are written */
  int32_t step;        /* BLOCKFLASH_QUANTIZE_SUMS, _MEANS, _GREATEST or _CODES */
  int32_t scale_of;    /* BLOCKFLASH_QUANTIZE_GIVEN, _TENSOR, _HEAD or _TOKEN */
  int32_t x_dtype;     /* BLOCKFLASH_DTYPE_F16, _BF16 or _F32 */
  int32_t codes_dtype; /* BLOCKFLASH_DTYPE_E4M3, _E5M2 or _I8 */
  int32_t descending;  /* 1: the last tiles first, which are in L2 behind an ascending launch */
  float rotation;      /* 1 / sqrt(head_dim) if rows are rotated, else 0 */
} blockflash_quantize_params;

#endif

/* Parameters of the kernels for block-sparse matrices. */
#ifndef BLOCKFLASH_PARAMS_BSR_H
#define BLOCKFLASH_PARAMS_BSR_H

#include <stdint.h>

#include "blockflash/params/base.h"

/* Activations of the matmul epilogue. */
#define BLOCKFLASH_ACTIVATION_NONE 0
#define BLOCKFLASH_ACTIVATION_RELU 1
#define BLOCKFLASH_ACTIVATION_GELU 2 /* x·Φ(x), Φ by erf */
#define BLOCKFLASH_ACTIVATION_SILU 3

/* BSR matmul: c = activation(alpha·a·b + beta·c + bias), a block-sparse [m, k], b and c dense.
 *
 * Kernels for a transposed a take the index of the transposed pattern in row_ptr and col_idx and
 * the values unchanged: block i of the index is the transpose of block block_idx[i] of the
 * values. */
typedef struct blockflash_bsr_matmul_params {
  const int32_t* row_ptr; /* [ceil(m / block) + 1] */
  const int32_t* col_idx; /* [nnz_blocks], ascending and unique within a block row */
  const void* values;     /* [nnz_blocks, block, block], rows and columns beyond m and k are zero */
  const int32_t* row_order; /* [ceil(m / block)] order in which block rows are computed: the longest
                               first, or rows that share b together; null: natural */
  const void* b;            /* [k, n] */
  void* c;                  /* [m, n] */
  const void* bias;         /* [m] or [n] in the type of b, see bias_per_row; null: none */
  int64_t ldb, ldc; /* elements between rows of b and of c, or between columns where columns are
                       contiguous */
  int64_t m, n, k;
  int32_t c_dtype;      /* BLOCKFLASH_DTYPE_… */
  int32_t bias_per_row; /* 1: bias[m] is added along a row of c, 0: bias[n] along a column */
  int32_t activation;   /* BLOCKFLASH_ACTIVATION_… */
  int32_t b_vectorized; /* b and ldb allow 16-byte loads */
  int32_t c_vectorized; /* c and ldc allow 16-byte stores */
  float alpha;
  float beta;             /* 0: c is not read */
  int32_t c_column_major; /* 1: columns of c are contiguous; 0 for kernels that write rows only */
} blockflash_bsr_matmul_params;

/* BSR matmul by portable kernels, whose operands are by rows. */
typedef struct blockflash_bsr_matmul_portable_params {
  blockflash_bsr_matmul_params base;
  const int32_t*
      rows; /* [ceil(m / block), 4], 16-byte aligned: the block rows in their order, each
               {index, first block, one past its last block, column of its first block} */
  int32_t values_settled; /* 1: the values were complete before the launch was queued, and nothing
                             in front of it writes them, so they may be read at once */
} blockflash_bsr_matmul_portable_params;

/* BSR matmul with few columns. A strip is the rows of a block row, or 64 of 128. */
typedef struct blockflash_bsr_matmul_narrow_params {
  blockflash_bsr_matmul_params base;
  const int32_t* rows;    /* as for portable kernels */
  int32_t values_settled; /* as for portable kernels */
  int32_t long_strips; /* the first strips in the order of rows, each of which a cluster computes;
                          the CTAs of other clusters have a strip each */
} blockflash_bsr_matmul_narrow_params;

/* The maximum number of splits of a tile of a BSR matmul along K (split-K). */
#define BLOCKFLASH_BSR_SPLITS 8

/* BSR matmul by persistent CTAs that load tiles by TMA. All maps have a swizzle of 128 bytes,
 * except for blocks of 32; the map of a tensor without elements is zeros. */
typedef struct blockflash_bsr_matmul_tma_params {
  blockflash_tensor_map a; /* (block, block, nnz_blocks), boxes of 64 columns and all rows of one
                              block, or 64 rows if a is transposed; each CTA of a cluster loads its
                              share of a box. Filled blocks of 32: boxes of one block, a swizzle of
                              64 bytes. Zeros where small blocks are copied without a map */
  blockflash_tensor_map b; /* whole panels of b, (64, k, n / 64), boxes of block_k rows and all
                              panels of the tile; zeros if n < 64. Column-major: all of b, (k, n,
                              1), boxes of block_k rows and all columns of the tile */
  blockflash_tensor_map
      b_edge; /* (n, k, 1), boxes of 64 columns and block_k rows. Column-major: like b, with boxes
                 of the n % block_n columns of the last tile; zeros if there are none */
  blockflash_tensor_map
      c; /* (n, m), boxes of 64 columns and 16 rows, where c_by_copies is 1; else zeros */
  blockflash_bsr_matmul_params base; /* sizes fit into 31 bits */
  uint32_t* tile_counter;   /* two zeros, left as zeros: {next tile, CTAs that are done}; null: a
                               fixed order of tiles */
  const int32_t* rows;      /* for blocks of 64 and 128, as for portable kernels */
  const int32_t* block_idx; /* [nnz_blocks] index of each block among the values, for kernels that
                               transpose a; else null */
  const int32_t*
      stages; /* [stages, 32, 2] for blocks of 16 and 32, else null: the plan. A stage is the part
                 of b that a group of block rows, neighbours in row_order, reads at a time, with one
                 pair per lane of a warp. Lane r < 16: {the first of the blocks of block row r, a
                 word whose bit i says that one of them is in column i of the stage and whose bits
                 from 8 on are their place among the blocks of the stage}. Lane 16 + i: {column i,
                 0}. Lane 24: {number of columns, number of blocks} */
  const int32_t* group_stages; /* [groups + 1] first stage of each group */
  int32_t c_by_copies; /* 1: c is row-major, 16-byte aligned and of the type of a, and beta is 0 */
  int32_t split_k_steps; /* tiles of more blocks (or stages, where there is a plan) than this are
                         split along K; positive */
  int32_t split_k_begin[BLOCKFLASH_BSR_SPLITS]; /* the order of all splits: [p] counts the tiles of
                                               one column that come before the splits p, which the
                                               longest [p - 1] - [p] tiles of a column may have;
                                               descends to 0. All zeros: no tile is split */
  float* split_k_sums; /* [split_k_begin[0] · tiles along n, tile] sums of all splits except the
                       first, in the register layout of the threads; or null. Counts the tiles of
                       whole clusters */
  uint32_t* split_k_arrived; /* [split_k_begin[0] · tiles along n, consumer warps] zeros, left as
                             zeros; or null */
  int32_t values_settled;    /* as for portable kernels */
} blockflash_bsr_matmul_tma_params;

/* Sampled dense-dense product (SDDMM): values = alpha·a·b + beta·values at the stored blocks of
 * a BSR matrix, a [m, k] and b [k, n] dense, each row- or column-major as the kernel was
 * compiled. The maps have a swizzle of 128 bytes; they are zeros if k is 0. */
typedef struct blockflash_bsr_sddmm_params {
  blockflash_tensor_map a; /* row-major: (k, m), boxes of 64 columns and the rows of a block;
                              column-major: (m, k), boxes of 64 × 64 */
  blockflash_tensor_map b; /* column-major: (k, n), boxes of 64 rows and the columns of a block;
                              row-major: (n, k), boxes of 64 × 64 */
  const int32_t* row_ptr;  /* [ceil(m / block) + 1] */
  const int32_t* col_idx;  /* [nnz_blocks] */
  void*
      values; /* [nnz_blocks, block, block], 16-byte aligned; elements beyond m and n become zero */
  uint32_t* tile_counter; /* two zeros, left as zeros: {next tile, CTAs that are done}; null: a
                             fixed order of tiles */
  int32_t m, n, k;
  int32_t nnz_blocks;
  int32_t values_dtype; /* BLOCKFLASH_DTYPE_… */
  float alpha;
  float beta; /* 0: values are not read */
} blockflash_bsr_sddmm_params;

/* BSR matmul for operands in any layout, chosen at run time. */
typedef struct blockflash_bsr_matmul_any_params {
  blockflash_bsr_matmul_params base;
  const int32_t* block_idx; /* [nnz_blocks] index of each block among the values where a is
                               transposed; else null */
  int32_t a_transposed;     /* 1: each block of the values is a block of the transpose of a */
  int32_t b_column_major;   /* 1: columns of b are contiguous */
} blockflash_bsr_matmul_any_params;

/* Sampled dense-dense product (SDDMM) by kernels that take a and b in every layout: values =
 * alpha·a·b + beta·values, as above. */
typedef struct blockflash_bsr_sddmm_portable_params {
  const int32_t* row_ptr; /* [ceil(m / block) + 1] */
  const int32_t* col_idx; /* [nnz_blocks] */
  const void* a;          /* [m, k] */
  const void* b;          /* [k, n] */
  void* values;           /* [nnz_blocks, block, block]; elements beyond m and n become zero */
  int64_t lda, ldb; /* elements between rows, or between columns where columns are contiguous */
  int32_t m, n, k;
  int32_t a_column_major; /* 1: columns are contiguous, 0: rows */
  int32_t b_column_major;
  int32_t a_vectorized; /* a and lda allow 16-byte loads */
  int32_t b_vectorized;
  int32_t values_vectorized; /* values allow 16-byte stores */
  int32_t values_dtype;      /* BLOCKFLASH_DTYPE_… */
  float alpha;
  float beta; /* 0: values are not read */
} blockflash_bsr_sddmm_portable_params;

#endif

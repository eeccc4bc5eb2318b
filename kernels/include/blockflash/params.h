/* The ABI between host and kernels: one parameter struct per kernel, valid C11 and C++.
 *
 * Strides count elements and are 64-bit; the innermost dimension is contiguous. A struct is
 * passed by value as the only kernel argument. `cargo xtask bindgen` turns this file into
 * crates/blockflash-sys/src/params.rs. */
#ifndef BLOCKFLASH_PARAMS_H
#define BLOCKFLASH_PARAMS_H

#include <stdint.h>

#ifdef __cplusplus
#  define BLOCKFLASH_ALIGNAS(bytes) alignas(bytes)
#else
#  define BLOCKFLASH_ALIGNAS(bytes) _Alignas(bytes)
#endif

/* Element types chosen at run time. */
#define BLOCKFLASH_DTYPE_F16 0
#define BLOCKFLASH_DTYPE_BF16 1
#define BLOCKFLASH_DTYPE_F32 2

/* A window side without a limit. */
#define BLOCKFLASH_WINDOW_UNBOUNDED INT32_MAX

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

/* Attention forward: o = softmax(mask(q·kᵀ · softmax_scale))·v for each batch entry and head.
 *
 * Query i attends key j when -window_left <= j - (i + diagonal) <= window_right, where diagonal is
 * seqlen_kv - seqlen_q when align_bottom_right is set and 0 otherwise; causal is window_right = 0.
 */
typedef struct blockflash_attention_fwd_params {
  const void* q; /* [batch, seqlen_q, num_heads_q, head_dim] */
  const void* k; /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  const void* v; /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  void* o;       /* [batch, seqlen_q, num_heads_q, head_dim] */
  float* lse; /* [batch, num_heads_q, seqlen_q], natural logarithm; may be null. Kernels without the
                 log-sum-exp ignore it */
  const float* sink; /* [num_heads_q] logits that join the denominator; may be null */
  const int32_t*
      cu_seqlens_q; /* [batch + 1] offsets into packed queries; null when not variable-length */
  const int32_t*
      cu_seqlens_kv; /* [batch + 1] offsets into packed keys; null exactly when cu_seqlens_q is */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t k_stride_batch, k_stride_seq, k_stride_head;
  int64_t v_stride_batch, v_stride_seq, v_stride_head;
  int64_t o_stride_batch, o_stride_seq, o_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t seqlen_q, seqlen_kv; /* the longest sequence of the batch when variable-length */
  int32_t total_q, total_kv;   /* rows of q and o, and of k and v, when variable-length; offsets are
                                  clamped to them */
  int32_t head_dim;            /* multiple of 8, at most the tile's head_dim */
  int32_t window_left, window_right;
  int32_t align_bottom_right;
  float softmax_scale; /* finite and positive */
  float softcap;       /* 0 turns it off, else scores become softcap·tanh(score / softcap) */
  blockflash_block_mask block_mask;
} blockflash_attention_fwd_params;

/* Attention backward: the gradients of attention forward with the same options.
 *
 * In `base`, o and lse are results of the forward pass and are read. The workspace holds two f32
 * numbers per query and head: -lse·log2(e) (-inf for a query that sees nothing) and
 * delta = rowsum(d_o∘o). Each sequence has room for its length rounded up to 64 rows; packed
 * sequences begin at the multiple of 64 below their first row + 64·(number of the sequence). */
typedef struct blockflash_attention_bwd_params {
  blockflash_attention_fwd_params base;
  const void* d_o;      /* [batch, seqlen_q, num_heads_q, head_dim] */
  void* dq;             /* [batch, seqlen_q, num_heads_q, head_dim] */
  void* dk;             /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  void* dv;             /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  float* d_sink;        /* [num_heads_q], null exactly when base.sink is */
  float* negative_logs; /* workspace, [batch, num_heads_q, padded rows] */
  float* deltas;        /* the same */
  uint32_t* turns; /* workspace, per 64 rows of the statistics: how many blocks of keys have been
                      added to dq; null where dq has a kernel of its own */
  int64_t d_o_stride_batch, d_o_stride_seq, d_o_stride_head;
  int64_t dq_stride_batch, dq_stride_seq, dq_stride_head;
  int64_t dk_stride_batch, dk_stride_seq, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_seq, dv_stride_head;
  int64_t statistics_stride_batch, statistics_stride_head; /* of both arrays of the workspace */
  blockflash_block_mask block_mask_t; /* base.block_mask transposed: rows are blocks of keys,
                                         columns blocks of queries; row_order is ignored */
} blockflash_attention_bwd_params;

#include "cache_params.h"

/* A tensor map of the Tensor Memory Accelerator (CUtensorMap), encoded by the driver. */
typedef struct blockflash_tensor_map {
  BLOCKFLASH_ALIGNAS(64) uint64_t opaque[16];
} blockflash_tensor_map;

/* Attention forward by persistent CTAs that load tiles by TMA.
 *
 * The maps have the dimensions (head_dim, sequence, head, batch), boxes of 64 columns and 64
 * rows (q), the tile's block_kv rows (k, v) or 16 rows (o), and a swizzle of 128 bytes. Packed
 * sequences are one sequence of a batch of 1. */
typedef struct blockflash_attention_fwd_tma_params {
  blockflash_tensor_map q;
  blockflash_tensor_map k, v; /* zeros when there are no keys */
  blockflash_tensor_map o;
  blockflash_attention_fwd_params base;
  uint32_t* tile_counter;    /* two zeros, left as zeros: {next tile, CTAs that are done}; null: a
                                fixed order of tiles */
  int32_t heads_per_section; /* heads computed together, whose keys and values should fit into L2 */
  float scale_log2; /* factor of the score in the exponent of 2: log2(e)·softmax_scale, or log2(e)
                       after a softcap */
  float inverse_scale_log2; /* 1 / scale_log2 */
  float scale_over_cap;     /* softmax_scale / softcap, 0 without a cap */
} blockflash_attention_fwd_tma_params;

/* Attention backward by CTAs that load tiles by TMA. The maps have the dimensions of the forward
 * pass and boxes of 64 columns and 64 rows (q, d_o) or 128 rows (k, v). */
typedef struct blockflash_attention_bwd_tma_params {
  blockflash_tensor_map q, d_o;
  blockflash_tensor_map k, v; /* zeros when there are no keys */
  blockflash_attention_bwd_params base;
  /* For the kernel that computes dq beside dk and dv, in tiles of 64 queries that lie in the order
   * of the statistics. */
  float* dq_sums; /* workspace, [tiles, 64·head_dim of the tile] in the kernel's own order */
  uint32_t* tile_counter; /* two zeros, left as zeros: {next block of keys, CTAs that are done} */
  int32_t heads_per_section; /* key heads whose blocks of keys start together */
} blockflash_attention_bwd_tma_params;

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

/* The maximum number of parts into which a tile of a BSR matmul is split along K. */
#define BLOCKFLASH_BSR_PARTS 8

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
  int32_t part_steps; /* tiles of more blocks (or stages, where there is a plan) than this are split
                         into parts; positive */
  int32_t part_begin[BLOCKFLASH_BSR_PARTS]; /* the order of all parts: [p] counts the tiles of one
                                               column that come before the parts p, which the
                                               longest [p - 1] - [p] tiles of a column may have;
                                               descends to 0. All zeros: no tile is split */
  float*
      part_sums; /* [part_begin[0] · tiles along n, tile] sums of all parts except the first, in the
                    register layout of the threads; or null. Counts the tiles of whole clusters */
  uint32_t* part_arrived; /* [part_begin[0] · tiles along n, consumer warps] zeros, left as zeros;
                             or null */
} blockflash_bsr_matmul_tma_params;

/* The unit that a probe keeps busy. */
#define BLOCKFLASH_PROBE_MMA_F16 0
#define BLOCKFLASH_PROBE_MMA_BF16 1
#define BLOCKFLASH_PROBE_MMA_E4M3 2
#define BLOCKFLASH_PROBE_EXP2 3
#define BLOCKFLASH_PROBE_READ 4
#define BLOCKFLASH_PROBE_COPY 5
#define BLOCKFLASH_PROBE_WGMMA_F16 6
#define BLOCKFLASH_PROBE_WGMMA_BF16 7
#define BLOCKFLASH_PROBE_WGMMA_E4M3 8
#define BLOCKFLASH_PROBE_BULK 9

/* Probe: one unit of the GPU at its peak rate, as a ceiling for measurements. */
typedef struct blockflash_probe_params {
  const void* input;  /* [bytes]; matrix probes multiply its beginning */
  void* output;       /* 4 bytes per thread of the grid; [bytes] for a copy */
  int64_t bytes;      /* a multiple of 16384, at least 65536 */
  int32_t iterations; /* of the inner loop, or passes over the input */
} blockflash_probe_params;

/* Sources of a block mask. */
#define BLOCKFLASH_BLOCK_SOURCE_BOOL \
  0 /* uint8_t [batch, heads, rows, cols]: nonzero blocks are visited */
#define BLOCKFLASH_BLOCK_SOURCE_LISTS \
  1 /* int32_t [batch, heads, rows, k]: columns in any order, -1 for none */
#define BLOCKFLASH_BLOCK_SOURCE_SCORES                                                             \
  2 /* float [batch, heads, rows, cols]: the k largest scores among the blocks that the token mask \
       does not hide entirely */

/* Steps of building a block mask: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_MASK_CHOOSE 0 /* source to bits, lengths and slab_lengths */
#define BLOCKFLASH_BLOCK_MASK_LIST 1   /* these to row_ptr, col_idx and row_order */

/* Problems with a row that are found while a mask is built. */
#define BLOCKFLASH_BLOCK_PROBLEM_NO_COLUMN \
  0 /* a list has a column that does not exist, which is left out */
#define BLOCKFLASH_BLOCK_PROBLEM_TWICE 1 /* a list has a column twice, which counts once */
#define BLOCKFLASH_BLOCK_PROBLEM_NAN 2   /* a score is NaN and is never chosen */
#define BLOCKFLASH_BLOCK_PROBLEM_CAPACITY \
  3 /* col_idx has no room for the columns from this position on, nor for later rows */

/* Block mask: the source's blocks and the blocks of `always`, without the blocks that the token
 * mask hides entirely, as index arrays in BSR.
 *
 * Row r of a batch entry and head is row (batch·heads + head)·rows + r of all rows. A slab is as
 * many neighbouring rows of one head as a CTA has warps; the last slab of a head may have fewer. */
typedef struct blockflash_block_mask_build_params {
  const void* source;
  blockflash_block_mask always; /* visited whatever the source says; none if row_ptr is null */
  uint32_t* bits;   /* [batch, heads, rows, ceil(cols / 32)] columns of each row, the first in the
                       lowest bit */
  int32_t* lengths; /* [batch, heads, rows] columns of each row, whatever the capacity */
  int32_t* slab_lengths; /* [batch, heads, slabs] sums of lengths */
  int32_t* row_ptr;      /* [batch, heads, rows + 1] */
  int32_t* col_idx;      /* [capacity] */
  int32_t* row_order;    /* [batch, heads, rows] rows by descending length, the last one first among
                            equally long rows */
  uint64_t* problems;    /* [2], lowered by every launch: {row << 33 | position << 2 | problem,
                            ~(number of blocks that col_idx would have to hold)} */
  int32_t step;          /* BLOCKFLASH_BLOCK_MASK_… */
  int32_t source_kind;   /* BLOCKFLASH_BLOCK_SOURCE_… */
  int32_t k;             /* unused for booleans */
  int32_t batch, heads, rows, cols;
  int32_t capacity;
  int32_t seqlen_q, seqlen_kv, block_q, block_kv;
  int32_t window_left, window_right; /* the token mask, as for attention */
  int32_t align_bottom_right;
} blockflash_block_mask_build_params;

/* Steps of transposing a block mask: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_MASK_GATHER 0 /* row_ptr and col_idx to bits and counts */
#define BLOCKFLASH_BLOCK_MASK_LIST_T 1 /* these to row_ptr_t and col_idx_t */

/* The transpose of a block mask: for each block column the block rows that visit it, in BSR.
 *
 * A slab is as many neighbouring rows of one head as the tile says, a strip 32 neighbouring
 * columns; the last ones may have fewer. A head's part of col_idx_t starts where that of col_idx
 * does. */
typedef struct blockflash_block_mask_transpose_params {
  const int32_t* row_ptr; /* [batch, heads, rows + 1] */
  const int32_t* col_idx; /* columns that do not exist are left out */
  uint32_t* bits;         /* [batch, heads, ceil(rows / 32), 32·strips] rows of each column, 32 per
                             word, the first in the lowest bit; 16-byte aligned */
  int32_t* counts;        /* [batch, heads, strips, slabs] visited blocks */
  int32_t* row_ptr_t;     /* [batch, heads, cols + 1] */
  int32_t* col_idx_t;     /* [capacity] rows of each column, ascending */
  int32_t step;           /* BLOCKFLASH_BLOCK_MASK_… */
  int32_t batch, heads, rows, cols;
  int32_t capacity;
} blockflash_block_mask_transpose_params;

/* Steps of scoring blocks: one launch each, in this order. */
#define BLOCKFLASH_BLOCK_SCORES_MEANS 0    /* q and k to q_means and k_means */
#define BLOCKFLASH_BLOCK_SCORES_PRODUCTS 1 /* these to scores */

/* Scores of blocks: the mean query of each block row times the mean key of each block column. */
typedef struct blockflash_block_scores_params {
  const void* q;  /* [batch, seqlen_q, num_heads_q, head_dim] */
  const void* k;  /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  float* q_means; /* [batch, num_heads_q, rows, head_dim] */
  float* k_means; /* [batch, num_heads_kv, cols, head_dim] */
  float* scores;  /* [batch, num_heads_q, rows, cols] */
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t k_stride_batch, k_stride_seq, k_stride_head;
  int32_t step; /* BLOCKFLASH_BLOCK_SCORES_… */
  int32_t batch, num_heads_q, num_heads_kv;
  int32_t seqlen_q, seqlen_kv, block_q, block_kv;
  int32_t rows, cols; /* ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv) */
  int32_t head_dim;   /* a multiple of 8, at most 256 */
} blockflash_block_scores_params;

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

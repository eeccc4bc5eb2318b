// Turns the VARIANT_* macros of a manifest row into one constexpr struct. No other file reads them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "blockflash/params.h"

namespace blockflash {

template <int dtype>
struct ElementOf;
template <>
struct ElementOf<BLOCKFLASH_DTYPE_F16> {
  using type = __half;
};
template <>
struct ElementOf<BLOCKFLASH_DTYPE_BF16> {
  using type = __nv_bfloat16;
};

constexpr int kWarpSize = 32;

#ifdef VARIANT_STREAM_ROWS
struct AttentionBwdHopperConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_HEAD_DIM;
  static constexpr int resident_rows = VARIANT_RESIDENT_ROWS;  // of the tiles that a CTA keeps
  static constexpr int stream_rows = VARIANT_STREAM_ROWS;      // of the tiles that pass through
  static constexpr int stages = VARIANT_STAGES;                // of K or Q
  static constexpr int second_stages = VARIANT_SECOND_STAGES;  // of V or dO
  static constexpr bool dq = VARIANT_DQ;  // whether dq is computed beside dk and dv
  static constexpr int warpgroups = 2;    // consumers; plus one producer
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_WARPGROUPS)
struct AttentionFwdHopperConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_HEAD_DIM;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int warpgroups =
      VARIANT_WARPGROUPS;  // consumers, 64 queries each; plus one producer
  static constexpr int heads =
      VARIANT_HEADS;  // heads that share the keys of a tile: 1, or one per warpgroup
  static constexpr int block_q = 64 * warpgroups / heads;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int q_stages = VARIANT_Q_STAGES;
  static constexpr bool q_in_registers = VARIANT_Q_IN_REGISTERS;
  static constexpr bool lse = VARIANT_LSE;  // whether the log-sum-exp is computed
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_DECODE_ROWS)
struct AttentionDecodeConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_HEAD_DIM;
  static constexpr int rows = VARIANT_DECODE_ROWS;  // queries times heads that share keys
  static constexpr int warps = VARIANT_WARPS;       // each with keys and a ring of its own
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_HEAD_DIM)
struct AttentionPortableConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_HEAD_DIM;
  static constexpr int block_q = VARIANT_BLOCK_Q;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int warps = VARIANT_WARPS;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_WARPS_D
struct AttentionBwdKvConfig : AttentionPortableConfig {
  static constexpr int warps_d = VARIANT_WARPS_D;  // warps that share the keys and divide head_dim
};
#endif

#ifdef VARIANT_SUMS_HEAD_DIM
struct AttentionBwdSumsConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_SUMS_HEAD_DIM;
};
#endif

#ifdef VARIANT_STEP
struct AttentionDeltaConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int step =
      VARIANT_STEP;  // 0: row statistics, 1: gradient of the sinks, 2: zeros
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_MERGE_COLUMNS
struct AttentionMergeConfig {
  static constexpr int columns = VARIANT_MERGE_COLUMNS;  // of o, per thread
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_BLOCK_SIZE
using BsrMatmulElement = ElementOf<VARIANT_DTYPE>::type;
#endif

#ifdef VARIANT_CONSUMER_WARPGROUPS
struct BsrMatmulHopperConfig {
  using Element = BsrMatmulElement;
  static constexpr int block_size = VARIANT_BLOCK_SIZE;
  static constexpr int block_n = VARIANT_BLOCK_N;
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int block_rows = VARIANT_BLOCK_ROWS;  // block rows of a tile
  static constexpr int cluster = VARIANT_CLUSTER;        // CTAs that share A
  static constexpr bool a_transposed =
      VARIANT_A_TRANSPOSED;  // the values are blocks of the transpose
  static constexpr bool b_column_major = VARIANT_B_COLUMN_MAJOR;
  static constexpr int warpgroups = VARIANT_CONSUMER_WARPGROUPS;  // consumers; plus one producer
  static constexpr int stage_blocks =
      VARIANT_STAGE_BLOCKS;  // blocks of A in a stage of the plan, where blocks are small
  static constexpr bool filled =
      VARIANT_FILLED;  // small blocks are filled up to 64 rows with zeros
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_BLOCK_SIZE)
struct BsrMatmulConfig {
  using Element = BsrMatmulElement;
  static constexpr int block_size = VARIANT_BLOCK_SIZE;
  static constexpr int block_n = VARIANT_BLOCK_N;
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int warps_m = VARIANT_WARPS_M;
  static constexpr int warps_n = VARIANT_WARPS_N;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps_m * warps_n * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_SLAB_ROWS
struct BlockMaskConfig {
  static constexpr int slab_rows = VARIANT_SLAB_ROWS;
  static constexpr int threads = VARIANT_THREADS;
  static_assert(threads == slab_rows * kWarpSize, "each warp builds one row of the mask");
};
#endif

#ifdef VARIANT_TRANSPOSE_ROWS
struct BlockMaskTransposeConfig {
  static constexpr int slab_rows = VARIANT_TRANSPOSE_ROWS;   // of one head, per CTA
  static constexpr int chunk_cols = VARIANT_TRANSPOSE_COLS;  // whose bits are in shared memory
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_SCORE_TILE
struct BlockScoresConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int tile = VARIANT_SCORE_TILE;
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_SDDMM_COLUMNS
struct BsrSddmmPortableConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int block_size = VARIANT_SDDMM_BLOCK_SIZE;
  static constexpr int columns =
      VARIANT_SDDMM_COLUMNS;  // of a tile: neighbouring blocks side by side
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int warps_m = VARIANT_WARPS_M;
  static constexpr int warps_n = VARIANT_WARPS_N;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps_m * warps_n * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_SDDMM_BLOCK_SIZE)
struct BsrSddmmConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int block_size = VARIANT_SDDMM_BLOCK_SIZE;
  static constexpr int blocks = VARIANT_SDDMM_BLOCKS;  // of a tile, side by side
  static constexpr bool a_column_major = VARIANT_A_COLUMN_MAJOR;
  static constexpr bool b_column_major = VARIANT_B_COLUMN_MAJOR;
  static constexpr int warpgroups = 2;  // consumers; plus one producer
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_PROBE
struct ProbeConfig {
  static constexpr int probe = VARIANT_PROBE;
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};
#endif

}  // namespace blockflash

// The head of a kernel definition: its name and resources come from the row.
#define BLOCKFLASH_KERNEL \
  extern "C" __global__ void __launch_bounds__(VARIANT_THREADS, VARIANT_MIN_BLOCKS) VARIANT_SYMBOL

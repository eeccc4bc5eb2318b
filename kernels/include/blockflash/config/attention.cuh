// Configurations of the kernels of attention forward and backward.
#pragma once

#include "blockflash/config/attention_tile.cuh"

namespace blockflash {

#ifdef VARIANT_STREAM_ROWS
struct AttentionBwdHopperConfig : AttentionTileConfig {
  static constexpr int resident_rows = VARIANT_RESIDENT_ROWS;  // of the tiles that a CTA keeps
  static constexpr int stream_rows = VARIANT_STREAM_ROWS;      // of the tiles that pass through
  static constexpr int stages = VARIANT_STAGES;                // of K or Q
  static constexpr int second_stages = VARIANT_SECOND_STAGES;  // of V or dO
  static constexpr bool dq = VARIANT_DQ;  // whether dq is computed beside dk and dv
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int warpgroups = threads / 128 - 1;   // consumers; plus one producer
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == 384 || threads == 256, "there are two consumers, or one");
};
#elif defined(VARIANT_WARPGROUPS)
struct AttentionFwdHopperConfig : AttentionTileConfig {
  static constexpr int block_rows = VARIANT_BLOCK_ROWS;           // block rows of a CTA
  static constexpr int block_kv = VARIANT_BLOCK_KV * block_rows;  // keys of a step
  static constexpr int warpgroups =
      VARIANT_WARPGROUPS;  // consumers, 64 queries each; plus one producer
  static constexpr int heads =
      VARIANT_HEADS;  // heads that share the keys of a tile: 1, or one per warpgroup
  static constexpr int block_q = 64 * warpgroups / (heads * block_rows);
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int q_stages = VARIANT_Q_STAGES;
  static constexpr bool q_in_registers = VARIANT_Q_IN_REGISTERS;
  static constexpr bool lse = VARIANT_LSE;      // whether the log-sum-exp is computed
  static constexpr bool cache = VARIANT_CACHE;  // whether keys are in the pages of a cache
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_HEAD_DIM_QK)
struct AttentionPortableConfig : AttentionTileConfig {
  static constexpr int block_q = VARIANT_BLOCK_Q;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int warps = VARIANT_WARPS;
#  ifdef VARIANT_SPLIT
  static constexpr int split = VARIANT_SPLIT;  // warps that share the rows
#  endif
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
struct AttentionBwdSumsConfig : AttentionElements {
  static constexpr int head_dim = VARIANT_SUMS_HEAD_DIM;  // of q and k
};
#endif

#ifdef VARIANT_STEP
struct AttentionDeltaConfig : AttentionElements {
  static constexpr int step =
      VARIANT_STEP;  // 0: row statistics, 1: gradient of the sinks, 2: zeros
  static constexpr int threads = VARIANT_THREADS;
};
#endif

}  // namespace blockflash

// Configuration of the persistent kernels of attention forward for Hopper, whose values may have
// another head dimension than queries and keys.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct AttentionHopperConfig {
  using Element = ElementOf<VARIANT_TYPE_Q>::type;
  static_assert(VARIANT_TYPE_Q == VARIANT_TYPE_KV && VARIANT_TYPE_Q == VARIANT_TYPE_O,
                "these kernels have one element type");
  // Of the tile. Those of a problem are at most these.
  static constexpr int head_dim_qk = VARIANT_HEAD_DIM_QK, head_dim_v = VARIANT_HEAD_DIM_V;
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

}  // namespace blockflash

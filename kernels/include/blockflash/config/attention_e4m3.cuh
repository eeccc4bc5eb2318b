// Configuration of the kernels of attention forward in e4m3.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct AttentionFwdE4m3Config {
  using Output = ElementOf<VARIANT_TYPE_O>::type;
  static constexpr int head_dim = VARIANT_HEAD_DIM_QK;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int warpgroups = VARIANT_WARPGROUPS;  // consumers, 64 queries each
  static constexpr int block_q = 64 * warpgroups;
  static constexpr int stages = VARIANT_STAGES;                // of K
  static constexpr int loaded_stages = VARIANT_LOADED_STAGES;  // of V as it is in memory
  static constexpr int turned_stages = VARIANT_TURNED_STAGES;  // of V transposed
  static constexpr int q_stages = VARIANT_Q_STAGES;
  static constexpr bool q_in_registers = VARIANT_Q_IN_REGISTERS;
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
  static_assert(VARIANT_HEAD_DIM_V == head_dim, "tiles of these kernels have one head dimension");
};

}  // namespace blockflash

// Configuration of the kernels of attention forward for small grids.
#pragma once

#include "blockflash/config/attention_tile.cuh"

namespace blockflash {

struct AttentionSmallConfig : AttentionTileConfig {
  static constexpr int block_q = VARIANT_BLOCK_Q;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int warpgroups = VARIANT_WARPGROUPS;  // they divide the key tiles
  static constexpr int stages = VARIANT_STAGES;          // of K and of V, for each warpgroup
  static constexpr int threads = 128 * warpgroups;
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};

}  // namespace blockflash

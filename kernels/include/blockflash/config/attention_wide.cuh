// Configuration of the kernels of attention forward for head dimensions beyond 256.
#pragma once

#include "blockflash/config/attention_tile.cuh"

namespace blockflash {

struct AttentionWideConfig : AttentionTileConfig {
  static constexpr int block_q = VARIANT_BLOCK_Q;
  static constexpr int block_kv = VARIANT_BLOCK_KV;
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};

}  // namespace blockflash

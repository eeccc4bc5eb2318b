// Configuration of the kernels of attention to listed keys for Hopper.
#pragma once

#include "blockflash/config/attention_tile.cuh"

namespace blockflash {

struct AttentionIndexHopperConfig : AttentionTileConfig {
  static constexpr int step_keys = VARIANT_STEP_KEYS;
  static constexpr int stages = VARIANT_STAGES;  // of keys, and of values
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == 384, "there are two warpgroups of consumers and one of producers");
};

}  // namespace blockflash

// Configuration of the kernels of attention over a cache whose values are the first columns of the
// keys.
#pragma once

#include "blockflash/config/attention_tile.cuh"
#include "blockflash/config/index_lists.cuh"

namespace blockflash {

struct AttentionLatentConfig : AttentionElements {
  static constexpr int rows = VARIANT_LATENT_ROWS;        // queries times heads
  static constexpr int columns = VARIANT_LATENT_COLUMNS;  // of keys
  static constexpr int values = VARIANT_LATENT_VALUES;    // and of values, the first of them
  static constexpr int warps = VARIANT_WARPS;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static constexpr bool has_lists = kHasIndex;  // that name the keys of each query
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
  static_assert(values <= columns, "values are columns of the keys");
};

}  // namespace blockflash

// Configurations of the kernels of attention over a cache, and of merging partial results.
#pragma once

#include "blockflash/config/attention_tile.cuh"

namespace blockflash {

#ifdef VARIANT_DECODE_ROWS
struct AttentionDecodeConfig : AttentionTileConfig {
  static constexpr int rows = VARIANT_DECODE_ROWS;  // queries times heads that share keys
  static constexpr int warps = VARIANT_WARPS;       // each with keys and a ring of its own
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_MERGE_COLUMNS
struct AttentionMergeConfig {
  static constexpr int columns = VARIANT_MERGE_COLUMNS;  // of o, per thread
  static constexpr int threads = VARIANT_THREADS;
};
#endif

}  // namespace blockflash

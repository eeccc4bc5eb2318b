// Configurations of the kernels of attention over a cache whose items are runs of splits.
#pragma once

#include "blockflash/config/index_lists.cuh"
#include "blockflash/config/kv_cache.cuh"

namespace blockflash {

#ifdef VARIANT_RUN_ROWS
// Of a cache whose values are the first columns of its keys.
struct CacheRunsConfig : AttentionElements {
  static constexpr int rows = VARIANT_RUN_ROWS;  // queries times heads
  static constexpr int head_dim_qk = VARIANT_RUN_COLUMNS, head_dim_v = VARIANT_RUN_VALUES;
  static constexpr int head_dim = head_dim_v;
  static constexpr int warps = VARIANT_WARPS, threads = warps * kWarpSize;
  static constexpr int team = threads - 128;    // all but a warpgroup that loads
  static constexpr int end_keys = 512;          // that take as long as the end of an item
  static constexpr bool splits_longest = true;  // equal parts of the longest sequence are a choice
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static constexpr bool has_lists = kHasIndex;  // that name the keys of each query
  static_assert(head_dim_v <= head_dim_qk, "values are the first columns of keys");
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#else
struct CacheRunsConfig : AttentionDecodeConfig {
  static constexpr int team = threads;  // that end an item
  static constexpr int end_keys = 65536 / head_dim;
  static constexpr bool splits_longest = false;
};
#endif

}  // namespace blockflash

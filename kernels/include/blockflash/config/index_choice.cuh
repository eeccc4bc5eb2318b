// Configurations of the kernels that score blocks of keys and choose the largest scores.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_INDEX_COLUMNS
struct IndexScoresConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int head_dim = VARIANT_INDEX_COLUMNS;
  // Whether the columns of a product are the heads of one query and group, not queries and groups.
  static constexpr bool is_wide = VARIANT_INDEX_WIDE != 0;
  static constexpr int warps = VARIANT_WARPS;
  static constexpr int stages = VARIANT_STAGES;  // of 32 rows of queries
  static constexpr int threads = warps * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_TOP_K_HELD
struct TopKConfig {
  static constexpr bool is_of_warps = VARIANT_TOP_K_WARPS != 0;  // a row for each warp
  static constexpr int held = VARIANT_TOP_K_HELD;  // scores in shared memory, of a warp or of all
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};
#endif

}  // namespace blockflash

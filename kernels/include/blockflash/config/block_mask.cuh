// Configurations of the kernels of block masks.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_SLAB_ROWS
struct BlockMaskConfig {
  static constexpr int slab_rows = VARIANT_SLAB_ROWS;
  static constexpr int threads = VARIANT_THREADS;
  static_assert(threads == slab_rows * kWarpSize, "each warp builds one row of the mask");
};
#endif

#ifdef VARIANT_TRANSPOSE_ROWS
struct BlockMaskTransposeConfig {
  static constexpr int slab_rows = VARIANT_TRANSPOSE_ROWS;   // of one head, per CTA
  static constexpr int chunk_cols = VARIANT_TRANSPOSE_COLS;  // whose bits are in shared memory
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_SCORE_TILE
struct BlockScoresConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int tile = VARIANT_SCORE_TILE;
  static constexpr int threads = VARIANT_THREADS;
};
#endif

}  // namespace blockflash

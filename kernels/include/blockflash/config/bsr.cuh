// Configurations of the kernels of products with block-sparse matrices.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_BLOCK_SIZE
using BsrMatmulElement = ElementOf<VARIANT_DTYPE>::type;
#endif

#ifdef VARIANT_CONSUMER_WARPGROUPS
struct BsrMatmulHopperConfig {
  using Element = BsrMatmulElement;
  static constexpr int block_size = VARIANT_BLOCK_SIZE;
  static constexpr int block_n = VARIANT_BLOCK_N;
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int block_rows = VARIANT_BLOCK_ROWS;  // block rows of a tile
  static constexpr int cluster = VARIANT_CLUSTER;        // CTAs that share A
  static constexpr bool a_transposed =
      VARIANT_A_TRANSPOSED;  // the values are blocks of the transpose
  static constexpr bool b_column_major = VARIANT_B_COLUMN_MAJOR;
  static constexpr int warpgroups = VARIANT_CONSUMER_WARPGROUPS;  // consumers; plus one producer
  static constexpr int stage_blocks =
      VARIANT_STAGE_BLOCKS;  // blocks of A in a stage of the plan, where blocks are small
  static constexpr bool filled =
      VARIANT_FILLED;  // small blocks are filled up to 64 rows with zeros
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int ctas = VARIANT_MIN_BLOCKS;  // CTAs that share an SM
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_NARROW)
struct BsrMatmulNarrowConfig {
  using Element = BsrMatmulElement;
  static constexpr int block_size = VARIANT_BLOCK_SIZE;
  static constexpr int block_n = VARIANT_BLOCK_N;
  static constexpr int threads = VARIANT_THREADS, warps = threads / kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};
#elif defined(VARIANT_BLOCK_SIZE)
struct BsrMatmulConfig {
  using Element = BsrMatmulElement;
  static constexpr int block_size = VARIANT_BLOCK_SIZE;
  static constexpr int block_n = VARIANT_BLOCK_N;
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int warps_m = VARIANT_WARPS_M;
  static constexpr int warps_n = VARIANT_WARPS_N;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps_m * warps_n * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

#ifdef VARIANT_SDDMM_COLUMNS
struct BsrSddmmPortableConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int block_size = VARIANT_SDDMM_BLOCK_SIZE;
  static constexpr int columns =
      VARIANT_SDDMM_COLUMNS;  // of a tile: neighbouring blocks side by side
  static constexpr int block_k = VARIANT_BLOCK_K;
  static constexpr int warps_m = VARIANT_WARPS_M;
  static constexpr int warps_n = VARIANT_WARPS_N;
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = warps_m * warps_n * kWarpSize;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#elif defined(VARIANT_SDDMM_BLOCK_SIZE)
struct BsrSddmmConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int block_size = VARIANT_SDDMM_BLOCK_SIZE;
  static constexpr int blocks = VARIANT_SDDMM_BLOCKS;  // of a tile, side by side
  static constexpr bool a_column_major = VARIANT_A_COLUMN_MAJOR;
  static constexpr bool b_column_major = VARIANT_B_COLUMN_MAJOR;
  static constexpr int warpgroups = 2;  // consumers; plus one producer
  static constexpr int stages = VARIANT_STAGES;
  static constexpr int threads = 128 * (warpgroups + 1);
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == VARIANT_THREADS, "the manifest row and the kernel disagree on threads");
};
#endif

}  // namespace blockflash

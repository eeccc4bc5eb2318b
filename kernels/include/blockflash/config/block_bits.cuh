// Configuration of the kernel that makes bits of partial blocks.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct BlockBitsConfig {
  static constexpr int max_tiles = VARIANT_MAX_TILES;  // of 64 × 64 pairs, in a block
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};

}  // namespace blockflash

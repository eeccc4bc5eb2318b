// Configuration of the kernel that unites the lists of neighbouring queries.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct IndexUnionConfig {
  // In shared memory: members of the blocks of a window, and a bit for each entry of the lists.
  static constexpr int words = VARIANT_UNION_WORDS;
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};

}  // namespace blockflash

// Configuration of the kernel that appends to a cache of 8-bit codes.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct KvAppendCodesConfig {
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};

}  // namespace blockflash

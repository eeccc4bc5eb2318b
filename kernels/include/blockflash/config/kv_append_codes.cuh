// Configuration of the kernel that appends to a cache of 8-bit codes.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct KvAppendCodesConfig {
  static constexpr int threads = VARIANT_THREADS;
};

}  // namespace blockflash

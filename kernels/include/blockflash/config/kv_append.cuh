// Configuration of the kernel that appends to a cache.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct KvAppendConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int threads = VARIANT_THREADS;
};

}  // namespace blockflash

// Configuration of the kernel that copies rows.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct RowCopyConfig {
  static constexpr int threads = VARIANT_THREADS;
};

}  // namespace blockflash

// Configuration of the kernel that turns rows of attention into codes.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct QuantizeConfig {
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};

}  // namespace blockflash

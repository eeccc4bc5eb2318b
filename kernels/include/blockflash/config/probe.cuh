// Configurations of the kernels of probes.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_PROBE
struct ProbeConfig {
  static constexpr int probe = VARIANT_PROBE;
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};
#endif

}  // namespace blockflash

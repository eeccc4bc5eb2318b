// Configurations of the kernels that choose the pages of a cache.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_SUMMARY_LOADS
struct PageSummariesConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int loads = VARIANT_SUMMARY_LOADS;  // of 16 bytes, in flight per thread
  static constexpr int threads = VARIANT_THREADS;
};
#endif

#ifdef VARIANT_HELD_SCORES
struct PageChoiceConfig {
  using Element = ElementOf<VARIANT_DTYPE>::type;
  static constexpr int held = VARIANT_HELD_SCORES;  // in shared memory
  static constexpr int threads = VARIANT_THREADS;
};
#endif

}  // namespace blockflash

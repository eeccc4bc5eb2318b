// Configuration of the kernel that combines the splits of attention over a cache.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct AttentionCombineConfig {
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int most_splits = VARIANT_MOST_SPLITS;
  static constexpr int most_lines = VARIANT_MOST_LINES;  // rows of a head that a CTA has
};

}  // namespace blockflash

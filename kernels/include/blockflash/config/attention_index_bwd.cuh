// Configurations of the kernels of the gradients of attention by lists.
#pragma once

#include "blockflash/config/attention.cuh"
#include "blockflash/params/attention_index_bwd.h"

namespace blockflash {

#ifdef VARIANT_LIST_BINS
struct IndexTransposeConfig {
  static constexpr int list_bins = VARIANT_LIST_BINS;  // that a CTA lists
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == BLOCKFLASH_INDEX_SLAB, "a thread looks at one query of a slab");
  static_assert(list_bins == BLOCKFLASH_INDEX_LIST_BINS &&
                    list_bins * threads / kWarpSize == BLOCKFLASH_INDEX_COUNT_BINS,
                "the manifest row and the parameters disagree");
};
#endif

#ifdef VARIANT_TYPE_Q
struct AttentionIndexSumsConfig : AttentionElements {
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
};
#endif

}  // namespace blockflash

// What the configurations of all kernels of attention have in common: element types and head
// dimensions.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

#ifdef VARIANT_TYPE_Q
struct AttentionElements {
  using Element = ElementOf<VARIANT_TYPE_Q>::type;
  static_assert(VARIANT_TYPE_Q == VARIANT_TYPE_KV && VARIANT_TYPE_Q == VARIANT_TYPE_O,
                "these kernels have one element type");
};
#endif

#ifdef VARIANT_HEAD_DIM_QK
struct AttentionTileConfig : AttentionElements {
  static constexpr int head_dim_qk = VARIANT_HEAD_DIM_QK, head_dim_v = VARIANT_HEAD_DIM_V;
  // Of both: tiles of K and V have one shape. A problem may have different ones, each at most this.
  static constexpr int head_dim = head_dim_qk;
  static_assert(head_dim_qk == head_dim_v, "tiles of these kernels have one head dimension");
};
#endif

}  // namespace blockflash

// Configuration of the kernels of attention backward for Hopper, whose values may have another head
// dimension than queries and keys.
#pragma once

#include "blockflash/config/base.cuh"

namespace blockflash {

struct GradientHopperConfig {
  using Element = ElementOf<VARIANT_TYPE_Q>::type;
  static_assert(VARIANT_TYPE_Q == VARIANT_TYPE_KV && VARIANT_TYPE_Q == VARIANT_TYPE_O,
                "these kernels have one element type");
  // Of the tile. Those of a problem are at most these.
  static constexpr int head_dim_qk = VARIANT_HEAD_DIM_QK, head_dim_v = VARIANT_HEAD_DIM_V;
  static constexpr int resident_rows = VARIANT_RESIDENT_ROWS;  // of the tiles that a CTA keeps
  static constexpr int stream_rows = VARIANT_STREAM_ROWS;      // of the tiles that pass through
  static constexpr int stages = VARIANT_STAGES;                // of K or Q
  static constexpr int second_stages = VARIANT_SECOND_STAGES;  // of V or dO
  static constexpr bool dq = VARIANT_DQ;  // whether dq is computed beside dk and dv
  static constexpr int threads = VARIANT_THREADS;
  static constexpr int warpgroups = threads / 128 - 1;   // consumers; plus one producer
  static constexpr int min_blocks = VARIANT_MIN_BLOCKS;  // CTAs per SM
  static constexpr int smem_bytes = VARIANT_SMEM_BYTES;
  static_assert(threads == 384 || threads == 256, "there are two consumers, or one");
};

}  // namespace blockflash

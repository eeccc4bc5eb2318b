// The k largest scores of each row, for sm_80 and newer.
//
// A warp has a short row in registers. Others have a CTA, or several that share the columns: each
// leaves those that may be among the largest in a workspace, and the last one to arrive chooses.
// The choice is unique, so results do not depend on the division or on who comes last.
#include "blockflash/ptx/launch.cuh"
#include "parts.cuh"
#include "warp_rows.cuh"

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_top_k_params p) {
  using namespace blockflash;
  extern __shared__ __align__(16) unsigned char smem[];
  ptx::wait_for_predecessors();
  if constexpr (Config::is_of_warps) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int row = blockIdx.x * (Config::threads / kWarpSize) + warp;
    uint32_t* const keys = reinterpret_cast<uint32_t*>(smem) + warp * Config::held;
    if (row < p.groups * p.rows.rows) choose_with_warp(p, Row::of(p, row), keys, lane);
  } else {
    choose_with_ctas(p, smem);
  }
}

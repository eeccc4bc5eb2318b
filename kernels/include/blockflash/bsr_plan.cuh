// What the steps of planning a BSR pattern have in common.
#pragma once

#include "config.cuh"

namespace blockflash {

using PlanParams = blockflash_bsr_plan_params;
constexpr int kPlanWarps = BsrPlanConfig::warps;
constexpr int kPlanThreads = BsrPlanConfig::threads;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
static_assert(kPlanWarps == kWarpSize, "a warp looks at one number of each warp");

// Sections of the report: blocks of each rank, ranks in the order in which rows are taken, stages of each group.
__device__ __forceinline__ int32_t* lengths(const PlanParams& p) { return p.report + BLOCKFLASH_BSR_PLAN_REPORT_WORDS; }
__device__ __forceinline__ int32_t* ranks(const PlanParams& p) { return lengths(p) + p.rows; }
__device__ __forceinline__ int32_t* stage_counts(const PlanParams& p) { return ranks(p) + p.rows; }

// The columns of a rank. There are few enough to count them in 32 bits.
__device__ __forceinline__ const uint32_t* bits_of(const PlanParams& p, int rank) { return p.bits + rank * p.row_words; }
static_assert(BLOCKFLASH_BSR_PLAN_LIMIT <= 1 << 15, "as many rows of as many columns");

__device__ __forceinline__ int groups(const PlanParams& p) { return (p.rows + p.group_rows - 1) / p.group_rows; }

// The sum of a number of each thread over all threads before this one, and over all. All threads have read `sums` of the call before.
struct Sum {
  int before, all;
};
__device__ __forceinline__ Sum sum_of_block(int own, int* sums /* [kPlanWarps] in shared memory */) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int up_to = own;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == kWarpSize - 1) sums[warp] = up_to;
  __syncthreads();
  const int of_warp = sums[lane];
  const int warps_before = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
  return {warps_before + up_to - own, __reduce_add_sync(kAllLanes, of_warp)};
}

}  // namespace blockflash

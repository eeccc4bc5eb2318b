// The plan of a block-sparse pattern, for sm_80 and newer: in which order kernels take its block rows, and what groups of neighbours in
// that order read of B at a time. It is the plan that the host makes, bit for bit: equal keys are told apart by their place, never by
// which thread comes first.
//
// Four steps, one launch each. Check: a warp per block row. Group: one block of threads forms the groups one after another, since each
// choice depends on the one before. Count, fill: a block of threads per group.
#include "blockflash/bsr_plan.cuh"
#include "blockflash/bsr_plan_groups.cuh"
#include "blockflash/bsr_plan_stages.cuh"

namespace blockflash {
namespace {

// The number that stands for a block in the hash of its pattern.
__device__ __forceinline__ uint64_t mixed(int row, int column) {
  uint64_t x = (static_cast<uint64_t>(row) << 32 | static_cast<uint32_t>(column)) + 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
  x = (x ^ x >> 29) * 0xA0761D6478BD642Fu;
  return x ^ x >> 32;
}

// The number of blocks of a row; of wrong indices any number, and the same one whenever asked.
__device__ __forceinline__ int length_of(const PlanParams& p, int row) {
  return static_cast<int>(static_cast<unsigned>(p.row_ptr[row + 1]) - static_cast<unsigned>(p.row_ptr[row]));
}

// Rows that come before this one when the longest come first.
__device__ __forceinline__ int rank_of(const PlanParams& p, int row, int length, int lane) {
  int before = 0;
#pragma unroll 4
  for (int other = lane; other < p.rows; other += kWarpSize) {
    const int other_length = length_of(p, other);
    before += other_length > length || (other_length == length && other < row);
  }
  return __reduce_add_sync(kAllLanes, before);
}

// A warp's row. Whatever the indices are, ranks are a permutation, and no column beyond the pattern becomes a bit.
__device__ __forceinline__ void check(const PlanParams& p) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = static_cast<int>(blockIdx.x) * kPlanWarps + __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (row >= p.rows) return;
  const int begin = p.row_ptr[row], end = p.row_ptr[row + 1], length = length_of(p, row);
  const int rank = rank_of(p, row, length, lane);
  const bool inside = begin >= 0 && begin <= end && end <= p.nnz_blocks;
  bool wrong = !inside || (row == 0 && begin != 0) || (row + 1 == p.rows && end != p.nnz_blocks);
  uint32_t* const bits = p.bits == nullptr ? nullptr : p.bits + static_cast<int64_t>(rank) * p.row_words;
  if (bits != nullptr)
    for (int word = lane; word < p.row_words; word += kWarpSize) bits[word] = 0;
  __syncwarp();  // lanes now change words that others have written
  unsigned long long hash = 0;
  if (inside) {
#pragma unroll 4
    for (int64_t at = static_cast<int64_t>(begin) + lane; at < end; at += kWarpSize) {
      const int column = p.col_idx[at], before = at == begin ? -1 : p.col_idx[at - 1];
      const bool exists = column >= 0 && column < p.cols;
      wrong |= !exists || column <= before;
      hash += mixed(row, column);
      if (bits != nullptr && exists) atomicOr(bits + column / 32, 1u << column % 32);
    }
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) hash += __shfl_xor_sync(kAllLanes, static_cast<long long>(hash), step);
  const bool any_wrong = __ballot_sync(kAllLanes, wrong) != 0;
  if (lane != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.report), hash);
  if (any_wrong) p.report[BLOCKFLASH_BSR_PLAN_WRONG] = 1;
  p.by_length[rank] = row;
  lengths(p)[rank] = length;
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_plan_params p) {
  using namespace blockflash;
  // Candidates that are left, or where each stage ends; the steps share it, since there is room for one.
  __shared__ uint16_t list[BLOCKFLASH_BSR_PLAN_LIMIT];
  if (p.step == BLOCKFLASH_BSR_PLAN_CHECK) return check(p);
  if (p.report[BLOCKFLASH_BSR_PLAN_WRONG] != 0) return;
  if (p.step == BLOCKFLASH_BSR_PLAN_GROUP) return group(p, list);
  if (p.step == BLOCKFLASH_BSR_PLAN_COUNT) return count(p, list);
  fill(p);
}

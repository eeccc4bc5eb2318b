// Stages of the groups of a BSR plan: what kernels for small blocks read of B at a time. Columns ascend, and each takes as many as fit.
#pragma once

#include "bsr_plan.cuh"

namespace blockflash {

constexpr int kMostGroupRows = 16;  // lanes of a stage that stand for block rows
constexpr int kFirstColumn = 16;    // the lane of a stage's first column, and that of its counts
constexpr int kStageCounts = 24;
constexpr int kPlaceShift = 8;  // above the bits of a row's columns: the place of its blocks

// The block rows of a group, by their ranks.
struct Members {
  int first, size;  // places in the order

  __device__ __forceinline__ explicit Members(const PlanParams& p)
      : first(static_cast<int>(blockIdx.x) * p.group_rows), size(min(p.group_rows, p.rows - first)) {}
};

// Lists the columns that any row of the group has, with the number of rows that have them, and returns how many they are.
__device__ __forceinline__ int list_columns(const PlanParams& p, const Members& members, int32_t* columns) {
  __shared__ int sums[kPlanWarps];
  __shared__ uint16_t places[BLOCKFLASH_BSR_PLAN_LIMIT / 32];
  static_assert(BLOCKFLASH_BSR_PLAN_LIMIT / 32 <= kPlanThreads, "each word of columns has a thread");
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  uint32_t any = 0;
  if (thread < p.row_words) {
#pragma unroll 4
    for (int i = 0; i < members.size; ++i) any |= bits_of(p, ranks(p)[members.first + i])[thread];
  }
  const Sum sum = sum_of_block(__popc(any), sums);
  if (thread < p.row_words) places[thread] = static_cast<uint16_t>(sum.before);
  __syncthreads();
  for (int word = thread / kWarpSize; word < p.row_words; word += kPlanWarps) {
    int rows = 0;
#pragma unroll 4
    for (int i = 0; i < members.size; ++i) rows += bits_of(p, ranks(p)[members.first + i])[word] >> lane & 1;
    const unsigned present = __ballot_sync(kAllLanes, rows > 0);
    if (rows > 0) columns[places[word] + __popc(present & ((1u << lane) - 1))] = (word * 32 + lane) | rows << 16;
  }
  __syncthreads();
  return sum.all;
}

__device__ __forceinline__ void count(const PlanParams& p, uint16_t* ends) {
  const Members members(p);
  int32_t* const columns = p.columns + static_cast<int64_t>(blockIdx.x) * p.cols;
  const int listed = list_columns(p, members, columns);
  // Where a stage would end that began at this column.
  for (int at = threadIdx.x; at < listed; at += kPlanThreads) {
    const int limit = min(at + p.stage_columns, listed);
    int end = at, blocks = 0;
    while (end < limit && (blocks += columns[end] >> 16) <= p.stage_blocks) ++end;
    ends[at] = static_cast<uint16_t>(end);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t* const starts = p.starts + static_cast<int64_t>(blockIdx.x) * (p.cols + 1);
  int stages = 0;
  for (int at = 0; at < listed; at = ends[at]) starts[stages++] = at;
  starts[stages] = listed;
  stage_counts(p)[blockIdx.x] = stages;
}

// The columns of a row before this one.
__device__ __forceinline__ int columns_before(const uint32_t* bits, int column) {
  int sum = __popc(bits[column / 32] & ((1u << column % 32) - 1));
#pragma unroll 4
  for (int word = 0; word < column / 32; ++word) sum += __popc(bits[word]);
  return sum;
}

// A warp's stage, whose lanes write what those of the warp that will copy it read.
__device__ __forceinline__ void write_stage(const PlanParams& p, const Members& members, const int32_t* columns, int count, int2* stage) {
  const int lane = threadIdx.x % kWarpSize;
  const int own = lane < count ? columns[lane] & 0xFFFF : 0;
  const bool is_row = lane < members.size;
  const int place_in_order = members.first + (is_row ? lane : 0);
  const uint32_t* const bits = bits_of(p, ranks(p)[place_in_order]);
  unsigned meets = 0;
  for (int i = 0; i < count; ++i) {
    const int column = __shfl_sync(kAllLanes, own, i);
    if (is_row) meets |= (bits[column / 32] >> column % 32 & 1) << i;
  }
  int up_to = __popc(meets);  // blocks of rows up to this one
#pragma unroll
  for (int step = 1; step < kMostGroupRows; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  const int blocks = __shfl_sync(kAllLanes, up_to, kMostGroupRows - 1);
  const int first_column = __shfl_sync(kAllLanes, own, 0);
  const int column = __shfl_sync(kAllLanes, own, (lane - kFirstColumn) & (kWarpSize - 1));
  int2 numbers = make_int2(0, 0);
  if (is_row) {
    const int before = up_to - __popc(meets);
    numbers = make_int2(p.row_ptr[p.row_order[place_in_order]] + columns_before(bits, first_column),
                        static_cast<int>(meets | before << kPlaceShift));
  }
  if (lane >= kFirstColumn && lane < kFirstColumn + count) numbers.x = column;
  if (lane == kStageCounts) numbers = make_int2(count, blocks);
  stage[lane] = numbers;
}

__device__ __forceinline__ void fill(const PlanParams& p) {
  __shared__ int sums[kPlanWarps];
  const int thread = threadIdx.x, group = blockIdx.x, stages = stage_counts(p)[group];
  int own = 0;
  for (int other = thread; other < group; other += kPlanThreads) own += stage_counts(p)[other];
  const int before = sum_of_block(own, sums).all;
  if (thread == 0) {
    p.group_stages[group] = before;
    if (group + 1 == groups(p)) p.group_stages[group + 1] = before + stages;
  }
  const Members members(p);
  const int32_t* const columns = p.columns + static_cast<int64_t>(group) * p.cols;
  const int32_t* const starts = p.starts + static_cast<int64_t>(group) * (p.cols + 1);
  int2* const to = reinterpret_cast<int2*>(p.stages) + static_cast<int64_t>(before) * kWarpSize;
  for (int stage = thread / kWarpSize; stage < stages; stage += kPlanWarps) {
    const int first = starts[stage];
    write_stage(p, members, columns + first, starts[stage + 1] - first, to + static_cast<int64_t>(stage) * kWarpSize);
  }
}

}  // namespace blockflash

// Which keys of a step a row sees: those of blocks that its query has listed, as far as its window
// shows them.
#pragma once

#include "blockflash/attention/visible.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/quotient.cuh"
#include "layout.cuh"

namespace blockflash {
namespace {

// A lane's row.
struct Row {
  int query;      // among those of the row group; one that does not exist is 64 or more
  KeyRange keys;  // that its window shows

  __device__ __forceinline__ static Row of(const Params& params, const IndexTile& tile,
                                           const RowGroup& group, int row) {
    const int query = small_quotient(row, params.unions.pack);
    if (query >= group.queries()) return {kRows, {0, 0}};
    return {query, mask_of(params.index, tile).keys_of(group.begin + query)};
  }
};

// Bit 2 j + e is set when the row sees key 8 j + 2 (lane % 4) + e of the step.
__device__ __forceinline__ uint32_t shown_to(const Row& row, const Step& step, int which,
                                             int granularity_log2) {
  const int column = accumulator_column(threadIdx.x % kWarpSize, 0);
  const int log2 = min(granularity_log2, kKeys == 128 ? 7 : 6), keys = 1 << log2;
  uint32_t shown = 0;
#pragma unroll 1
  for (int segment = 0; segment < kKeys >> log2; ++segment) {
    const bool is_member = row.query < kRows && step.members[segment][which] >> row.query & 1;
    const int first_key = step.first_key[segment], first = segment * keys - column;
    const int begin = max(row.keys.begin - first_key, 0), end = min(row.keys.end - first_key, keys);
    if (is_member && begin < end) shown |= visible_keys(first + begin, first + end);
  }
  return shown;
}

}  // namespace
}  // namespace blockflash

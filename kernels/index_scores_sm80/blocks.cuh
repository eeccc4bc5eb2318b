// From the scores of keys, of one query and group each, to those of blocks in memory.
#pragma once

#include <math_constants.h>

#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/max_nan.cuh"
#include "items.cuh"

namespace blockflash {
namespace {

// How the keys of a block become one score. Sums and maxima of two numbers are the same in any
// order of both, so all lanes that exchange numbers agree.
template <bool is_max>
struct Reduction {
  static __device__ __forceinline__ float hidden() { return is_max ? -CUDART_INF_F : 0.f; }
  static __device__ __forceinline__ float join(float a, float b) {
    return is_max ? ptx::max_nan(a, b) : a + b;
  }
};

// Reduces over two lanes that are `distance` apart. Each keeps half of the values: the lane above
// the upper half.
template <class Reduce, int count>
__device__ __forceinline__ void fold(float (&values)[count], int half, int lane, int distance) {
  const bool is_upper = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    if (i >= half) break;
    const float kept = is_upper ? values[i + half] : values[i];
    const float given = is_upper ? values[i] : values[i + half];
    values[i] = Reduce::join(kept, __shfl_xor_sync(~0u, given, distance));
  }
}
template <class Reduce>
__device__ __forceinline__ float fold_one(float value, int distance) {
  return Reduce::join(value, __shfl_xor_sync(~0u, value, distance));
}

// Blocks that are wider than the keys of a warp: their parts, and where their scores go.
constexpr int kMostSpans = kTileKeys / (2 * kWarpKeys);  // blocks of a tile
struct SplitBlocks {
  float parts[2][Config::warps][kStageColumns];  // of every second stage,
  float* scores[2][kMostSpans][kStageColumns];   // null: none
};

// The row of scores of one query and group, and the keys of a warp that the query sees, from its
// first one on.
struct Output {
  float* scores;
  KeyRange keys;
};

// Writes what the keys of a warp are to blocks.
struct BlockWriter {
  const Params& p;
  const Item& item;
  SplitBlocks& split;
  int warp, lane, parity;

  __device__ __forceinline__ int first_key() const { return item.key + warp * kWarpKeys; }

  __device__ __forceinline__ Output output(int number) const {
    const int query = small_quotient(number, item.groups);
    const int64_t group = item.head_k * item.groups + number - query * item.groups;
    const KeyRange keys = item.keys_of(query);
    return {p.scores + group * p.scores_stride_group + (item.row + query) * p.scores_stride_row,
            {keys.begin - first_key(), keys.end - first_key()}};
  }

  static __device__ __forceinline__ bool sees(const Output& output, int key) {
    return key >= output.keys.begin && key < output.keys.end;
  }

  // `key` is the first one of a block of `keys` keys, or its part that the warp has.
  template <bool is_max>
  __device__ __forceinline__ float finished(float score, const Output& output, int key,
                                            int keys) const {
    score *= p.scale;
    if constexpr (!is_max) {
      const int seen = min(output.keys.end, key + keys) - max(output.keys.begin, key);
      score = seen > 0 ? __fdividef(score, static_cast<float>(seen)) : -CUDART_INF_F;
    }
    return score;
  }

  __device__ __forceinline__ int block_of(int key) const {
    return key >> (__ffs(p.granularity) - 1);
  }

  // The score of the block in which key `key` of the warp is the first one.
  __device__ __forceinline__ void write(const Output& output, int key, float score) const {
    const int block = block_of(first_key() + key);
    if (block < p.blocks) output.scores[block] = score;
  }

  // Whether a block has keys of several warps.
  __device__ __forceinline__ bool is_split() const { return p.granularity > kWarpKeys; }

  // One number for all keys of the warp, of the output in a column of the stage.
  template <bool is_max>
  __device__ __forceinline__ void write_all(const Output& output, int column, float score) const {
    if (!is_split()) {
      write(output, 0, finished<is_max>(score, output, 0, kWarpKeys));
      return;
    }
    const int of_block = warp * kWarpKeys & (p.granularity - 1);  // keys before those of the warp
    split.parts[parity][warp][column] = finished<is_max>(score, output, -of_block, p.granularity);
    if (of_block > 0) return;
    const int span = warp * kWarpKeys >= p.granularity;
    const int block = block_of(first_key());
    split.scores[parity][span][column] = block < p.blocks ? output.scores + block : nullptr;
  }
};

// Joins the parts of blocks that the last stage but one left. Everybody has met since.
__device__ __forceinline__ void finish_split_blocks(const Params& p, SplitBlocks& split,
                                                    int parity) {
  const int spans = small_quotient(kTileKeys, p.granularity);
  const int span = threadIdx.x / kStageColumns, column = threadIdx.x % kStageColumns;
  if (span >= spans) return;
  float* const to = split.scores[parity][span][column];
  if (to == nullptr) return;
  split.scores[parity][span][column] = nullptr;
  const int warps = small_quotient(p.granularity, kWarpKeys);
  float score = split.parts[parity][span * warps][column];
  for (int i = 1; i < warps; ++i) {
    const float part = split.parts[parity][span * warps + i][column];
    score = p.reduction == BLOCKFLASH_INDEX_MAX ? ptx::max_nan(score, part) : score + part;
  }
  *to = score;
}

}  // namespace
}  // namespace blockflash

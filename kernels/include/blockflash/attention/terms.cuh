// Score terms in accumulators of mma.sync: what is added to scores, and the bits of partial blocks
// (params/score_terms.h).
#pragma once

#include <math_constants.h>
#include <stdint.h>

#include <type_traits>

#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/config/attention_terms.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/attention_terms.h"
#include "blockflash/ptx/global_if.cuh"

namespace blockflash {

// Calls `use` with 0, 1, … as constants.
template <int n, class Use>
__device__ __forceinline__ void each_index(const Use& use) {
  if constexpr (n > 0) {
    each_index<n - 1>(use);
    use(std::integral_constant<int, n - 1>{});
  }
}

// Calls `use` with the parameters if they have terms.
template <class Params, class Use>
__device__ __forceinline__ void with_terms(const Params& params, const Use& use) {
  if constexpr (requires { params.terms; }) use(params);
}

// The part of the parameters that kernels without terms have.
template <class Params>
__device__ __forceinline__ const auto& without_terms(const Params& params) {
  if constexpr (!requires { params.terms; })
    return params;
  else if constexpr (requires { params.bwd; })
    return params.bwd;
  else
    return params.base;
}

// The visible pairs of 16 rows × 64 columns as a lane holds them, in the order of the bits of a
// block: the lower half is the lane's first row, the upper half the one 8 below it. Of 32 columns
// there are the lower 8 bits of each half.
using PairBits = uint32_t;
constexpr PairBits kAllVisible = ~0u;

// Where a key and a query are in a tile of scores: keys along the columns, or transposed.
template <bool transposed>
struct TileAxes {
  int first_row, first_col;  // of the warp's scores, within their sequences
  int rows, cols;            // of the sequences
  // From a row to the column that ALiBi does not change.
  __device__ __forceinline__ int diagonal() const { return cols - rows; }
};

// The bits of the tile at a position of a list, which begins at `row` of its sequence: a tile of 64
// × 64 bits, or -1 if all pairs of the block are visible. Both sides of the tile divide 64.
__device__ __forceinline__ int bits_of_tile(const int32_t* block_bits, int bit_tiles,
                                            const blockflash_block_mask& mask, const TileList& list,
                                            int position, int row, int tile_cols) {
  if (block_bits == nullptr || list.cols == nullptr) return -1;
  const int listed = position / list.tiles_per_col;
  const int first = block_bits[list.cols - mask.col_idx + listed];
  if (first < 0) return -1;
  const int tile = row % mask.block_q / 64 * (mask.block_kv / 64) +
                   (position - listed * list.tiles_per_col) * tile_cols / 64;
  // Values are data on the device that nobody has validated.
  return min(static_cast<uint32_t>(first) + tile, static_cast<uint32_t>(bit_tiles - 1));
}

// A lane's bits of 16 rows that begin at `row` and `col` of their sequences.
__device__ __forceinline__ PairBits load_bits(const uint32_t* bits, int tile, int row, int col,
                                              int lane) {
  if (tile < 0) return kAllVisible;
  const int64_t at = static_cast<int64_t>(tile) * BLOCKFLASH_BIT_TILE_WORDS;
  return bits[at + row % 64 / 16 * 32 + lane] >> (col % 64 / 8 * 2);
}

// Bits of two rows, of which each sees a range, relative to the first column of the warp's scores.
__device__ __forceinline__ PairBits bits_of_ranges(KeyRange upper, KeyRange lower, int first_col,
                                                   int lane) {
  const int first = first_col + accumulator_column(lane, 0);
  return (visible_keys(upper.begin - first, upper.end - first) & 0xFFFF) |
         visible_keys(lower.begin - first, lower.end - first) << 16;
}

// Whether element i of MMA tile n is visible.
__device__ __forceinline__ bool is_visible(PairBits bits, int n, int i) {
  return bits >> (i / 2 * 16 + n * 2 + i % 2) & 1;
}

template <int m_tiles, int n_tiles>
__device__ __forceinline__ void hide(float (&s)[m_tiles][n_tiles][4],
                                     const PairBits (&bits)[m_tiles], float value) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!is_visible(bits[m], n, i)) s[m][n][i] = value;
}

// Clears the bits of keys that the rows do not see in the window.
template <int m_tiles>
__device__ __forceinline__ void restrict_keys(PairBits (&bits)[m_tiles], const AttentionMask& mask,
                                              int first_row, int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    const int row = first_row + m * 16 + accumulator_row(lane, 0);
    bits[m] &= bits_of_ranges(mask.keys_of(row), mask.keys_of(row + 8), first_key, lane);
  }
}

__device__ __forceinline__ bool is_capped(const blockflash_scores& scores) {
  return scores.softcap > 0.f;
}
// What scores are multiplied by before something is added to them: capped ones are scaled.
__device__ __forceinline__ float factor_before_terms(const blockflash_scores& scores) {
  return is_capped(scores) ? 1.f : scores.scale;
}

// Whether something is added to scores. Then scores are scaled first.
__device__ __forceinline__ bool adds(const blockflash_score_terms& terms) {
  return terms.bias != nullptr || terms.alibi != nullptr;
}

// s = s·factor + bias. The type is one for the launch, so the same few instructions take all of
// them: a copy of the code for each type would be most of the kernel. Elements beyond the sequences
// are not read, and what those of s become does not matter.
template <bool transposed, int m_tiles, int n_tiles>
__device__ __forceinline__ void add_bias(float (&s)[m_tiles][n_tiles][4],
                                         const blockflash_score_terms& terms, float factor,
                                         int batch, int head, const TileAxes<transposed>& axes,
                                         int lane) {
  const bool is_wide = terms.bias_type == BLOCKFLASH_DTYPE_F32,
             is_half = terms.bias_type == BLOCKFLASH_DTYPE_F16;
  // The bits of bf16 are the upper ones of f32.
  const int shift = terms.bias_type == BLOCKFLASH_DTYPE_BF16 ? 16 : 0;
  const int64_t bytes = is_wide ? 4 : 2;
  const int64_t row_stride = (transposed ? terms.bias_stride_kv : terms.bias_stride_q) * bytes,
                col_stride = (transposed ? terms.bias_stride_q : terms.bias_stride_kv) * bytes;
  const int col = axes.first_col + accumulator_column(lane, 0);
  const char* const first =
      static_cast<const char*>(terms.bias) +
      (batch * terms.bias_stride_batch + head * terms.bias_stride_head) * bytes + col * col_stride;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = axes.first_row + m * 16 + accumulator_row(lane, 2 * half);
      const int left = row < axes.rows ? axes.cols - col : 0;
      const int wide = is_wide ? left : 0, narrow = is_wide ? 0 : left;
      const char* const at = first + row * row_stride;
      uint32_t bits[n_tiles][2];
      each_index<n_tiles>([&](auto n) {
        constexpr int kColumn = decltype(n)::value * 8;
        const char* const pair = at + kColumn * col_stride;
        bits[n][0] = ptx::load_4_or_2_bytes_if<kColumn>(pair, wide, narrow);
        bits[n][1] = ptx::load_4_or_2_bytes_if<kColumn + 1>(pair + col_stride, wide, narrow);
      });
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[m][n][2 * half + i];
          const float value =
              is_half ? ElementTraits<__half>::to_float(static_cast<uint16_t>(bits[n][i]))
                      : __uint_as_float(bits[n][i] << shift);
          x = fmaf(x, factor, value);
        }
    }
}

// Adds the bias and ALiBi to the scores of a warp, which are multiplied by `factor` first.
template <bool transposed, int m_tiles, int n_tiles>
__device__ __forceinline__ void add_terms(float (&s)[m_tiles][n_tiles][4],
                                          const blockflash_score_terms& terms, float factor,
                                          int batch, int head, const TileAxes<transposed>& axes,
                                          int lane) {
  if (terms.bias != nullptr) {
    add_bias(s, terms, factor, batch, head, axes, lane);
    factor = 1.f;
  }
  if (terms.alibi == nullptr) return;
  const float slope =
      terms.alibi[batch * terms.alibi_stride_batch + head * terms.alibi_stride_head];
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // From the first column of the lane to the one of the row without a change.
      const float distance =
          static_cast<float>(axes.first_row + m * 16 + accumulator_row(lane, 2 * half) +
                             axes.diagonal() - axes.first_col - accumulator_column(lane, 0));
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[m][n][2 * half + i];
          x = fmaf(-slope, fabsf(distance - static_cast<float>(n * 8 + i)), x * factor);
        }
    }
}

}  // namespace blockflash

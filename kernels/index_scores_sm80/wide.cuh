// Products whose columns are the heads of one query and group, 16 at a time. A lane adds up its two
// columns of each eight, and the quad of a row the rest when all heads have passed.
#pragma once

#include "blockflash/ptx/shared.cuh"
#include "blocks.cuh"
#include "keys.cuh"

namespace blockflash {
namespace {

struct Wide {
  static constexpr int kRows = 2 * kMTiles;  // of a lane: row g and g + 8 of each tile
  float sums[kRows];
  int output, product;  // and how many of its products have passed

  __device__ __forceinline__ void begin_item() { output = product = 0; }

  // Takes one product of the item.
  __device__ __forceinline__ void add(const BlockWriter& writer, const Keys& keys,
                                      const Columns& columns, uint32_t weights_smem, int of_stage) {
    Products acc;
    clear(acc);
    keys.multiply(acc, columns);
    const Params& p = writer.p;
    const int lane = writer.lane;
    float weights[kNTiles][2];
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
      ptx::load_shared_float2(weights[n], weights_smem + (n * 8 + accumulator_column(lane, 0)) * 4);
    if (product == 0)
#pragma unroll
      for (int i = 0; i < kRows; ++i) sums[i] = 0.f;
    const float floor = p.activation == BLOCKFLASH_INDEX_RELU ? 0.f : -CUDART_INF_F;
    const int heads_left = writer.item.heads - product * kColumns;
    if (heads_left >= kColumns) {
      each([&](int m, int n, int i) {
        sums[2 * m + i / 2] =
            fmaf(ptx::max_nan(acc[m][n][i], floor), weights[n][i % 2], sums[2 * m + i / 2]);
      });
    } else {
      // A head that does not exist must add nothing, and 0 times an infinite key is NaN.
      each([&](int m, int n, int i) {
        const bool exists = n * 8 + accumulator_column(lane, i) < heads_left;
        const float x = exists ? ptx::max_nan(acc[m][n][i], floor) : 0.f;
        sums[2 * m + i / 2] = fmaf(x, weights[n][i % 2], sums[2 * m + i / 2]);
      });
    }
    ++product;
    if (heads_left > kColumns) return;
    if (p.reduction == BLOCKFLASH_INDEX_MAX || p.granularity == 1)
      write<true>(writer, of_stage);
    else
      write<false>(writer, of_stage);
    product = 0, ++output;
  }

 private:
  template <class Visit>
  static __device__ __forceinline__ void each(Visit visit) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(m, n, i);
  }

  template <bool is_max>
  __device__ __forceinline__ void write(const BlockWriter& writer, int of_stage) {
    using Reduce = Reduction<is_max>;
    using Sum = Reduction<false>;
    const Params& p = writer.p;
    const int lane = writer.lane, t = lane % 4, g = lane / 4;
    // Lane t of a quad gets rows g of the groups of eight rows from t · kOwn on.
    constexpr int kOwn = kRows / 4;
    fold<Sum>(sums, kRows / 2, lane, 2);
    fold<Sum>(sums, kRows / 4, lane, 1);
    const Output to = writer.output(output);
    if (!writer.item.sees_all)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (!BlockWriter::sees(to, 8 * (t * kOwn + i) + g)) sums[i] = Reduce::hidden();
    if (p.granularity == 1) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) writer.write(to, 8 * (t * kOwn + i) + g, sums[i] * p.scale);
      return;
    }
    if (p.granularity == 4) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float x = fold_one<Reduce>(fold_one<Reduce>(sums[i], 4), 8);
        const int key = 8 * (t * kOwn + i) + (g & ~3);
        const float score = writer.finished<is_max>(x, to, key, 4);
        if (g % 4 == 0) writer.write(to, key, score);
      }
      return;
    }
    float x = kOwn > 1 ? Reduce::join(sums[0], sums[kOwn - 1]) : fold_one<Reduce>(sums[0], 1);
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) x = fold_one<Reduce>(x, distance);
    if (p.granularity == 16) {
      const int key = 8 * t * kOwn & ~15;
      const float score = writer.finished<is_max>(x, to, key, 16);
      if (g == 0 && 8 * t * kOwn % 16 == 0) writer.write(to, key, score);
      return;
    }
    if (kOwn > 1) x = fold_one<Reduce>(x, 1);
    x = fold_one<Reduce>(x, 2);
    if (lane == 0) writer.write_all<is_max>(to, of_stage * kColumns, x);
  }
};

}  // namespace
}  // namespace blockflash

// Products whose columns are queries and groups, 16 at a time, for one head of each group after the
// other. A lane has two columns of each eight, and adds up their heads by itself.
#pragma once

#include "blockflash/ptx/opaque.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blocks.cuh"
#include "keys.cuh"

namespace blockflash {
namespace {

struct Narrow {
  static constexpr int kRows = 2 * kMTiles;     // of a lane: row g and g + 8 of each tile
  static constexpr int kOutputs = 2 * kNTiles;  // of a lane
  static constexpr int kValues = kRows * kOutputs;
  Products sums;
  int tile, product;  // of outputs; how many of its products have passed

  __device__ __forceinline__ void begin_item() { tile = product = 0; }

  // Takes one product of the item.
  __device__ __forceinline__ void add(const BlockWriter& writer, const Keys& keys,
                                      const Columns& columns, uint32_t weights_smem, int of_stage) {
    const Params& p = writer.p;
    if (product == 0) clear(sums);
    if (p.activation == BLOCKFLASH_INDEX_IDENTITY && p.weights == nullptr) {
      // Heads add up by themselves.
      keys.multiply(sums, columns);
    } else {
      Products acc;
      clear(acc);
      keys.multiply(acc, columns);
      const float floor = p.activation == BLOCKFLASH_INDEX_RELU ? 0.f : -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        float weights[2];
        ptx::load_shared_float2(weights,
                                weights_smem + (n * 8 + accumulator_column(writer.lane, 0)) * 4);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[m][n][i] = fmaf(ptx::max_nan(acc[m][n][i], floor), weights[i % 2], sums[m][n][i]);
      }
    }
    if (++product < writer.item.heads) return;
    if (p.reduction == BLOCKFLASH_INDEX_MAX || p.granularity == 1)
      write<true>(writer, of_stage);
    else
      write<false>(writer, of_stage);
    product = 0, ++tile;
  }

 private:
  // The column of a lane's output.
  static __device__ __forceinline__ int column(int lane, int output) {
    return output / 2 * 8 + accumulator_column(lane, output % 2);
  }

  template <bool is_max>
  __device__ __forceinline__ void write(const BlockWriter& writer, int of_stage) {
    using Reduce = Reduction<is_max>;
    const Params& p = writer.p;
    // Nothing that follows from the lane here stays in registers beside the keys.
    const int lane = ptx::opaque(writer.lane), g = lane / 4;
    const int outputs = writer.item.queries * writer.item.groups;
    // Row after row, the lane's outputs of each.
    float x[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int row = i / kOutputs, output = i % kOutputs;
      x[i] = sums[row / 2][output / 2][row % 2 * 2 + output % 2];
    }
    const auto output_at = [&](int i) { return tile * kColumns + column(lane, i); };
    if (!writer.item.sees_all)
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const Output to = writer.output(output_at(i));
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          if (!BlockWriter::sees(to, 8 * row + g)) x[row * kOutputs + i] = Reduce::hidden();
      }
    if (p.granularity == 1) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (output_at(i) >= outputs) continue;
        const Output to = writer.output(output_at(i));
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          writer.write(to, 8 * row + g, x[row * kOutputs + i] * p.scale);
      }
      return;
    }
    if (p.granularity == 4) {
      // The four lanes that have the rows of a block take turns with the groups of eight rows.
      fold<Reduce>(x, kValues / 2, lane, 8);
      fold<Reduce>(x, kValues / 4, lane, 4);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (output_at(i) >= outputs) continue;
        const Output to = writer.output(output_at(i));
#pragma unroll
        for (int row = 0; row < kRows / 4; ++row) {
          const int key = 8 * (g % 4 * (kRows / 4) + row) + (g & ~3);
          writer.write(to, key, writer.finished<is_max>(x[row * kOutputs + i], to, key, 4));
        }
      }
      return;
    }
    // Tile after tile of 16 rows, the lane's outputs of each.
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int m = i / kOutputs, output = i % kOutputs;
      x[i] = Reduce::join(x[2 * m * kOutputs + output], x[(2 * m + 1) * kOutputs + output]);
    }
    if (p.granularity == 16) {
      fold<Reduce>(x, kValues / 4, lane, 16);
      fold<Reduce>(x, kValues / 8, lane, 8);
      fold<Reduce>(x, kValues / 16, lane, 4);
#pragma unroll
      for (int i = 0; i < kValues / 16; ++i) {
        const int at = g * (kValues / 16) + i;
        const int number = output_at(at % kOutputs), key = at / kOutputs * 16;
        if (number >= outputs) continue;
        const Output to = writer.output(number);
        writer.write(to, key, writer.finished<is_max>(x[i], to, key, 16));
      }
      return;
    }
#pragma unroll
    for (int m = 1; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) x[i] = Reduce::join(x[i], x[m * kOutputs + i]);
    fold<Reduce>(x, 2, lane, 16);
    fold<Reduce>(x, 1, lane, 8);
    const float score = fold_one<Reduce>(x[0], 4);
    const int own = column(lane, g / 2);
    if (g % 2 == 0 && tile * kColumns + own < outputs)
      writer.write_all<is_max>(writer.output(tile * kColumns + own), of_stage * kColumns + own,
                               score);
  }
};
static_assert(Narrow::kOutputs == 4, "lanes g take turns with four outputs");

}  // namespace
}  // namespace blockflash

// From the sums of the warps to the output, or to the workspace where the keys are split.
#pragma once

#include "blockflash/decode/combine.cuh"
#include "sums.cuh"

namespace blockflash {
namespace {

// The output for decode/combine.cuh.
struct OutputTile {
  static constexpr int rows = Config::rows, columns = Config::values, threads = Config::threads;
  using Element = Config::Element;

  static __device__ __forceinline__ void store(const blockflash_attention_decode_params&,
                                               Element* row, int piece, const Partial& x) {
    *reinterpret_cast<uint2*>(row + piece * 4) = quotient<Element>(x);
  }
};

// Stores the result of a split. Warps have columns of their own and agree about the rest.
__device__ __forceinline__ void finish_split(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int split, const Sums& sums) {
  const int rows = rows_of<OutputTile>(p, item);
  const bool packed = p.cu_seqlens_q != nullptr;
  const int lane = ptx::opaque(Sums::lane()), first_column = Sums::warp() * kWarpValues;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // What belongs to the whole row, and in its sum what the sums are multiplied by.
    Partial x{{1.f, 1.f, 1.f, 1.f}, sums.reference[half], quad_sum(sums.denominator[half])};
    const int row = accumulator_row(lane, 2 * half);
    if (row >= rows) continue;
    const bool has_first = Sums::warp() == 0 && lane % 4 == 0;
    if (item.splits > 1) {
      const Slot slot(p, item.slot_of(split));
      float* const to = slot.sums + row * Config::values + first_column;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        __stcg(reinterpret_cast<float2*>(to + accumulator_column(lane, 0) + 8 * j),
               make_float2(sums.o[j][2 * half], sums.o[j][2 * half + 1]));
      if (has_first) __stcg(slot.logs + row, make_float2(x.reference, x.denominator));
      continue;
    }
    const int of_item = item.row_tile * Config::rows + row;
    const int query = small_quotient(of_item, p.group);
    const int head = item.head_kv * p.group + of_item - query * p.group;
    if (p.scores.sink != nullptr) add_sink(x, Log2Units::sink(p.scores, head));
    const float factor = x.sum.x * reciprocal(x);
    Element* const to = static_cast<Element*>(p.o) +
                        (packed ? 0 : item.sequence * p.o_stride_batch) +
                        static_cast<int64_t>(item.q_begin + query) * p.o_stride_seq +
                        head * p.o_stride_head + first_column;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      *reinterpret_cast<uint32_t*>(to + accumulator_column(lane, 0) + 8 * j) =
          Traits::pack(sums.o[j][2 * half] * factor, sums.o[j][2 * half + 1] * factor);
    if (has_first && p.lse != nullptr)
      p.lse[(packed ? 0 : item.sequence * p.lse_stride_batch) + head * p.lse_stride_head +
            item.q_begin + query] = log_sum_exp(x);
  }
}

}  // namespace
}  // namespace blockflash

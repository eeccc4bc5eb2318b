// From the sums of the warps to the output, or to the workspace where the keys are split.
#pragma once

#include <type_traits>

#include "blockflash/config/latent.cuh"
#include "blockflash/decode/combine_tree.cuh"
#include "blockflash/mma/fragment.cuh"

namespace blockflash {
namespace {

using Config = AttentionLatentConfig;

// The output for decode/combine.cuh.
struct OutputTile {
  static constexpr int rows = Config::rows, columns = Config::values, threads = Config::threads;
  using Element = Config::Element;

  static __device__ __forceinline__ void store(const blockflash_attention_decode_params&,
                                               Element* row, int piece, const Partial& x) {
    *reinterpret_cast<uint2*>(row + piece * 4) = quotient<Element>(x);
  }
};

// Stores the result of an item, a split: of four columns of a row at a time by `show`, unless it is
// null. Warps have columns of their own and agree about the rest.
template <class Sums, class Show = std::nullptr_t>
__device__ __forceinline__ void finish_split(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, const Sums& sums,
                                             const Show& show = nullptr) {
  const int rows = rows_of<OutputTile>(p, item);
  constexpr int kTiles = Sums::kTiles, kWarpValues = kTiles * 8;
  const int lane = ptx::opaque(Sums::lane());
  const bool is_odd = lane % 2 != 0;
  const Slot slot(p, item.slot_of(item.split));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float denominator = quad_sum(sums.denominator[half]);
    const int row = accumulator_row(lane, 2 * half);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      const auto columns = [&](const float4& values, int place) {
        const Partial x{values, sums.reference[half], denominator};
        const int piece = Sums::warp() * (kWarpValues / 4) + place;
        if constexpr (!std::is_same_v<Show, std::nullptr_t>)
          show(row, piece, x);
        else if (item.splits > 1)
          slot.store(p, row, piece, x);
        else
          store_result<OutputTile>(p, item, row, piece, x);
      };
      if constexpr (Sums::kHasCodes) {
        const auto &even = sums.o[j], &odd = sums.o[j + 1];
        if (row >= rows) continue;
        columns(make_float4(even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]),
                2 * j + lane % 4);
      } else {
        // Two lanes side by side have four columns of two tiles: afterwards one tile each.
        float mine[2], its[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float first = sums.o[j][2 * half + e], second = sums.o[j + 1][2 * half + e];
          mine[e] = is_odd ? second : first;
          its[e] = __shfl_xor_sync(~0u, is_odd ? first : second, 1);
        }
        if (row >= rows) continue;
        columns(is_odd ? make_float4(its[0], its[1], mine[0], mine[1])
                       : make_float4(mine[0], mine[1], its[0], its[1]),
                2 * (j + is_odd) + lane % 4 / 2);
      }
    }
  }
}

}  // namespace
}  // namespace blockflash

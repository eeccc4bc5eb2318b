// Epilogue over a cache: rows are queries times a pack of heads, and a split of the keys leaves its
// results in f32 for the kernel that combines them.
#pragma once

#include "output.cuh"

namespace blockflash {

// Normalises and stores the rows of a warpgroup of the query tile in a slot, and their log-sum-exp.
template <class Given>  // a template, so that dense attention discards it
__device__ __forceinline__ void store_cache_output(const Given& all, uint32_t slot,
                                                   const float (&o)[kOutColumns / 2],
                                                   const RowTotals& rows, int warpgroup) {
  const blockflash_attention_fwd_params& b = all.cache.fwd.base;
  using Element = Config::Element;
  using Traits = ElementTraits<Element>;
  const QueryTile tile = QueryTile::load(slot);
  const TileList divided = TileList::load(slot + kListInSlot);
  const int split = divided.count;
  const int quad_lane = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
  const int group = b.num_heads_q / b.num_heads_kv;
  const int heads_end = (TileRows::load(slot + kRowsInSlot).head_kv + 1) * group;
  const CacheRows packed = CacheRows::of(all);
  int query[2], head[2];
  bool exists[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + accumulator_row(threadIdx.x % 32, 2 * half),
              of_tile = packed.query_of(row);
    query[half] = tile.q_begin + warpgroup * packed.queries + of_tile;
    head[half] = tile.head + row - of_tile * packed.pack;
    exists[half] =
        of_tile < packed.queries && query[half] < tile.seqlen_q && head[half] < heads_end;
    // Rows of zeros count as those of some head.
    head[half] = min(head[half], heads_end - 1);
  }
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float log = rows.log[half];
    scale[half] = scale_of_row(b.scores, head[half], kOnes ? o[kDV / 2 + 2 * half] : rows.sum[half],
                               log, split == 0);
    if (!exists[half] || quad_lane != 0) continue;
    if (all.splits > 1) {
      const auto lse_of = [&](int of_split) -> float& {
        const int64_t line = static_cast<int64_t>(of_split) * b.num_heads_q + head[half];
        return all.parts_lse[(line * b.batch + tile.batch) * b.seqlen_q + query[half]];
      };
      lse_of(split) = log;
      // Splits that this sequence does not have count as without keys.
      if (split == 0)
        for (int none = divided.tiles_per_col; none < all.splits; ++none)
          lse_of(none) = -CUDART_INF_F;
    } else if (b.lse != nullptr) {
      b.lse[tile.batch * b.lse_stride_batch + head[half] * b.lse_stride_head + tile.q_offset +
            query[half]] = log;
    }
  }
  if (all.splits > 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row =
          (static_cast<int64_t>(split) * b.batch + tile.batch) * b.seqlen_q + query[half];
      float* const to =
          all.parts + (row * b.num_heads_q + head[half]) * b.head_dim_v + 2 * quad_lane;
#pragma unroll
      for (int d = 0; d < kDV / 8; ++d)
        if (exists[half] && 8 * d < b.head_dim_v)
          *reinterpret_cast<float2*>(to + 8 * d) =
              make_float2(o[4 * d + 2 * half] * scale[half], o[4 * d + 2 * half + 1] * scale[half]);
    }
    return;
  }
  const bool has_offsets = b.cu_seqlens_q != nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Element* const o_row =
        static_cast<Element*>(b.o) + (has_offsets ? 0 : tile.batch * b.o_stride_batch) +
        head[half] * b.o_stride_head +
        (static_cast<int64_t>(tile.q_offset) + query[half]) * b.o_stride_seq + quad_lane * 8;
#pragma unroll
    for (int d = 0; d < kDV / 8; d += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = Traits::pack(o[4 * (d + i) + 2 * half] * scale[half],
                                o[4 * (d + i) + 2 * half + 1] * scale[half]);
      quad_transpose(words, quad_lane);
      if (exists[half] && (d + quad_lane) * 8 < b.head_dim_v)
        *reinterpret_cast<uint4*>(o_row + d * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace blockflash

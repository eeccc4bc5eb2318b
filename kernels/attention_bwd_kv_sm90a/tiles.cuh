// What both kinds of consumers share: which pairs of a tile they see, and how they store rows.
#pragma once

#include "blockflash/attention/gradient_ring.cuh"
#include "blockflash/attention/gradient_ring_terms.cuh"
#include "blockflash/attention/query_walk.cuh"
#include "blockflash/attention/sums_order.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

static_assert(kStreamRows == 64 || (kStreamRows == 128 && Config::dq),
              "one consumer visits more than 64 queries at a time");
// Whether one consumer has the scores and dv and the other one their gradients and dk.
constexpr bool kSpecialized = Config::dq && kD > 128;
static_assert(kD == kDV || kSpecialized, "dk and dv have one shape");
static_assert(kStages == kSecondStages || kSpecialized,
              "a stage of Q and its stage of dO are released together");

// Whether a CTA takes one block of keys after another, so that it loads the first tiles of the next
// block while it stores the gradients of the last one.
constexpr bool kPersistent = Config::dq && !kSpecialized;

// The keys of a CTA, and the query heads for which it visits them: all heads of the group, or one
// of the parts into which groups are split where there are few blocks of keys.
struct Keys : KeyWork<kResidentRows> {
  int part;               // its number over all key heads and batch entries
  int first_head, heads;  // of queries

  __device__ __forceinline__ Keys(const Params& params, int part, int tile)
      : KeyWork<kResidentRows>(params.base, part / params.head_parts, tile), part(part) {
    const int group = params.base.base.num_heads_q / params.base.base.num_heads_kv;
    const int of_group = part % params.head_parts;
    const int first = of_group * group / params.head_parts;
    first_head = head_kv * group + first;
    heads = (of_group + 1) * group / params.head_parts - first;
  }
  // Early key tiles are seen by the most queries of a causal mask, so they come first.
  __device__ __forceinline__ explicit Keys(const Params& params)
      : Keys(params, blockIdx.x / tiles_of_keys(params.base),
             blockIdx.x % tiles_of_keys(params.base)) {}

  static __device__ __forceinline__ int parts(const Params& params) {
    return params.base.base.batch * params.base.base.num_heads_kv * params.head_parts;
  }

  // One thread reads offsets for all, see KeyWork::agreed.
  static __device__ __forceinline__ Keys& shared() {
    __shared__ __align__(16) unsigned char bytes[sizeof(Keys)];
    return reinterpret_cast<Keys&>(bytes);
  }
  template <class Read>
  static __device__ __forceinline__ const Keys& agreed(const Read& read) {
    if (threadIdx.x == 0) shared() = read();
    __syncthreads();
    return shared();
  }
};
using Walk = QueryWalk<kStreamRows, kResidentRows>;

// Statistics end with a whole kStatisticsTile, so a larger tile may reach beyond them. Its pairs
// there are hidden, which needs statistics that are numbers: those of its first rows, once more.
__device__ __forceinline__ bool has_all_statistics(int rows) {
  return kStatisticsRows == kStatisticsTile || rows > kStatisticsRows - kStatisticsTile;
}
__device__ __forceinline__ void copy_statistics(uint32_t dst, const float* src, int rows,
                                                uint32_t barrier) {
  constexpr int kBytes = kStatisticsTile * 4;
#pragma unroll
  for (int at = 0; at < kStatisticsRows; at += kStatisticsTile)
    ptx::bulk_copy(dst + at * 4, src + (has_all_statistics(rows) ? at : 0), kBytes, barrier);
}

// Whether some pair of a tile is hidden.
__device__ __forceinline__ bool is_masked(const QueryRange& range, int k_begin, int first_query,
                                          int queries) {
  return range.is_masked(k_begin, kResidentRows, first_query, queries) ||
         !has_all_statistics(range.seqlen_q - first_query);
}

// What the producer of a persistent CTA publishes beside the first query of a tile.
constexpr uint32_t kTileIsMasked = 1;
__device__ __forceinline__ uint32_t tile_flags_at(uint32_t smem, int stage) {
  static_assert(!kPersistent || kStages == 2, "four words of the page are for published tiles");
  return page_base(smem) + kTileOffset + 8 + 4 * stage;
}

// The visible pairs of a lane: keys from row `warp_row` of the CTA on, and queries from
// `first_query` on.
template <class IsMasked>
__device__ __forceinline__ Visible visible_pairs(const blockflash_attention_fwd_params& p,
                                                 const Keys& work, const IsMasked& is_masked,
                                                 int warp_row, int first_query) {
  // Where registers are scarce, the lane is not kept for all tiles.
  const int lane = (kAlone || kPersistent ? ptx::opaque(threadIdx.x) : threadIdx.x) % 32;
  const QueryRange range = work.range(p);
  const int k_begin = work.k_begin;
  Visible visible;
  visible.masked = is_masked(range, k_begin);
  if (visible.masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange seen_by =
          range.queries_of(k_begin + warp_row + accumulator_row(lane, 2 * half));
      const int first = first_query + accumulator_column(lane, 0);
      visible.bits[half] = visible_keys(seen_by.begin - first, seen_by.end - first);
    }
  }
  return visible;
}
__device__ __forceinline__ Visible visible_pairs(const blockflash_attention_fwd_params& p,
                                                 int warp_row, int first_query, int queries) {
  const auto masked = [=](const QueryRange& range, int k_begin) {
    return is_masked(range, k_begin, first_query, queries);
  };
  return visible_pairs(p, Keys::shared(), masked, warp_row, first_query);
}

// The same of the tile in a stage, as the producer of a persistent CTA published it.
__device__ __forceinline__ Visible published_pairs(const blockflash_attention_fwd_params& p,
                                                   const Keys& work, uint32_t smem, int stage,
                                                   int warp_row) {
  const bool masked = ptx::load_shared(tile_flags_at(smem, stage)) & kTileIsMasked;
  return visible_pairs(
      p, work, [=](const QueryRange&, int) { return masked; }, warp_row,
      published_row(smem, stage));
}

// The visible pairs of a lane by the bits of a block, whose transpose has keys along the rows.
__device__ __forceinline__ StreamPairs load_pairs(const Params& params, uint32_t smem, int stage,
                                                  int warpgroup) {
  const TermsParams& all = terms_of(params);
  return StreamPairs::load(all.bits_t, all.bit_tiles_t, published_bits(smem, stage), warpgroup,
                           params.base.block_mask_t.block_kv / 64);
}
// ALiBi of the tile in a stage.
__device__ __forceinline__ auto added_alibi(const Params& params, uint32_t smem, int stage,
                                            const Keys& work, int warp_row) {
  return AddedAlibi{
      terms_of(params).terms.alibi != nullptr, [=, &params, &work] {
        const int lane = (kAlone || kPersistent ? ptx::opaque(threadIdx.x) : threadIdx.x) % 32;
        return LaneAlibi(published_slope(smem, stage), params.base.base.scores,
                         work.k_begin + warp_row + accumulator_row(lane, 0), work.seqlen_kv,
                         published_row(smem, stage) + accumulator_column(lane, 0), work.seqlen_q);
      }};
}

// Statistics of the queries of a lane, from those of its first query on.
__device__ __forceinline__ auto statistics_at(uint32_t first) {
  const uint32_t of_lane = first + accumulator_column(threadIdx.x % 32, 0) * 4;
  return [=](int j, float(&x)[2], uint32_t offset = 0) {
    ptx::load_shared_float2(x, of_lane + offset + j * 32);
  };
}

// Leaves dk (0) or dv (1) of the 16 keys of a warp in the workspace, in the order of sums.
__device__ __forceinline__ void store_part(const Params& params, const float (&gradient)[kD / 2],
                                           int which, int warp_row, const Keys& work) {
  const int row = work.k_begin + warp_row;
  const int64_t tile = static_cast<int64_t>(work.part) * key_tiles(params.base.base) + row / 64;
  float* const out = params.key_parts + (tile * 2 + which) * (64 * kD) + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < kD / 8; ++i)
    *reinterpret_cast<float4*>(out + SumsOrder<kD>::of_group(row / 16 % 4, i)) =
        make_float4(gradient[4 * i], gradient[4 * i + 1], gradient[4 * i + 2], gradient[4 * i + 3]);
}

__device__ __forceinline__ void store_gradient(const blockflash_attention_fwd_params& p,
                                               const float (&gradient)[kD / 2], float factor,
                                               void* tensor, int64_t batch, int64_t seq,
                                               int64_t head, int columns, int warp_row,
                                               const Keys& work) {
  Element* const out = static_cast<Element*>(tensor) +
                       work.batch * batch * (p.cu_seqlens_q == nullptr) + work.head_kv * head +
                       work.kv_offset * seq;
  store_rows<Element>(reinterpret_cast<const float(&)[1][kD / 8][4]>(gradient), factor, out, seq,
                      work.k_begin + warp_row, work.seqlen_kv, 0, columns, threadIdx.x % 32);
}
__device__ __forceinline__ void store_dk(const Params& params, const float (&dk)[kD / 2],
                                         int warp_row, const Keys& work = Keys::shared()) {
  if (params.head_parts > 1) return store_part(params, dk, 0, warp_row, work);
  const blockflash_attention_bwd_params& b = params.base;
  store_gradient(b.base, dk, b.base.scores.scale, b.dk, b.dk_stride_batch, b.dk_stride_seq,
                 b.dk_stride_head, b.base.head_dim_qk, warp_row, work);
}
__device__ __forceinline__ void store_dv(const Params& params, const float (&dv)[kD / 2],
                                         int warp_row, const Keys& work = Keys::shared()) {
  if (params.head_parts > 1) return store_part(params, dv, 1, warp_row, work);
  const blockflash_attention_bwd_params& b = params.base;
  store_gradient(b.base, dv, 1.f, b.dv, b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head,
                 b.base.head_dim_v, warp_row, work);
}

}  // namespace
}  // namespace blockflash

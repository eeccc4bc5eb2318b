// Attention backward with respect to the queries, for sm_80 and newer: dq = ds·k·scale.
//
// One CTA computes block_q queries of one head and walks their key tiles like the forward pass.
// Each warp owns block_q / warps queries, so scores, their gradients and dq stay in its registers;
// Q and dO stay in shared memory and K and V pass through it. Nothing is shared between CTAs, so
// the result has one order of summation.
#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/gradient_terms.cuh"
#include "blockflash/attention/visit.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/mma/products.cuh"
#include "blockflash/mma/tile_copy.cuh"
#include "blockflash/params/attention_bwd.h"

namespace blockflash {
namespace {

using Config = AttentionPortableConfig;
using Element = Config::Element;
using QueryWork = Work<Config::block_q>;
using KeyVisit = Visit<Config::block_q, Config::block_kv>;
using Params = ParamsFor<blockflash_attention_bwd_params, blockflash_attention_bwd_terms_params>;

constexpr int kChunks = Config::head_dim / 8;  // 16-byte chunks of a row
// Where dq of a warp's queries does not fit into its registers, warps share them and divide the
// columns of dq. Each computes all scores: that costs less than what they would tell each other.
constexpr int kSplit = Config::split;
constexpr int kRowsPerWarp = Config::block_q * kSplit / Config::warps;
constexpr int kMTiles = kRowsPerWarp / 16;              // MMA tiles of a warp along queries,
constexpr int kKvTiles = Config::block_kv / 8;          // along keys,
constexpr int kDTiles = Config::head_dim / kSplit / 8;  // and along the head dimension
constexpr int kDSteps = Config::head_dim / 16;
constexpr int kQTileBytes = Config::block_q * Config::head_dim * 2;
constexpr int kKvTileBytes = Config::block_kv * Config::head_dim * 2;
constexpr int kStageBytes = 2 * kKvTileBytes;  // K, then V

// Whether registers are short in the main loop: then the key tiles are read from shared memory, and
// places of copies are computed for each tile.
constexpr bool kShort = Config::head_dim == 128;

static_assert(kRowsPerWarp % 16 == 0, "a warp computes whole MMA tiles");
static_assert(!kHasTerms || (64 % Config::block_q == 0 && 64 % Config::block_kv == 0),
              "a tile of scores is inside 64 × 64 bits");
static_assert(Config::smem_bytes == 2 * kQTileBytes + Config::stages * kStageBytes,
              "manifest and kernel disagree on smem");

using QCopy = TileCopy<Config::block_q, kChunks, Config::threads>;
using KvCopy = TileCopy<Config::block_kv, kChunks, Config::threads>;

using Scores = float[kMTiles][kKvTiles][4];

// Turns scores into probabilities, which nobody needs here, and dp into gradients of the scores.
template <Pairs pairs, bool masked>
__device__ __forceinline__ void differentiate_tile(Scores& s, Scores& dp,
                                                   const blockflash_scores& scores,
                                                   const float (&negative_log)[kMTiles][2],
                                                   const float (&delta)[kMTiles][2],
                                                   const AttentionMask& mask, int first_row,
                                                   int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      KeyRange keys = {0, 0};
      if constexpr (masked)
        keys = mask.keys_of(first_row + m * 16 + accumulator_row(lane, 2 * half));
#pragma unroll
      for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int key = first_key + n * 8 + accumulator_column(lane, i);
          const bool visible = !masked || (key >= keys.begin && key < keys.end);
          differentiate<pairs>(s[m][n][i], dp[m][n][i], scores, negative_log[m][half],
                               delta[m][half], visible);
        }
    }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::Params all) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_attention_bwd_params& params = without_terms(all);
  const blockflash_attention_fwd_params& p = params.base;

  const KeyVisit visit = KeyVisit::agreed(p);
  const QueryWork& work = visit.work;
  if (work.q_begin >= work.seqlen_q) return;
  const AttentionMask mask = visit.mask(p);
  const KeyRange seen_by_all = mask.keys_of_all(work.q_begin, visit.q_last());
  const int tiles = visit.tiles;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_q = warp / kSplit, warp_d = warp % kSplit;
  const int first_row = work.q_begin + warp_q * kRowsPerWarp;
  const bool packed = p.cu_seqlens_q != nullptr;
  // The first element of a tensor's sequence and head.
  const auto at = [&](const void* tensor, int64_t batch, int64_t seq, int64_t head, int of_head,
                      int64_t row) {
    return static_cast<const Element*>(tensor) + (packed ? 0 : work.batch * batch) +
           of_head * head + row * seq;
  };
  const Element* const q = at(p.q, p.q_stride_batch, p.q_stride_seq, p.q_stride_head, work.head,
                              work.q_offset + work.q_begin);
  const Element* const d_o = at(params.d_o, params.d_o_stride_batch, params.d_o_stride_seq,
                                params.d_o_stride_head, work.head, work.q_offset + work.q_begin);
  const Element* const k =
      at(p.k, p.k_stride_batch, p.k_stride_seq, p.k_stride_head, work.head_kv, work.kv_offset);
  const Element* const v =
      at(p.v, p.v_stride_batch, p.v_stride_seq, p.v_stride_head, work.head_kv, work.kv_offset);

  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t d_o_smem = q_smem + kQTileBytes, ring = d_o_smem + kQTileBytes;
  const QCopy q_copy(threadIdx.x);
  const KvCopy kv_copy(threadIdx.x);

  // The i-th key tile in the order of visit goes to stage i % stages. Every call commits one group,
  // also past the end. Returns the tile's first key.
  const auto start_tile = [&](int i) {
    const KeyVisit& again = kShort ? KeyVisit::shared() : visit;
    const int first_key = again.first_key_of(i);
    if (i < tiles) {
      const uint32_t stage = ring + i % Config::stages * kStageBytes;
      const int rows = work.seqlen_kv - first_key;
      const KvCopy copy = kShort ? kv_copy.anew() : kv_copy;
      copy.start(stage, k + first_key * p.k_stride_seq, p.k_stride_seq, rows, p.head_dim_qk);
      copy.start(stage + kKvTileBytes, v + first_key * p.v_stride_seq, p.v_stride_seq, rows,
                 p.head_dim_v);
    }
    ptx::cp_async_commit_group();
    return first_key;
  };

  int bits[Config::stages];  // places of the bits of the tiles i to i + stages - 1
  const auto find_bits = [&](int i, int stage) {
    if constexpr (kHasTerms)
      with_terms(all, [&](const auto& all) {
        const KeyVisit& again = KeyVisit::shared();
        if (i < tiles)
          bits[stage] =
              bits_of_tile(all.terms.block_bits, all.terms.bit_tiles, p.block_mask, again.list,
                           again.last - i, again.work.q_begin, Config::block_kv);
      });
  };

  q_copy.start(q_smem, q, p.q_stride_seq, work.seqlen_q - work.q_begin, p.head_dim_qk);
  q_copy.start(d_o_smem, d_o, params.d_o_stride_seq, work.seqlen_q - work.q_begin, p.head_dim_v);
  int first_key[Config::stages];  // of the tiles i to i + stages - 1
#pragma unroll
  for (int i = 0; i + 1 < Config::stages; ++i) first_key[i] = start_tile(i), find_bits(i, i);

  // Rows past the end have a logarithm of infinity, so their probabilities are 0.
  float negative_log[kMTiles][2], delta[kMTiles][2];
  const int64_t statistics = work.batch * params.statistics_stride_batch * !packed +
                             work.head * params.statistics_stride_head +
                             statistics_row(packed, work.batch, work.q_offset);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + accumulator_row(lane, 2 * half);
      const bool inside = row < work.seqlen_q;
      negative_log[m][half] = inside ? params.negative_logs[statistics + row] : -CUDART_INF_F;
      delta[m][half] = inside ? params.deltas[statistics + row] : 0.f;
    }

  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const LaneAddress<kChunks> q_lane(q_smem, warp_q * kRowsPerWarp + row_major.row, row_major.chunk);
  const LaneAddress<kChunks> kv_lane(ring, col_major.row, col_major.chunk);
  // From the first column of this warp on.
  const LaneAddress<kChunks> k_rows_lane(ring, row_major.row, row_major.chunk + warp_d * kDTiles);

  float dq[kMTiles][kDTiles][4];
  clear(dq);
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const uint32_t stage = i % Config::stages * kStageBytes;
    if constexpr (Config::stages > 1) {
      ptx::cp_async_wait_group<Config::stages - 2>();
      __syncthreads();  // tile i is visible to all; all have read tile i - 1, which is refilled
                        // next
      first_key[Config::stages - 1] = start_tile(i + Config::stages - 1);
    } else {
      __syncthreads();  // all have read tile i - 1
      first_key[0] = start_tile(i);
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // tile i is visible to all
    }
    find_bits(i + Config::stages - 1, Config::stages - 1);
    PairBits pairs[kMTiles];  // visible ones
    if constexpr (kHasTerms)
      with_terms(all, [&](const auto& all) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
          pairs[m] = load_bits(all.terms.bits, bits[0], first_row + m * 16, first_key[0], lane);
      });
    Scores s, dp;
    multiply_transposed<Element, kDSteps>(s, q_lane, 0, kv_lane, 0, stage);
    multiply_transposed<Element, kDSteps>(dp, q_lane, kQTileBytes, kv_lane, 0,
                                          stage + kKvTileBytes);
    // The mask is read for each tile rather than kept: registers are short.
    const auto differentiate_by = [&](auto pairs, auto masked) {
      differentiate_tile<decltype(pairs)::value, decltype(masked)::value>(
          s, dp, p.scores, negative_log, delta, KeyVisit::shared().mask(p), first_row, first_key[0],
          lane);
    };
    bool large = false;  // whether a query is beyond `kFusedLimit`; not kept either
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
      large |= is_beyond_fused(negative_log[m][0]) || is_beyond_fused(negative_log[m][1]);
    const bool masked =
        first_key[0] < seen_by_all.begin || first_key[0] + Config::block_kv > seen_by_all.end;
    if constexpr (kHasTerms)
      with_terms(all, [&](const auto& all) {
        const KeyVisit& again = KeyVisit::shared();
        restrict_keys(pairs, again.mask(p), first_row, first_key[0], lane);
        differentiate_with_terms<false, false>(
            s, dp, p.scores, all.terms, again.work.batch, again.work.head,
            {first_row, first_key[0], again.work.seqlen_q, again.work.seqlen_kv}, pairs,
            __any_sync(~0u, large),
            [&](int m, int, float(&x)[2]) { x[0] = negative_log[m][0], x[1] = negative_log[m][1]; },
            [&](int m, int, float(&x)[2]) { x[0] = delta[m][0], x[1] = delta[m][1]; }, lane);
      });
    else if (p.scores.softcap > 0.f)
      differentiate_by(PairsAre<Pairs::kCapped>{}, std::true_type{});
    else if (__any_sync(~0u, large))
      differentiate_by(PairsAre<Pairs::kLarge>{}, std::true_type{});
    else if (masked)
      differentiate_by(PairsAre<Pairs::kPlain>{}, std::true_type{});
    else
      differentiate_by(PairsAre<Pairs::kPlain>{}, std::false_type{});
#pragma unroll
    for (int step = 0; step < Config::block_kv / 16; ++step) {
      uint32_t fragment[kMTiles][4];
      round_to_fragment<Element>(dp, step, fragment);
      accumulate_step<Element>(dq, fragment, k_rows_lane, step * 16, 0, stage);
    }
#pragma unroll
    for (int ahead = 0; ahead + 1 < Config::stages; ++ahead)
      first_key[ahead] = first_key[ahead + 1];
    if constexpr (kHasTerms) {
#pragma unroll
      for (int ahead = 0; ahead + 1 < Config::stages; ++ahead) bits[ahead] = bits[ahead + 1];
    }
  }
  ptx::cp_async_wait_group<0>();
  // Read once more rather than kept: registers are short in the main loop.
  const QueryWork& again = KeyVisit::shared().work;
  Element* const out = static_cast<Element*>(params.dq) +
                       again.batch * params.dq_stride_batch * !packed +
                       again.head * params.dq_stride_head + again.q_offset * params.dq_stride_seq;
  store_rows<Element>(dq, p.scores.scale, out, params.dq_stride_seq,
                      again.q_begin + warp_q * kRowsPerWarp, again.seqlen_q, warp_d * kDTiles * 8,
                      p.head_dim_qk, lane);
}

// Attention backward with respect to keys and values, for sm_80 and newer: dv = pᵀ·dO and
// dk = dsᵀ·q·scale.
//
// One CTA computes block_kv keys of one key head and walks the query tiles that see them, for one
// query head of the group after another. Scores are computed transposed, keys along the rows, so
// that probabilities and their gradients are operands of both products without a transposition.
// K and V stay in shared memory; Q and dO pass through it. Nothing is shared between CTAs, so the
// result has one order of summation.
#include "blockflash/attention/block_walk.cuh"
#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/gradient_terms.cuh"
#include "blockflash/attention/query_walk.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/mma/products.cuh"
#include "blockflash/mma/tile_copy.cuh"
#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {
namespace {

using Config = AttentionBwdKvConfig;
using Element = Config::Element;
using Keys = KeyWork<Config::block_kv>;
using Walk = QueryWalk<Config::block_q, Config::block_kv>;
using Params = ParamsFor<blockflash_attention_bwd_params, blockflash_attention_bwd_terms_params>;

// Warps divide the keys, and where accumulators for the whole head dimension do not fit into the
// registers of a warp, several warps share their keys and each accumulates a part of the columns.
// Pairs (warps_d = 2) also share the work on scores: each computes those of half of the queries and
// passes them through shared memory. Where a tile has too few queries for that, all compute all.
constexpr int kWarpsD = Config::warps_d, kWarpsKv = Config::warps / kWarpsD;
constexpr bool kExchanges = kWarpsD > 1 && Config::block_q / 16 >= kWarpsD;
constexpr int kScoreParts = kExchanges ? kWarpsD : 1;
constexpr int kRowsPerWarp = Config::block_kv / kWarpsKv;
constexpr int kMTiles = kRowsPerWarp / 16;
constexpr int kChunks = Config::head_dim / 8;
constexpr int kQTiles = Config::block_q / 8 / kScoreParts;  // MMA tiles of a warp along queries
constexpr int kDTiles = Config::head_dim / 8 / kWarpsD;     // and along the head dimension
constexpr int kDSteps = Config::head_dim / 16;
constexpr int kQSteps = Config::block_q / 16;
constexpr int kKvTileBytes = Config::block_kv * Config::head_dim * 2;
constexpr int kQTileBytes = Config::block_q * Config::head_dim * 2;
constexpr int kStatisticsBytes = Config::block_q * 4;
// A stage: Q, dO, negative logarithms, deltas.
constexpr int kStageBytes = 2 * kQTileBytes + 2 * kStatisticsBytes;
constexpr int kExchangeChunks = Config::block_q >= 32 ? Config::block_q / 8 : 4;
constexpr int kExchangeBytes = kExchanges ? Config::block_kv * Config::block_q * 2 : 0;

static_assert(kRowsPerWarp % 16 == 0 && kQTiles % 2 == 0, "a warp computes whole MMA tiles");
static_assert(!kHasTerms || (Config::block_kv <= 64 && Config::block_q <= 64),
              "a tile of scores is inside 64 × 64 bits");
static_assert(kStatisticsTile % Config::block_q == 0, "statistics are padded to whole tiles");
static_assert(Config::smem_bytes ==
                  2 * kKvTileBytes + Config::stages * kStageBytes + 2 * kExchangeBytes,
              "manifest and kernel disagree on smem");

using KvCopy = TileCopy<Config::block_kv, kChunks, Config::threads>;
using QCopy = TileCopy<Config::block_q, kChunks, Config::threads>;
// Whether addresses that depend on the lane are computed in the loop: hoisted out of it they are
// spilled for sm_120 at this head_dim.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1200
constexpr bool kIsShort = Config::head_dim == 128;
#else
constexpr bool kIsShort = false;
#endif

using Scores = float[kMTiles][kQTiles][4];
using Gradient = float[kMTiles][kDTiles][4];

// Turns transposed scores into probabilities and dp into gradients of the scores. A lane has two
// neighbouring queries of each MMA tile.
template <Pairs pairs, bool masked>
__device__ __forceinline__ void differentiate_tile(Scores& s, Scores& dp,
                                                   const blockflash_scores& scores,
                                                   uint32_t statistics, const QueryRange& range,
                                                   int first_key, int first_query, int lane) {
#pragma unroll
  for (int n = 0; n < kQTiles; ++n) {
    const uint32_t at = statistics + (n * 8 + accumulator_column(lane, 0)) * 4;
    float negative_log[2], delta[2];
    ptx::load_shared_float2(negative_log, at);
    ptx::load_shared_float2(delta, at + kStatisticsBytes);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool visible = true;
        if constexpr (masked) {
          const KeyRange queries = range.queries_of(first_key + m * 16 + accumulator_row(lane, i));
          const int query = first_query + n * 8 + accumulator_column(lane, i);
          visible = query >= queries.begin && query < queries.end;
        }
        differentiate<pairs>(s[m][n][i], dp[m][n][i], scores, negative_log[i % 2], delta[i % 2],
                             visible);
      }
  }
}

// Writes this warp's part of a transposed tile of scores in 16 bits.
__device__ __forceinline__ void store_exchange(const Scores& s, uint32_t tile, int row0, int chunk0,
                                               int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kQTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(tile +
                              Swizzle<kExchangeChunks>::offset(
                                  row0 + m * 16 + accumulator_row(lane, 2 * half), chunk0 + n) +
                              accumulator_column(lane, 0) * 2,
                          ElementTraits<Element>::pack(s[m][n][2 * half], s[m][n][2 * half + 1]));
}

// gradient += a·b, where `a` are the scores of this warp in registers or of a pair of warps in
// shared memory.
__device__ __forceinline__ void accumulate(Gradient& gradient, const Scores& a,
                                           const LaneAddress<kExchangeChunks>& exchange,
                                           uint32_t exchange_offset, const LaneAddress<kChunks>& b,
                                           uint32_t offset) {
#pragma unroll
  for (int step = 0; step < kQSteps; ++step) {
    uint32_t fragment[kMTiles][4];
    if constexpr (!kExchanges) {
      round_to_fragment<Element>(a, step, fragment);
    } else {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
        ptx::ldmatrix_x4(fragment[m], exchange.at(m * 16, step) + exchange_offset);
    }
    accumulate_step<Element>(gradient, fragment, b, step * 16, 0, offset);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::Params all) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_attention_bwd_params& params = without_terms(all);
  const blockflash_attention_fwd_params& p = params.base;

  const Keys work = Keys::agreed([&] { return Keys(params); });
  if (work.k_begin >= work.seqlen_kv) return;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_kv = warp / kWarpsD, warp_d = warp % kWarpsD;
  const int warp_row = warp_kv * kRowsPerWarp;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int head_group = p.num_heads_q / p.num_heads_kv;
  const auto at = [&](const void* tensor, int64_t batch, int64_t seq, int64_t head, int of_head,
                      int64_t row) {
    return static_cast<const Element*>(tensor) + (packed ? 0 : work.batch * batch) +
           of_head * head + row * seq;
  };

  const uint32_t k_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t v_smem = k_smem + kKvTileBytes, ring = v_smem + kKvTileBytes;
  const uint32_t exchange = ring + Config::stages * kStageBytes;
  const KvCopy kv_copy(threadIdx.x);
  const QCopy q_copy(threadIdx.x);
  kv_copy.start(k_smem,
                at(p.k, p.k_stride_batch, p.k_stride_seq, p.k_stride_head, work.head_kv,
                   work.kv_offset + work.k_begin),
                p.k_stride_seq, work.seqlen_kv - work.k_begin, p.head_dim_qk);
  kv_copy.start(v_smem,
                at(p.v, p.v_stride_batch, p.v_stride_seq, p.v_stride_head, work.head_kv,
                   work.kv_offset + work.k_begin),
                p.v_stride_seq, work.seqlen_kv - work.k_begin, p.head_dim_v);

  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const LaneAddress<kChunks> k_lane(k_smem, warp_row + row_major.row, row_major.chunk);
  const LaneAddress<kChunks> q_lane(ring, col_major.row, col_major.chunk);
  // From the first column of this warp on, so that no address depends on the warp further below.
  const LaneAddress<kChunks> q_rows_lane(ring, row_major.row, row_major.chunk + warp_d * kDTiles);
  const LaneAddress<kExchangeChunks> p_lane(exchange, warp_row + row_major.row, row_major.chunk);

  // From a register: read where it is used, it takes more of them.
  blockflash_scores scores = p.scores;
  scores.scale_log2 = ptx::opaque(scores.scale_log2);

  Gradient dk, dv;
  clear(dk), clear(dv);
#pragma unroll 1
  for (int member = 0; member < head_group; ++member) {
    const int head = work.head_kv * head_group + member;
    const Walk& walk = Walk::agreed(params, work, head);
    const Element* const q =
        at(p.q, p.q_stride_batch, p.q_stride_seq, p.q_stride_head, head, work.q_offset);
    const Element* const d_o = at(params.d_o, params.d_o_stride_batch, params.d_o_stride_seq,
                                  params.d_o_stride_head, head, work.q_offset);
    const int64_t statistics = work.batch * params.statistics_stride_batch * !packed +
                               head * params.statistics_stride_head +
                               statistics_row(packed, work.batch, work.q_offset);
    // The i-th query tile goes to stage i % stages. Every call commits one group, also past the
    // end. Returns the tile's first query.
    const auto start_tile = [&](int i) {
      const int first = i < walk.tiles ? walk.first_query(i, Keys::shared().seqlen_q) : 0;
      if (i < walk.tiles) {
        const uint32_t stage = ring + i % Config::stages * kStageBytes;
        const int rows = work.seqlen_q - first;
        // At 64 the kernel is short of registers.
        const QCopy copy = Config::head_dim == 64 ? q_copy.anew() : q_copy;
        copy.start(stage, q + first * p.q_stride_seq, p.q_stride_seq, rows, p.head_dim_qk);
        copy.start(stage + kQTileBytes, d_o + first * params.d_o_stride_seq, params.d_o_stride_seq,
                   rows, p.head_dim_v);
        if (threadIdx.x < Config::block_q) {
          const uint32_t to = stage + 2 * kQTileBytes + threadIdx.x * 4;
          ptx::cp_async_ca_4(to, params.negative_logs + statistics + first + threadIdx.x);
          ptx::cp_async_ca_4(to + kStatisticsBytes,
                             params.deltas + statistics + first + threadIdx.x);
        }
      }
      ptx::cp_async_commit_group();
      return first;
    };
    int bits[Config::stages];  // places of the bits of the tiles i to i + stages - 1
    const auto find_bits = [&](int i, int stage) {
      if constexpr (kHasTerms)
        with_terms(all, [&](const auto& all) {
          if (i < walk.tiles)
            bits[stage] = bits_of_tile(all.block_bits_t, all.bit_tiles_t, params.block_mask_t,
                                       walk.list, walk.first + i, work.k_begin, Config::block_q);
        });
    };
    int first_query[Config::stages];  // of the tiles i to i + stages - 1
#pragma unroll
    for (int i = 0; i + 1 < Config::stages; ++i) first_query[i] = start_tile(i), find_bits(i, i);
#pragma unroll 1
    for (int i = 0; i < walk.tiles; ++i) {
      const uint32_t stage = i % Config::stages * kStageBytes;
      if constexpr (Config::stages > 1) {
        ptx::cp_async_wait_group<Config::stages - 2>();
        __syncthreads();  // tile i is visible to all; all have read tile i - 1, refilled next
        first_query[Config::stages - 1] = start_tile(i + Config::stages - 1);
      } else {
        __syncthreads();  // all have read tile i - 1
        first_query[0] = start_tile(i);
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // tile i is visible to all
      }
      // Read for each tile rather than kept: registers are short in the main loop.
      const QueryRange range = Keys::shared().range(p);
      // First query of this warp's scores in the tile.
      const int part = warp_d % kScoreParts * kQTiles * 8;
      find_bits(i + Config::stages - 1, Config::stages - 1);
      PairBits pairs[kMTiles];  // visible ones
      if constexpr (kHasTerms)
        with_terms(all, [&](const auto& all) {
#pragma unroll
          for (int m = 0; m < kMTiles; ++m)
            pairs[m] = load_bits(all.bits_t, bits[0], work.k_begin + warp_row + m * 16,
                                 first_query[0] + part, lane);
        });
      Scores s, dp;
      multiply_transposed<Element, kDSteps>(s, k_lane, 0, q_lane, part, stage);
      multiply_transposed<Element, kDSteps>(dp, k_lane, kKvTileBytes, q_lane, part,
                                            stage + kQTileBytes);
      const auto differentiate_by = [&](auto pairs, auto masked) {
        differentiate_tile<decltype(pairs)::value, decltype(masked)::value>(
            s, dp, scores, ring + stage + 2 * kQTileBytes + part * 4, range,
            work.k_begin + warp_row, first_query[0] + part, kIsShort ? ptx::opaque(lane) : lane);
      };
      const bool masked =
          range.is_masked(work.k_begin, Config::block_kv, first_query[0], Config::block_q);
      const uint32_t logs = ring + stage + 2 * kQTileBytes;
      bool large = false;  // whether a query is beyond `kFusedLimit`
#pragma unroll
      for (int q = lane; q < Config::block_q; q += kWarpSize)
        large |= is_beyond_fused(__uint_as_float(ptx::load_shared(logs + 4 * q)));
      if constexpr (kHasTerms)
        with_terms(all, [&](const auto& all) {
          const int first_row = work.k_begin + warp_row, first_col = first_query[0] + part;
          const auto statistics_at = [&](int n) {
            return logs + (part + n * 8 + accumulator_column(lane, 0)) * 4;
          };
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            const int key = first_row + m * 16 + accumulator_row(lane, 0);
            pairs[m] &=
                bits_of_ranges(range.queries_of(key), range.queries_of(key + 8), first_col, lane);
          }
          differentiate_with_terms<true, false>(
              s, dp, scores, all.terms, work.batch, head,
              {first_row, first_col, work.seqlen_kv, work.seqlen_q}, pairs, __any_sync(~0u, large),
              [&](int, int n, float(&x)[2]) { ptx::load_shared_float2(x, statistics_at(n)); },
              [&](int, int n, float(&x)[2]) {
                ptx::load_shared_float2(x, statistics_at(n) + kStatisticsBytes);
              },
              lane);
        });
      else if (p.scores.softcap > 0.f)
        differentiate_by(PairsAre<Pairs::kCapped>{}, std::true_type{});
      else if (__any_sync(~0u, large))
        differentiate_by(PairsAre<Pairs::kLarge>{}, std::true_type{});
      else if (masked)
        differentiate_by(PairsAre<Pairs::kPlain>{}, std::true_type{});
      else
        differentiate_by(PairsAre<Pairs::kPlain>{}, std::false_type{});
      if constexpr (kExchanges) {
        store_exchange(s, exchange, warp_row, warp_d * kQTiles, lane);
        store_exchange(dp, exchange + kExchangeBytes, warp_row, warp_d * kQTiles, lane);
        // The warps that share these keys have written both halves. The barrier at the head of the
        // loop keeps them from overwriting what another still reads.
        ptx::named_barrier_sync(1 + warp_kv, kWarpsD * kWarpSize);
      }
      accumulate(dv, s, p_lane, 0, q_rows_lane, stage + kQTileBytes);
      accumulate(dk, dp, p_lane, kExchangeBytes, q_rows_lane, stage);
#pragma unroll
      for (int ahead = 0; ahead + 1 < Config::stages; ++ahead)
        first_query[ahead] = first_query[ahead + 1];
      if constexpr (kHasTerms) {
#pragma unroll
        for (int ahead = 0; ahead + 1 < Config::stages; ++ahead) bits[ahead] = bits[ahead + 1];
      }
    }
    ptx::cp_async_wait_group<0>();
  }
  const Keys& again = Keys::shared();
  const auto store = [&](const Gradient& gradient, float factor, void* tensor, int64_t batch,
                         int64_t seq, int64_t head, int columns) {
    Element* const out = static_cast<Element*>(tensor) + again.batch * batch * !packed +
                         again.head_kv * head + again.kv_offset * seq;
    store_rows<Element>(gradient, factor, out, seq, again.k_begin + warp_row, again.seqlen_kv,
                        warp_d * kDTiles * 8, columns, lane);
  };
  store(dv, 1.f, params.dv, params.dv_stride_batch, params.dv_stride_seq, params.dv_stride_head,
        p.head_dim_v);
  store(dk, p.scores.scale, params.dk, params.dk_stride_batch, params.dk_stride_seq,
        params.dk_stride_head, p.head_dim_qk);
}

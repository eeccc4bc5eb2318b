// Attention backward with respect to the queries on Hopper: dq = ds·k·scale.
//
// A CTA owns 128 queries of one head and visits their key tiles like the forward pass. Q and dO
// stay in shared memory, K and V pass through it; scores, their gradients and dq stay in registers.
// Nothing is shared between CTAs, so the result has one order of summation.
//
// Behind the kernel for dk and dv it may start as soon as all CTAs of that one run, which have
// waited for the statistics: only their SMs are missing then.
#include "blockflash/attention/gradient_fragments.cuh"
#include "blockflash/attention/gradient_ring_terms.cuh"
#include "blockflash/attention/visible.cuh"
#include "blockflash/attention/visit.cuh"
#include "blockflash/params/attention_bwd.h"

namespace blockflash {
namespace {

static_assert(kD == kDV, "the tiles of one side have one shape");

// Whether Q and dO are multiplied from registers.
constexpr bool kQueriesInRegisters = kAlone;

using KeyVisit = Visit<kResidentRows, kStreamRows>;

__device__ __forceinline__ void produce(const Params& params, const KeyVisit& visit, uint32_t smem,
                                        const Barriers& barriers) {
  const blockflash_attention_fwd_params& p = params.base.base;
  const Work<kResidentRows>& work = visit.work;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : work.batch;
  const auto copy_resident = [&](int which, const blockflash_tensor_map& map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_tx(barrier, kResidentBytes);
    copy_tile<kResidentRows, 64>(smem + which * kResidentBytes, map,
                                 static_cast<int>(work.q_offset) + work.q_begin, work.head, batch,
                                 barrier);
  };
  const uint32_t k_arrives = packed ? barriers.loaded_first : barriers.first;
  copy_resident(0, params.q, packed ? barriers.loaded_resident : barriers.resident);
  float slope = 0.f;
  if constexpr (kHasTerms) slope = slope_of(terms_of(params).terms, work.batch, work.head);
  auto k_at = PipelineState<kStages>::producer();
  auto v_at = PipelineState<kSecondStages>::producer();
#pragma unroll 1
  for (int i = 0; i < visit.tiles; ++i) {
    const int first = visit.list.tile_at(visit.last - i) * kStreamRows;
    const int row = static_cast<int>(work.kv_offset) + first;
    TileTerms terms;
    if constexpr (kHasTerms) {
      const blockflash_score_terms& all = terms_of(params).terms;
      terms.bits = bits_of_tile(all.block_bits, all.bit_tiles, p.block_mask, visit.list,
                                visit.last - i, work.q_begin, kStreamRows);
      terms.slope = slope;
    }
    const auto copy = [&](uint32_t barrier, uint32_t dst, const blockflash_tensor_map& map) {
      ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes);
      copy_tile<kStreamRows, kStreamRows>(dst, map, row, work.head_kv, batch, barrier);
    };
    k_at.wait(barriers.first_empty);
    publish_tile(smem, k_at.stage, first);
    if constexpr (kHasTerms) terms.publish(smem, k_at.stage);
    copy(k_at.of(k_arrives), smem + kFirstOffset + k_at.stage * kStreamBytes, params.k);
    if (i == 0) copy_resident(1, params.d_o, barrier_of(barriers.resident, 1));
    v_at.wait(barriers.second_empty);
    copy(v_at.of(barriers.second), smem + kSecondOffset + v_at.stage * kStreamBytes, params.v);
    k_at.advance(), v_at.advance();
  }
  // Nobody waits for Q where there are no tiles. Shared memory must not be given back before.
  if (visit.tiles <= 0) wait_full<1>(barriers.resident, 0);
  k_at.wait(barriers.first_empty);
  publish_tile(smem, k_at.stage, -1);
  ptx::mbarrier_arrive(k_at.of(k_arrives));
  // This kernel may run beside the one for dk and dv, but ends after it, so that what comes next
  // can rely on both.
  ptx::wait_for_predecessors();
}

// One consumer warpgroup: 64 queries. Of the 16 queries of a warp, a lane holds g and g + 8
// (g = lane / 4) in every accumulator.
__device__ __forceinline__ void consume(const Params& params, uint32_t smem,
                                        const Barriers& barriers, int warpgroup) {
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int warp_row = warpgroup * 64 + warp * 16;
  const GradientPingPong ping_pong{warpgroup};
  float s[kStreamRows / 2], dp[kStreamRows / 2], dq[kD / 2];
  uint32_t p16[kStreamRows / 4], ds16[kStreamRows / 4];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dq[i] = 0.f;

  // Rows past the end have a logarithm of infinity, so their probabilities are 0.
  float logs[2], deltas[2];
  {
    const Work<kResidentRows>& work = KeyVisit::shared().work;
    const int64_t statistics = work.batch * b.statistics_stride_batch * !packed +
                               work.head * b.statistics_stride_head +
                               statistics_row(packed, work.batch, work.q_offset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.q_begin + warp_row + accumulator_row(lane, 2 * half);
      const bool inside = row < work.seqlen_q;
      // Past L1, since the kernel that wrote them is not the one before this one.
      logs[half] = inside ? __ldcg(b.negative_logs + statistics + row) : -CUDART_INF_F;
      deltas[half] = inside ? __ldcg(b.deltas + statistics + row) : 0.f;
    }
  }
  const uint32_t q = ptx::wgmma_low(smem + warpgroup * 64 * 128), d_o = q + (kResidentBytes >> 4);
  const uint32_t k = ptx::wgmma_low(smem + kFirstOffset),
                 k_rows = ptx::wgmma_low(smem + kFirstOffset, kStreamPanel),
                 v = ptx::wgmma_low(smem + kSecondOffset);
  const auto release = [&](uint32_t barriers_of_ring, int stage) {
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers_of_ring, stage));
  };
  const bool large = __any_sync(~0u, is_beyond_fused(logs[0]) || is_beyond_fused(logs[1]));
  const auto load = [&](const float(&of_rows)[2]) {
    return [&](int, float(&x)[2]) { x[0] = of_rows[0], x[1] = of_rows[1]; };
  };

  ping_pong.open();
  auto k_at = PipelineState<kStages>::consumer();
  auto v_at = PipelineState<kSecondStages>::consumer();
  int before = -1;  // stage of K of the tile before
  Fragments of_q, of_d_o;
  if (kQueriesInRegisters && KeyVisit::shared().tiles > 0) {
    wait_full<1>(barriers.resident, 0), wait_full<1>(barrier_of(barriers.resident, 1), 0);
    load_fragments(of_q, smem), load_fragments(of_d_o, smem + kResidentBytes);
  }
#pragma unroll 1
  while (true) {
    k_at.wait(barriers.first);
    const int first_key = published_row(smem, k_at.stage);
    if (first_key < 0) break;
    if (!kQueriesInRegisters && before < 0) wait_full<1>(barriers.resident, 0);
    const uint32_t k_stage = k_at.stage * (kStreamBytes >> 4);
    ptx::wgmma_fence();
    if constexpr (kQueriesInRegisters)
      start_scores<kStreamRows>(s, of_q, k + k_stage, kStreamPanel);
    else
      start_scores<kStreamRows>(s, q, kResidentPanel, k + k_stage, kStreamPanel);
    StreamPairs pairs;
    if constexpr (kHasTerms) {
      const blockflash_score_terms& terms = terms_of(params).terms;
      pairs = pairs.load(terms.bits, terms.bit_tiles, published_bits(smem, k_at.stage), warpgroup,
                         p.block_mask.block_kv / 64);
    }
    // The scores are queued behind the gradient of the tile before, whose stage is now read.
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(dq);
    if (before >= 0) release(barriers.first_empty, before);
    v_at.wait(barriers.second);
    if (!kQueriesInRegisters && before < 0) wait_full<1>(barrier_of(barriers.resident, 1), 0);
    const uint32_t v_stage = v_at.stage * (kStreamBytes >> 4);
    ptx::wgmma_fence();
    if constexpr (kQueriesInRegisters)
      start_scores<kStreamRows>(dp, of_d_o, v + v_stage, kStreamPanel);
    else
      start_scores<kStreamRows>(dp, d_o, kResidentPanel, v + v_stage, kStreamPanel);
    ping_pong.arrive();

    const KeyVisit& visit = KeyVisit::shared();
    const AttentionMask mask = visit.mask(p);
    const KeyRange all = mask.keys_of_all(visit.work.q_begin, visit.q_last());
    Visible visible;
    visible.masked = first_key < all.begin || first_key + kStreamRows > all.end;
    if (visible.masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange keys =
            mask.keys_of(visit.work.q_begin + warp_row + accumulator_row(lane, 2 * half));
        const int first = first_key + accumulator_column(lane, 0);
        visible.bits[half] = visible_keys(keys.begin - first, keys.end - first);
      }
    }
    const auto read = [&] { release(barriers.second_empty, v_at.stage); };
    if constexpr (kHasTerms) {
      pairs.restrict(visible);
      const auto alibi = [&] {
        return LaneAlibi(published_slope(smem, k_at.stage), p.scores,
                         visit.work.q_begin + warp_row + accumulator_row(lane, 0),
                         visit.work.seqlen_q, first_key + accumulator_column(lane, 0),
                         visit.work.seqlen_kv);
      };
      differentiate_with_terms<true>(s, dp, p16, ds16, p.scores, large,
                                     AddedAlibi{terms_of(params).terms.alibi != nullptr, alibi},
                                     pairs, load(logs), load(deltas), read);
    } else {
      differentiate_scores<true>(s, dp, p16, ds16, p.scores, large, visible, load(logs),
                                 load(deltas), read);
    }

    ping_pong.sync();
    ptx::wgmma_fence();
    start_gradient<kStreamRows / 16>(dq, ds16, k_rows + k_stage);
    ptx::wgmma_commit_group();
    before = k_at.stage;
    k_at.advance(), v_at.advance();
  }
  ping_pong.close();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dq);

  const Work<kResidentRows>& work = KeyVisit::shared().work;
  Element* const out = static_cast<Element*>(b.dq) + work.batch * b.dq_stride_batch * !packed +
                       work.head * b.dq_stride_head + work.q_offset * b.dq_stride_seq;
  store_rows<Element>(reinterpret_cast<const float(&)[1][kD / 8][4]>(dq), p.scores.scale, out,
                      b.dq_stride_seq, work.q_begin + warp_row, work.seqlen_q, 0, p.head_dim_qk,
                      lane);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::KernelParams all) {
  using namespace blockflash;
  const Params& params = base_of(all);
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) barriers.init();
  const KeyVisit visit = KeyVisit::agreed(params.base.base);
  if (visit.work.q_begin >= visit.work.seqlen_q) {
    ptx::wait_for_predecessors();
    return;
  }
  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(params, visit, smem, barriers);
    // The products with V do not sum over keys. Rows of queries are cleared without need.
    const Work<kResidentRows>& work = KeyVisit::shared().work;
    if (threadIdx.x >= 96 && params.base.base.cu_seqlens_q != nullptr)
      zero_fill_tiles<false>(smem, barriers, work.seqlen_q - work.q_begin, work.seqlen_kv);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume(params, smem, barriers, warpgroup - 1);
  }
}

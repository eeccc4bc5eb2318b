// Attention backward with respect to keys and values on Hopper: dv = pᵀ·dO and
// dk = dsᵀ·q·softmax_scale.
//
// A CTA owns 128 keys of one key head and visits the query tiles that see them, for one query head
// of the group after another. Scores are computed transposed, keys along the rows, so that
// probabilities and their gradients are operands of both products in the registers where they
// arise. Nothing is shared between CTAs, so the result has one order of summation.
#include "blockflash/attention/gradient_ring.cuh"
#include "blockflash/attention/query_walk.cuh"
#include "blockflash/attention/visible.cuh"

namespace blockflash {
namespace {

static_assert(kStreamRows == 64, "a lane has 16 queries of each of its keys");
using Keys = KeyWork<kResidentRows>;
using Walk = QueryWalk<kStreamRows, kResidentRows>;

__device__ __forceinline__ void produce(const Params& params, const Keys& work, uint32_t smem,
                                        const Barriers& barriers) {
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : work.batch;
  const int head_group = p.num_heads_q / p.num_heads_kv;
  const auto copy_resident = [&](int which, const blockflash_tensor_map& map) {
    ptx::mbarrier_arrive_expect_tx(barriers.resident + 8 * which, kResidentBytes);
    copy_tile<kResidentRows, kResidentRows>(smem + which * kResidentBytes, map,
                                            static_cast<int>(work.kv_offset) + work.k_begin,
                                            work.head_kv, batch, barriers.resident + 8 * which);
  };
  copy_resident(0, params.k);
  bool values_wanted = true;
  Position at{0, 1};
#pragma unroll 1
  for (int member = 0; member < head_group; ++member) {
    const int head = work.head_kv * head_group + member;
    const Walk walk(b, work, head);
    const int64_t statistics = work.batch * b.statistics_stride_batch * !packed +
                               head * b.statistics_stride_head +
                               statistics_row(packed, work.batch, work.q_offset);
#pragma unroll 1
    for (int i = 0; i < walk.tiles; ++i) {
      const int first = walk.list.tile_at(walk.first + i) * kStreamRows;
      const int row = static_cast<int>(work.q_offset) + first;
      const uint32_t stage = smem + kRingOffset + at.stage * kStageBytes,
                     saved = smem + kStatisticsOffset + at.stage * 2 * kStatisticsBytes;
      at.wait(barriers.empty);
      announce(smem, at.stage, first);
      const auto copy = [&](uint32_t barrier, uint32_t dst, const blockflash_tensor_map& map,
                            uint32_t statistics_dst, const float* statistics_src) {
        ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes + kStatisticsBytes);
        copy_tile<kStreamRows, 64>(dst, map, row, head, batch, barrier);
        ptx::bulk_copy(statistics_dst, statistics_src + statistics + first, kStatisticsBytes,
                       barrier);
      };
      copy(barriers.first + 8 * at.stage, stage, params.q, saved, b.negative_logs);
      if (values_wanted) copy_resident(1, params.v), values_wanted = false;
      copy(barriers.second + 8 * at.stage, stage + kStreamBytes, params.d_o,
           saved + kStatisticsBytes, b.deltas);
      at.advance();
    }
  }
  at.wait(barriers.empty);
  announce(smem, at.stage, -1);
  ptx::mbarrier_arrive(barriers.first + 8 * at.stage);
}

// One consumer warpgroup: 64 keys. Of the 16 keys of a warp, a lane holds g and g + 8
// (g = lane / 4) in every accumulator.
__device__ __forceinline__ void consume(const Params& params, uint32_t smem,
                                        const Barriers& barriers, int warpgroup) {
  const blockflash_attention_fwd_params& p = params.base.base;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int warp_row = warpgroup * 64 + warp * 16;
  const ScoreScale scale(p);
  const Turns turns{warpgroup};
  float s[kStreamRows / 2], dp[kStreamRows / 2], dk[kD / 2], dv[kD / 2];
  uint32_t p16[kStreamRows / 4], ds16[kStreamRows / 4];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.f;

  const uint32_t k = ptx::wgmma_low(smem + warpgroup * 64 * 128),
                 v = k + (kResidentBytes >> 4);
  const uint32_t q = ptx::wgmma_low(smem + kRingOffset),
                 q_rows = ptx::wgmma_low(smem + kRingOffset, kStreamPanel);
  const auto release = [&](int stage) {
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty + 8 * stage);
  };

  turns.open();
  Position at{0, 0};
  int before = -1;  // stage of the tile before
#pragma unroll 1
  while (true) {
    at.wait(barriers.first);
    const int first_query = announced(smem, at.stage);
    if (first_query < 0) break;
    if (before < 0) ptx::mbarrier_wait(barriers.resident, 0);
    const uint32_t stage = at.stage * (kStageBytes >> 4);
    ptx::wgmma_fence();
    start_scores<kStreamRows>(s, k, kResidentPanel, q + stage, kStreamPanel);
    // The scores are queued behind the gradients of the tile before, whose stage is now read.
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(dk), ptx::wgmma_pin(dv);
    if (before >= 0) release(before);
    at.wait(barriers.second);
    if (before < 0) ptx::mbarrier_wait(barriers.resident + 8, 0);
    ptx::wgmma_fence();
    start_scores<kStreamRows>(dp, v, kResidentPanel, q + stage + (kStreamBytes >> 4), kStreamPanel);
    turns.end();

    const QueryRange range = Keys::shared().range(p);
    const int k_begin = Keys::shared().k_begin;
    Visible visible;
    visible.masked = range.is_masked(k_begin, kResidentRows, first_query, kStreamRows);
    if (visible.masked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange queries =
            range.queries_of(k_begin + warp_row + accumulator_row(lane, 2 * half));
        const int first = first_query + accumulator_column(lane, 0);
        visible.bits[half] = visible_keys(queries.begin - first, queries.end - first);
      }
    }
    const uint32_t statistics = smem + kStatisticsOffset + at.stage * 2 * kStatisticsBytes +
                                accumulator_column(lane, 0) * 4;
    const auto load = [&](int offset) {
      return [=](int j, float (&x)[2]) { ptx::load_shared_float2(x, statistics + offset + j * 32); };
    };
    differentiate_scores<false>(s, dp, p16, ds16, scale, visible, load(0), load(kStatisticsBytes));

    turns.begin();
    ptx::wgmma_fence();
    start_gradient<kStreamRows / 16>(dv, p16, q_rows + stage + (kStreamBytes >> 4));
    start_gradient<kStreamRows / 16>(dk, ds16, q_rows + stage);
    ptx::wgmma_commit_group();
    before = at.stage;
    at.advance();
  }
  turns.close();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(dk), ptx::wgmma_pin(dv);

  const Keys& work = Keys::shared();
  const bool packed = p.cu_seqlens_q != nullptr;
  const auto store = [&](const float (&gradient)[kD / 2], float factor, void* tensor, int64_t batch,
                         int64_t seq, int64_t head) {
    Element* const out = static_cast<Element*>(tensor) + work.batch * batch * !packed +
                         work.head_kv * head + work.kv_offset * seq;
    store_rows<Element>(reinterpret_cast<const float(&)[1][kD / 8][4]>(gradient), factor, out, seq,
                        work.k_begin + warp_row, work.seqlen_kv, 0, p.head_dim, lane);
  };
  const blockflash_attention_bwd_params& b = params.base;
  store(dv, 1.f, b.dv, b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head);
  store(dk, p.softmax_scale, b.dk, b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) barriers.init();
  const Keys work = Keys::agreed(params.base);
  if (work.k_begin >= work.seqlen_kv) return;
  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(params, work, smem, barriers);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume(params, smem, barriers, warpgroup - 1);
  }
}

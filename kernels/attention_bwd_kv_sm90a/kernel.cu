// Attention backward with respect to keys and values on Hopper: dv = pᵀ·dO and
// dk = dsᵀ·q·softmax_scale.
//
// A CTA owns 128 keys of one key head (64 beyond a head_dim of 128) and visits the query tiles that
// see them, for one query head of the group after another. Scores are computed transposed, keys
// along the rows, so that probabilities and their gradients are operands of both products in the
// registers where they arise. Nothing is shared between CTAs, so the result has one order of
// summation.
#include "blockflash/params/attention_bwd.h"
#include "consumer.cuh"
#include "consumer_apart.cuh"
#include "consumer_pair.cuh"
#include "consumer_tall.cuh"
#include "consumer_turns.cuh"

namespace blockflash {
namespace {

__device__ __forceinline__ void produce(const Params& params, uint32_t smem,
                                        const Barriers& barriers) {
  const Keys& work = Keys::shared();
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : work.batch;
  const int head_group = p.num_heads_q / p.num_heads_kv;
  const auto copy_resident = [&](int which, const blockflash_tensor_map& map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_tx(barrier, kResidentBytes);
    copy_tile<kResidentRows, kResidentRows>(smem + which * kResidentBytes, map,
                                            static_cast<int>(work.kv_offset) + work.k_begin,
                                            work.head_kv, batch, barrier);
  };
  const uint32_t first_arrives = packed ? barriers.cut_first : barriers.first,
                 second_arrives = packed ? barriers.cut_second : barriers.second;
  copy_resident(0, params.k, packed ? barriers.cut_resident : barriers.resident);
  bool values_wanted = true;
  Position<kStages> at(1);
  int n = 0;  // number of the tile
#pragma unroll 1
  for (int member = 0; member < head_group; ++member) {
    const int head = work.head_kv * head_group + member;
    const Walk walk(b, work, head);
    const int64_t statistics = work.batch * b.statistics_stride_batch * !packed +
                               head * b.statistics_stride_head +
                               statistics_row(packed, work.batch, work.q_offset);
#pragma unroll 1
    for (int i = 0; i < walk.tiles; ++i) {
      const int first = walk.first_query(i, work.seqlen_q);
      const int row = static_cast<int>(work.q_offset) + first;
      const auto copy = [&](uint32_t barrier, uint32_t dst, const blockflash_tensor_map& map,
                            uint32_t statistics_dst, const float* statistics_src) {
        ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes + kStatisticsBytes);
        copy_tile<kStreamRows, 64>(dst, map, row, head, batch, barrier);
        copy_statistics(statistics_dst, statistics_src + statistics + first, work.seqlen_q - first,
                        barrier);
      };
      at.wait(barriers.first_empty);
      announce(smem, at.stage, first);
      if constexpr (Config::dq)
        TurnBarriers(smem).announce(n++, static_cast<int>((statistics + first) / kStatisticsTile),
                                    first);
      copy(first_arrives + 8 * at.stage, smem + kFirstOffset + at.stage * kStreamBytes, params.q,
           first_statistics(smem, at.stage), b.negative_logs);
      if (values_wanted) copy_resident(1, params.v, barriers.resident + 8), values_wanted = false;
      const int second = second_stage(at.stage);
      ptx::mbarrier_wait(barriers.second_empty + 8 * second,
                         kOneSecondStage ? at.stage ^ 1 : at.parity);
      copy(second_arrives + 8 * second, smem + kSecondOffset + second * kStreamBytes, params.d_o,
           second_statistics(smem, second), b.deltas);
      at.advance();
    }
  }
  // Nobody waits for K where there are no tiles. Shared memory must not be given back before.
  if (values_wanted) ptx::mbarrier_wait(barriers.resident, 0);
  at.wait(barriers.first_empty);
  announce(smem, at.stage, -1);
  if constexpr (Config::dq)
    TurnBarriers(smem).announce(n, -1, 0), TurnBarriers(smem).announce(n + 1, -1, 0);
  ptx::mbarrier_arrive(first_arrives + 8 * at.stage);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    if constexpr (Config::dq) TurnBarriers(smem).init();
    barriers.init();
  }
  const Keys& work = Keys::agreed([&] {
    if constexpr (Config::dq)
      return keys_in_turn(params);
    else
      return Keys(params.base);
  });
  if (work.k_begin >= work.seqlen_kv) {
    if constexpr (Config::dq)
      if (threadIdx.x == 0) close_turns(params, kAdders);
    return;
  }
  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(params, smem, barriers);
    // Only dq sums over keys, but rows of keys are cleared all the same.
    if (threadIdx.x >= 96 && params.base.base.cu_seqlens_q != nullptr)
      cut_tiles<true>(smem, barriers, work.seqlen_kv - work.k_begin, work.seqlen_q);
    if constexpr (Config::dq)
      if (threadIdx.x == 32 || threadIdx.x == 64) {
        add_in_turn(params, smem, threadIdx.x / 32 - 1);
        close_turns(params, 1);
      }
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    if constexpr (kApart)
      consume_apart(params, smem, barriers, warpgroup - 1);
    else if constexpr (Config::dq && kStreamRows == 128)
      consume_tall<kStreamRows>(params, smem, barriers, warpgroup - 1);
    else if constexpr (Config::dq)
      consume_with_dq<kD / 2>(params, smem, barriers, warpgroup - 1);
    else if constexpr (kResidentRows == 64 * Config::warpgroups)
      consume(params, smem, barriers, warpgroup - 1);
    else
      consume_as_pair(params, smem, barriers, warpgroup - 1);
  }
}

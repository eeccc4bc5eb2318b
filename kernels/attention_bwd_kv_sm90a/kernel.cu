// Attention backward with respect to keys and values on Hopper: dv = pᵀ·dO and
// dk = dsᵀ·q·scale.
//
// A CTA owns 128 keys of one key head (96 or 64 beyond a head_dim of 128) and visits the query
// tiles that see them, for one query head of the group after another. Scores are computed
// transposed, keys along the rows, so that probabilities and their gradients are operands of both
// products in the registers where they arise. dk and dv are not shared between CTAs, so they have
// one order of summation; where few CTAs would have all heads of a group, each has a part of the
// heads, and attention_bwd_dq_sm90a sums the parts. dq, where it is computed beside them, is added
// in the order of semaphores.
//
// README.md has the roles of the warps and the diagram of the pipeline. This file has the producer,
// in two forms: for one block of keys, and for the blocks of a persistent CTA. The mbarriers, those
// from `scores` on only with dq (DqBarriers):
//
//   resident          K or V has arrived            guards reading its only place
//   resident_empty    its last product has read it  guards loading K or V of the next block
//   first, second     Q and logarithms, or dO and   guards reading a stage of either ring
//                     deltas, have arrived
//   first_empty,      s and dk, or dp and dv, have  guards loading a later tile into the stage
//   second_empty      read it
//   loaded_...        packed batches: TMA has       guards zero-filling, which then completes
//                     written                       resident, first or second
//   scores            all consumers have stored ds  guards dq = ds·k, which sums over all keys
//                     (specialized: p, and ds)
//   scores_empty      all products have read it     guards storing ds two tiles later
//   staged            dq is staged                  guards adding it to the sums
//   staged_empty      the bulk copy has read it     guards staging dq two tiles later
//   blocks            a block of keys is published  guards reading it (persistent CTAs)
//   blocks_empty      consumers are done with it    guards publishing the next but one
//
// A CTA starts before the kernel with the statistics ends, and waits for it before it loads the
// first of them and before it looks at semaphores; no CTA ends before.
//
// Named barriers 1 and 2 are the ping-pong of the consumers. Semaphores in the workspace, one per
// 64 queries, order the CTAs that add to the same sums.
#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/tensor_prefetch.cuh"
#include "consumer.cuh"
#include "consumer_exchange.cuh"
#include "consumer_specialized.cuh"
#include "consumer_with_dq.cuh"

namespace blockflash {
namespace {

// The number of panels of a tile, as a type.
template <int panels>
struct Panels {};

__device__ __forceinline__ void produce(const Params& params, uint32_t smem,
                                        const Barriers& barriers) {
  const Keys& work = Keys::shared();
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int batch = packed ? 0 : work.batch;
  const auto copy_resident = [&]<int panels>(Panels<panels>, int which,
                                             const blockflash_tensor_map& map, uint32_t barrier) {
    ptx::mbarrier_arrive_expect_tx(barrier, panels * kResidentPanel);
    copy_tile<kResidentRows, kResidentRows, panels>(smem + which * kResidentBytes, map,
                                                    static_cast<int>(work.kv_offset) + work.k_begin,
                                                    work.head_kv, batch, barrier);
  };
  const uint32_t first_arrives = packed ? barriers.loaded_first : barriers.first,
                 second_arrives = packed ? barriers.loaded_second : barriers.second;
  copy_resident(Panels<kPanels>{}, 0, params.k,
                packed ? barriers.loaded_resident : barriers.resident);
  // Statistics come from the kernel before this one. The next one may start then: it waits, too, or
  // reads nothing that is written here.
  ptx::wait_for_predecessors();
  ptx::launch_dependents();
  bool loads_values = true;
  auto at = PipelineState<kStages>::producer();
  int n = 0;  // number of the tile
#pragma unroll 1
  for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
    const Walk walk(b, work, head);
    const int64_t statistics = work.batch * b.statistics_stride_batch * !packed +
                               head * b.statistics_stride_head +
                               statistics_row(packed, work.batch, work.q_offset);
#pragma unroll 1
    for (int i = 0; i < walk.tiles; ++i) {
      const int first = walk.first_query(i, work.seqlen_q);
      TileTerms terms;
      if constexpr (kHasTerms) {
        const TermsParams& all = terms_of(params);
        terms.bits = bits_of_tile(all.block_bits_t, all.bit_tiles_t, b.block_mask_t, walk.list,
                                  walk.first + i, work.k_begin, kStreamRows);
        terms.slope = slope_of(all.terms, work.batch, head);
      }
      const int row = static_cast<int>(work.q_offset) + first;
      const auto copy = [&]<int panels>(Panels<panels>, uint32_t barrier, uint32_t dst,
                                        const blockflash_tensor_map& map, uint32_t statistics_dst,
                                        const float* statistics_src) {
        ptx::mbarrier_arrive_expect_tx(barrier, panels * kStreamPanel + kStatisticsBytes);
        copy_tile<kStreamRows, 64, panels>(dst, map, row, head, batch, barrier);
        copy_statistics(statistics_dst, statistics_src + statistics + first, work.seqlen_q - first,
                        barrier);
      };
      uint32_t rank = 0;  // found out before the stage is free
      if constexpr (Config::dq) rank = rank_at(params, work, first);
      at.wait(barriers.first_empty);
      publish_tile(smem, at.stage, first);
      if constexpr (kHasTerms) terms.publish(smem, at.stage);
      if constexpr (Config::dq)
        DqBarriers(smem).publish(n++, static_cast<int>((statistics + first) / kStatisticsTile),
                                 rank, has_all_statistics(work.seqlen_q - first));
      copy(Panels<kPanels>{}, at.of(first_arrives), smem + kFirstOffset + at.stage * kStreamBytes,
           params.q, first_statistics(smem, at.stage), b.negative_logs);
      if (loads_values)
        copy_resident(Panels<kVPanels>{}, 1, params.v, barrier_of(barriers.resident, 1)),
            loads_values = false;
      const auto second = second_state(at, true);
      second.wait(barriers.second_empty);
      copy(Panels<kVPanels>{}, second.of(second_arrives),
           smem + kSecondOffset + second.stage * kSecondStreamBytes, params.d_o,
           second_statistics(smem, second.stage), b.deltas);
      at.advance();
    }
  }
  // Nobody waits for K where there are no tiles. Shared memory must not be given back before.
  if (loads_values) wait_full<1>(barriers.resident, 0);
  at.wait(barriers.first_empty);
  publish_tile(smem, at.stage, -1);
  if constexpr (Config::dq) DqBarriers(smem).end(n);
  ptx::mbarrier_arrive(at.of(first_arrives));
}

// Loads the tiles of the blocks of keys of a persistent CTA until there are none. A block is drawn
// when the tiles of the one before it are on their way. Everything has two stages, so the number of
// a tile tells its stage and the phase.
__device__ __forceinline__ void produce_blocks(const Params& params, uint32_t smem,
                                               const Barriers& barriers) {
  const DqBarriers dq_barriers(smem);
  const blockflash_attention_bwd_params& b = params.base;
  const blockflash_attention_fwd_params& p = b.base;
  const bool packed = p.cu_seqlens_q != nullptr;
  uint32_t n = 0, loaded = 0;  // tiles, and blocks that have tiles
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const auto published = PipelineState<2>::producer_at(number);
    published.wait(dq_barriers.blocks_empty);
    Block& block = Block::at(number);
    const Keys& work = block.keys;
    if (!draw_block(params, block.keys)) {
      ptx::wait_for_predecessors();
      block.all_tiles = -1;
      wait_empty<2>(barriers.first_empty, n);
      dq_barriers.end(n);
      ptx::mbarrier_arrive(published.of(dq_barriers.blocks));
      return;
    }
    block.find_tiles(params);
    block.resident_phase = loaded & 1;
    ptx::mbarrier_arrive(published.of(dq_barriers.blocks));
    if (block.tiles == 0) continue;

    const int batch = packed ? 0 : work.batch;
    // K and V have one place each, so until the block before is done they get no further than L2.
    const int first_key = static_cast<int>(work.kv_offset) + work.k_begin;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tensor_prefetch_4d(&params.k, panel * 64, first_key, work.head_kv, batch);
      ptx::tensor_prefetch_4d(&params.v, panel * 64, first_key, work.head_kv, batch);
    }
    // As in `produce`.
    if (loaded == 0) ptx::wait_for_predecessors(), ptx::launch_dependents();
    const auto copy_resident = [&](int which, const blockflash_tensor_map& map, uint32_t barrier) {
      wait_empty<1>(barrier_of(dq_barriers.resident_empty, which), loaded);
      ptx::mbarrier_arrive_expect_tx(barrier, kResidentBytes);
      copy_tile<kResidentRows, kResidentRows>(smem + which * kResidentBytes, map, first_key,
                                              work.head_kv, batch, barrier);
    };
#pragma unroll 1
    for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
      const int statistics = block.statistics_tile(b, head);
#pragma unroll 1
      for (int i = 0; i < block.tiles; ++i) {
        const int first = (block.first_tile + i) * kStreamRows;
        const int tile = statistics + first / kStatisticsTile;
        const auto at = PipelineState<2>::producer_at(n);
        // Found out before the stage is free.
        const uint32_t rank = rank_at(params, work, first);
        const uint32_t flags =
            is_masked(work.range(p), work.k_begin, first, kStreamRows) * kTileIsMasked;
        const auto copy = [&](uint32_t barrier, uint32_t dst, const blockflash_tensor_map& map,
                              uint32_t statistics_dst, const float* statistics_src) {
          ptx::mbarrier_arrive_expect_tx(barrier, kStreamBytes + kStatisticsBytes);
          copy_tile<kStreamRows, 64>(dst, map, static_cast<int>(work.q_offset) + first, head, batch,
                                     barrier);
          copy_statistics(statistics_dst,
                          statistics_src + static_cast<int64_t>(tile) * kStatisticsTile,
                          work.seqlen_q - first, barrier);
        };
        at.wait(barriers.first_empty);
        publish_tile(smem, at.stage, first);
        ptx::store_shared(tile_flags_at(smem, at.stage), flags);
        dq_barriers.publish(n, tile, rank, has_all_statistics(work.seqlen_q - first));
        copy(at.of(packed ? barriers.loaded_first : barriers.first),
             smem + kFirstOffset + at.stage * kStreamBytes, params.q,
             first_statistics(smem, at.stage), b.negative_logs);
        if (head == work.first_head && i == 0) {
          copy_resident(0, params.k, packed ? barriers.loaded_resident : barriers.resident);
          copy_resident(1, params.v, barrier_of(barriers.resident, 1));
        }
        at.wait(barriers.second_empty);
        copy(at.of(packed ? barriers.loaded_second : barriers.second),
             smem + kSecondOffset + at.stage * kStreamBytes, params.d_o,
             second_statistics(smem, at.stage), b.deltas);
        ++n;
      }
    }
    ++loaded;
  }
}

// In a packed batch, as `zero_fill_tiles` for all blocks. By a whole warp.
__device__ __forceinline__ void zero_fill_blocks(const Params& params, uint32_t smem,
                                                 const Barriers& barriers) {
  const DqBarriers dq_barriers(smem);
  auto at = PipelineState<kStages>::consumer();
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const auto published = PipelineState<2>::consumer_at(number);
    published.wait(dq_barriers.blocks);
    const Block& block = Block::at(number);
    if (block.all_tiles < 0) return;
    const Keys& work = block.keys;
    if (block.tiles > 0)
      zero_fill_tile<kResidentRows>(barriers.loaded_resident, block.resident_phase, smem,
                                    work.seqlen_kv - work.k_begin, barriers.resident);
#pragma unroll 1
    for (int head = 0; head < work.heads; ++head)
#pragma unroll 1
      for (int i = 0; i < block.tiles; ++i) {
        at.wait(barriers.loaded_first);
        const int rows = work.seqlen_q - published_row(smem, at.stage);
        zero_fill_tile<kStreamRows>(at.of(barriers.loaded_first), at.phase,
                                    smem + kFirstOffset + at.stage * kStreamBytes, rows,
                                    at.of(barriers.first));
        zero_fill_tile<kStreamRows>(at.of(barriers.loaded_second), at.phase,
                                    smem + kSecondOffset + at.stage * kStreamBytes, rows,
                                    at.of(barriers.second));
        at.advance();
      }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(published.of(dq_barriers.blocks_empty));
  }
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

  if (threadIdx.x == 0) {
    if constexpr (Config::dq) DqBarriers(smem).init(params.base.base.cu_seqlens_q != nullptr);
    barriers.init();
  }
  if constexpr (kPersistent) __syncthreads();
  const Keys& work = kPersistent ? Keys::shared() : Keys::agreed([&] {
    if constexpr (Config::dq)
      return draw_keys(params);
    else
      return Keys(params);
  });
  if (!kPersistent && work.k_begin >= work.seqlen_kv) {
    ptx::wait_for_predecessors();
    if constexpr (Config::dq)
      if (threadIdx.x == 0) close_semaphores(params, kAdders);
    return;
  }
  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if constexpr (kPersistent) {
      if (threadIdx.x == 0) produce_blocks(params, smem, barriers);
    } else {
      if (threadIdx.x == 0) produce(params, smem, barriers);
    }
    // Only dq sums over keys, but rows of keys are cleared all the same.
    if (threadIdx.x >= 96 && params.base.base.cu_seqlens_q != nullptr) {
      if constexpr (kPersistent)
        zero_fill_blocks(params, smem, barriers);
      else
        zero_fill_tiles<true>(smem, barriers, work.seqlen_kv - work.k_begin, work.seqlen_q);
    }
    if constexpr (Config::dq)
      if (threadIdx.x == 32 || threadIdx.x == 64) {
        add_in_order(params, smem, threadIdx.x / 32 - 1);
        close_semaphores(params, 1);
      }
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    if constexpr (kSpecialized)
      consume_specialized(params, smem, barriers, warpgroup - 1);
    else if constexpr (Config::dq)
      consume_with_dq<kStreamRows == 128>(params, smem, barriers, warpgroup - 1);
    else if constexpr (kResidentRows == 64 * Config::warpgroups)
      consume(params, smem, barriers, warpgroup - 1);
    else
      consume_exchanging(params, smem, barriers, warpgroup - 1);
  }
}

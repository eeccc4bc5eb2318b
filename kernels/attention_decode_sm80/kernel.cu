// Attention of few queries to the keys of a cache, contiguous or paged, for sm_80 and newer.
//
// The products are transposed: keys, then columns of V, are the M of mma.sync, and 8 to 32 rows
// (queries times heads that share keys) are its N. A warp is alone with its keys: it copies, every
// fourth step of 16, into a ring of its own and keeps sums of its own, so the main loop has no
// barrier among warps. The README says why.
#include "blockflash/config/kv_cache.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"
#include "cluster.cuh"
#include "index_loader.cuh"
#include "terms.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::Params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int kStages = Config::stages;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kRingBytes = kStages * kStageBytes;
  unsigned char* const ring = smem + warp * kRingBytes;
  Shared& shared = *reinterpret_cast<Shared*>(smem + kQOffset + 2 * kQBytes);
  const uint32_t smem_at = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t ring_smem = smem_at + warp * kRingBytes;
  const auto item_of = [&](int n) -> Item& { return shared.items[static_cast<unsigned>(n) % 4]; };
  Terms terms(p, shared);

  // One warp takes the items for all, since lengths that change meanwhile could make warps disagree
  // about how often they meet at a barrier. Item n of this CTA is published during item n - 1.
  const Cluster<kHasClusters> cluster(smem_at, shared);
  const bool in_cluster = cluster.is_used(p);
  const bool one_each = in_cluster || gridDim.x >= static_cast<unsigned>(p.items);
  const auto publish = [&](int n) {
    const int number = shared.number;
    Walk walk = shared.walk;
    __syncwarp();
    const int next = number < 0 || one_each || lane > 0
                         ? -1
                         : static_cast<int>(gridDim.x + atomicAdd(p.tile_counter, 1));
    bool found = false;
    if (in_cluster)
      found = number >= 0 && cluster.find(p, item_of(n), lane);
    else
      found = number >= 0 && walk.find(p, number, item_of(n), lane);
    __syncwarp();
    if (lane > 0) return;
    shared.walk = walk;
    shared.number = found ? next : -1;
    if (!found) item_of(n).sequence = -1;
    __threadfence_block();
    shared.published = one_each ? 1 : n;
    // The last CTA that gets none leaves the counter as it was.
    if (!found && number >= 0 && !one_each &&
        ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
      p.tile_counter[0] = 0;
  };
  // The first item is found while predecessors are still running, if they have no say in it.
  const bool is_early = one_each && are_items_fixed(p);
  if (!is_early) ptx::wait_for_predecessors();
  if (warp == 0) {
    if (lane == 0) shared.number = blockIdx.x, shared.walk = {}, item_of(1).sequence = -1;
    __syncwarp();
    publish(0);
  }
  __syncthreads();
  if (item_of(0).sequence < 0) {
    // Successors of this kernel rely on the end of its predecessors, too.
    if (is_early) ptx::wait_for_predecessors();
    if (threadIdx.x == 0 && p.arrivals != nullptr)
      Arrivals::begin(p.arrivals, LaunchWords::load(p.arrivals));
    return;
  }

  AnyLoader loader(p);
  int loading = -1;              // number of the item that is copied
  int issued = 0, consumed = 0;  // steps, and their stages:
  int issue_stage = 0, stage = 0;
  // Copies steps of the items up to `limit`, as far as they are published.
  const auto fill = [&](int limit) {
    while (issued < limit) {
      while (!loader.has_step()) {
        const int published = __shfl_sync(~0u, *const_cast<volatile int*>(&shared.published), 0);
        if (loading == published) return;
        __threadfence_block();
        if (item_of(loading + 1).sequence < 0) return;
        ++loading;
        loader.begin_item(p, item_of(loading), warp, lane);
        copy_queries(p, item_of(loading), smem_at + kQOffset + loading % 2 * kQBytes,
                     reinterpret_cast<uint64_t>(loader.k) ^ reinterpret_cast<uint64_t>(loader.v));
        if constexpr (kHasCodes)
          copy_scales(p, item_of(loading), codes_shared(smem).scales[loading % 2]);
        // In the same group as the queries.
        if (loading == 0 && threadIdx.x == 0 && p.arrivals != nullptr)
          ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(&shared.launch_words)),
                              p.arrivals, 16);
      }
      const int key =
          loader.start_step(p, item_of(loading), ring_smem + issue_stage * kStageBytes, lane);
      if (lane == 0) shared.first_key[warp][issue_stage] = key;
      ++issued, issue_stage = next_stage<kStages>(issue_stage);
    }
  };

  Sums sums(ring_smem, lane, codes_shared(smem));
  RunSums run;
  for (int n = 0; item_of(n).sequence >= 0; ++n) {
    const DecodeItem& item = item_of(n);
    fill(consumed + kStages - 1);
    // The queries were copied before the first step.
    if (item.positions.begin + warp * kStepKeys < item.positions.end)
      wait_for_oldest_group<kStages - 2>(issued - consumed - 1);
    else
      ptx::cp_async_wait_all();
    if (n == 0 && threadIdx.x == 0 && p.arrivals != nullptr)
      shared.arrivals = Arrivals::begin(p.arrivals, shared.launch_words);
    terms.begin_item(item);
    __syncthreads();
    if (warp == 0 && !one_each) publish(n + 1);
    begin_item(sums, p, smem_at + kQOffset + n % 2 * kQBytes, smem + kQOffset + n % 2 * kQBytes,
               n % 2, lane);
    int at = item.positions.begin + warp * kStepKeys;
    int split_end = item.first_end;
    run.begin();
#pragma unroll 1
    for (int of_run = 0;; ++of_run, split_end += item.chunk) {
      sums.begin_split();
      const int end = min(split_end, item.positions.end);
#pragma unroll 1
      for (; at < end;
           at += Config::warps * kStepKeys, ++consumed, stage = next_stage<kStages>(stage)) {
        if constexpr (kHasTerms) {
          __syncwarp();  // the key of the step is visible to all lanes
          terms.load(item, shared.first_key[warp][stage], lane);
        }
        wait_for_oldest_group<kStages - 2>(issued - consumed - 1);
        __syncwarp();  // the step is visible to all lanes, and all have read the one before it
        fill(consumed + kStages);
        sums.add_step(p, item, ring, stage, shared.first_key[warp][stage], terms, lane);
      }
      __syncwarp();
      const int free_stage = previous_stage<kStages>(stage);
      if (in_cluster) {
        finish_split<true>(p, item, item.split, sums, run, shared, smem, free_stage);
        break;
      }
      finish_split<false>(p, item, item.split + of_run, sums, run, shared, smem, free_stage);
      if (of_run + 1 == item.count) break;
      __syncthreads();  // all have read the sums, and the stages may be filled again
    }
    if (in_cluster) return cluster.finish(p, item, shared);
    finish_item<OutputTile>(p, n, shared);
  }
}

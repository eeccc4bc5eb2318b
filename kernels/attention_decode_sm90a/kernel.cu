// Attention of several queries to the keys of a cache, contiguous or paged, for Hopper.
//
// A CTA is one warpgroup with 64 rows, queries times heads that share keys, as M of WGMMA, and with
// tiles of 64 keys as its N. Its threads copy tiles by cp.async, a ring ahead of their products;
// two CTAs share an SM, so the steps of a tile need not overlap.
#include "blockflash/decode/run_ending.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/launch.cuh"
#include "output.cuh"

namespace blockflash {
namespace {

struct Shared {
  DecodeRun items[2];  // item n in slot n % 2
  RunWalk walk;        // of the warp that finds items,
  int number;          // and the number of the item that it looks for next; -1: none
  Ending ending;
  LaunchWords launch_words;
  Arrivals arrivals;  // if there is a workspace
  float2 kept_logs[Config::rows];
};

constexpr int kQOffset = Config::stages * kStageBytes;
constexpr int kKeptOffset = kQOffset + kTileBytes;
constexpr int kSharedOffset = kKeptOffset + Config::rows * kD * 4;
static_assert(sizeof(Shared) <= 1024 && Config::smem_bytes == kSharedOffset + 1024,
              "manifest and kernel disagree on smem");

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_decode_runs_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int kStages = Config::stages;
  const blockflash_attention_decode_params& p = params.base;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t ring_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t q_smem = ring_smem + kQOffset;
  Shared& shared = *reinterpret_cast<Shared*>(smem + kSharedOffset);
  const Kept kept{reinterpret_cast<float4*>(smem + kKeptOffset), shared.kept_logs};

  // One warp finds the items for all, since lengths that change meanwhile could make warps disagree
  // about how often they meet at a barrier. Item n is found during item n - 1.
  const bool one_each = gridDim.x >= static_cast<unsigned>(p.items);
  const auto publish = [&](int n) {
    const int number = shared.number;
    RunWalk walk = shared.walk;
    DecodeRun& item = shared.items[n & 1];
    __syncwarp();
    const int next = number < 0 || one_each || lane > 0
                         ? -1
                         : static_cast<int>(gridDim.x + atomicAdd(p.tile_counter, 1));
    const bool found = number >= 0 && walk.find(params, number, item, lane);
    __syncwarp();
    if (lane > 0) return;
    shared.walk = walk;
    shared.number = found ? next : -1;
    if (!found) item.sequence = -1;
    // The last CTA that gets none leaves the counter as it was.
    if (!found && number >= 0 && !one_each &&
        ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
      p.tile_counter[0] = 0;
  };
  // The first item is found while predecessors are still running, if they have no say in it.
  const bool is_early = one_each && are_sequences_equal(p);
  if (!is_early) ptx::wait_for_predecessors();
  if (threadIdx.x == 0) shared.number = blockIdx.x, shared.walk = {};

  Loader loader(p);
  int issued = 0, consumed = 0;  // tiles, and their stages:
  int issue_stage = 0, stage = 0;
  // Copies tiles of an item as far as stages are free. The queries belong to the group of its first
  // tile, behind it, since their addresses take longer.
  const auto fill = [&](const DecodeRun& item, bool is_first) {
    while (issued < consumed + kStages && loader.has_tile(warp)) {
      loader.start_tile(p, item, ring_smem + issue_stage * kStageBytes, warp, lane);
      if (is_first) copy_queries(p, item, q_smem);
      is_first = false;
      ptx::cp_async_commit_group();
      ++issued, issue_stage = next_stage<kStages>(issue_stage);
    }
  };

  // When nothing else is being copied.
  const bool begins = threadIdx.x == 0 && p.arrivals != nullptr;
  const auto begin_launch = [&] {
    if (!begins) return;
    ptx::cp_async_wait_all();
    shared.arrivals = Arrivals::begin(p.arrivals, shared.launch_words);
  };
#pragma unroll 1
  for (int n = -1;; ++n) {
    const DecodeRun& item = shared.items[n & 1];
    const DecodeRun& following = shared.items[(n + 1) & 1];
    __syncthreads();  // all have ended the item before this one
    if (warp == 0) publish(n + 1);
    Sums sums;
    int k = 0;
    if (n >= 0) {
      int key = item.keys.begin;
#pragma unroll 1
      for (;; ++k) {
        sums.clear();
        const int end = min(item.begin + (k + 1) * item.chunk, item.keys.end);
#pragma unroll 1
        for (; key < end; key += kTileKeys, ++consumed, stage = next_stage<kStages>(stage)) {
          wait_for_oldest_group<kStages - 1>(issued - consumed - 1);
          ptx::fence_proxy_async();
          __syncthreads();  // the tile is visible to all, and all have read the one before it
          sums.add_tile(params, item, q_smem, ring_smem + stage * kStageBytes, key,
                        [&] { fill(item, false); });
        }
        sums.complete();
        if (k + 1 >= item.count) break;
        // The first of four splits wait for the others, and the first four in the workspace.
        if (k % kInner > 0) kept.combine(sums);
        if (k % kInner < kInner - 1)
          kept.store(sums);
        else
          Slot(p, item.slot + item.run * item.slot_step).store(p, rows_of(p, item), sums);
      }
    }
    if (n == 0) begin_launch();
    __syncthreads();  // all have read the ring, and the next item is known
    if (following.sequence >= 0) loader.begin_item(p, following, warp);
    if (n < 0 && is_early)
      ptx::wait_for_predecessors_behind(reinterpret_cast<uint64_t>(loader.k) ^
                                        reinterpret_cast<uint64_t>(loader.v));
    // In the same group as the first queries, or alone.
    if (n < 0 && begins)
      ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(&shared.launch_words)),
                          p.arrivals, 16);
    if (following.sequence >= 0) {
      fill(following, true);
    } else {
      ptx::launch_dependents();
    }
    if (n >= 0) {
      const Slot slot(p, item.slot + item.run * item.slot_step);
      const int rows = rows_of(p, item);
      if (k % kInner > 0) kept.combine(sums);
      if (k >= kInner) slot.combine(p, rows, sums);
      if (item.runs > 1) {
        slot.store(p, rows, sums);
        combine_runs(p, params.run == 1, item, shared.arrivals, shared.ending,
                     one_each || params.run == 1);
      } else {
        store_results(p, item, sums);
      }
    }
    if (following.sequence < 0) {
      if (n < 0) begin_launch();
      return;
    }
  }
}

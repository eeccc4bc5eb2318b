// Attention to a cache whose values are the first columns of its keys (absorbed MLA), for Hopper.
//
// A CTA has 64 rows, queries times heads, and walks tiles of 64 keys, which TMA loads once for
// scores and values. Two warpgroups take turns with the scores; each of them has half of the
// columns of the output, for all keys, and reads the probabilities of the other one in shared
// memory. So each product is computed once, and 64 × 512 sums fit into registers.
#include "blockflash/latent_hopper/output.cuh"
#include "blockflash/latent_hopper/queries.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_prefetch.cuh"
#include "loader.cuh"

namespace blockflash {
namespace {

constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;

// The sums of an item and what becomes of them. `pair` counts pairs of tiles of all items. Calls
// `meanwhile` when nobody needs the queries any more.
template <int warpgroup, class Meanwhile>
__device__ __forceinline__ void compute(const Params& params, Shared& shared,
                                        const Barriers& barriers, uint32_t smem,
                                        const DecodeRun& item, int pair,
                                        const Meanwhile& meanwhile) {
  Sums<warpgroup> sums{params.base, shared, barriers, smem};
  sums.clear();
  const Tiles tiles(item);
#pragma unroll 1
  for (int i = 0; i < tiles.pairs; ++i)
    sums.add_pair(item, tiles.first_key + i * 2 * kKeys, pair + i);
  sums.join_denominators();
  meanwhile();
  if (item.runs > 1)
    store_partial(item, sums);
  else
    store_results(item, sums);
}

__device__ __forceinline__ void consume(const Params& params, Shared& shared,
                                        const Barriers& barriers, uint32_t smem, int warp) {
  const blockflash_attention_decode_params& p = params.base;
  const bool one_each = gridDim.x >= static_cast<unsigned>(p.items);
  int pair = 0;
  // Waits for item n and starts the copy of its queries.
  const auto begin = [&](int n) {
    wait_full<2>(barriers.item_full, n);
    const DecodeRun& item = shared.items[n % 2];
    if (item.sequence >= 0) copy_queries(p, item, smem + kQOffset);
  };
  begin(0);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const DecodeRun& item = shared.items[n % 2];
    if (item.sequence < 0) return;
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    Team::sync();
    if (warp < 4)
      compute<0>(params, shared, barriers, smem, item, pair, [&] { begin(n + 1); });
    else
      compute<1>(params, shared, barriers, smem, item, pair, [&] { begin(n + 1); });
    pair += Tiles(item).pairs;
    if (item.runs > 1)
      combine_runs(p, params.run == 1, item, shared.arrivals, shared.ending, one_each);
    __syncwarp();  // all have read the item
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(barrier_of(barriers.item_empty, n % 2));
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_latent_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  Shared& shared = *reinterpret_cast<Shared*>(smem_bytes + kSharedOffset);
  const Barriers barriers(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpSize, 0);
  constexpr int kLoaderWarp = Team::threads / kWarpSize;

  ptx::launch_dependents();
  if (threadIdx.x == Team::threads) {
    ptx::prefetch_tensor_map(&params.keys);
    barriers.init();
  }
  ptx::wait_for_predecessors();
  if (threadIdx.x == 0 && params.runs.base.arrivals != nullptr)
    shared.arrivals =
        Arrivals::begin(params.runs.base.arrivals, LaunchWords::load(params.runs.base.arrivals));
  // Here each thread has registers enough for that.
  RunWalk walk;
  if (warp == kLoaderWarp + 1) walk.choose(params.runs, threadIdx.x % kWarpSize);
  __syncthreads();
  if (warp >= kLoaderWarp) {
    ptx::lower_registers<kLoaderRegisters>();
    if (warp == kLoaderWarp) load_tiles(params, shared, barriers, smem);
    if (warp == kLoaderWarp + 1) find_items(params.runs, shared, barriers, walk);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume(params.runs, shared, barriers, smem, warp);
  }
}

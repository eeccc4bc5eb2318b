// Attention of each query to the keys that its list names, in a cache whose values are the first
// columns of the keys (sparse attention over a latent cache), for Hopper.
//
// The products are those of attention_latent_sm90a. The producer's four warps copy the listed rows
// by cp.async. Items follow from the parameters alone, so each warp finds them for itself, and
// reads what the device knows without telling others.
#include "blockflash/latent_hopper/output.cuh"
#include "blockflash/latent_hopper/queries.cuh"
#include "blockflash/ptx/launch.cuh"
#include "rows.cuh"

namespace blockflash {
namespace {

constexpr int kLoaderRegisters = 56, kConsumerRegisters = 224;

__device__ __forceinline__ void gather(const blockflash_attention_index_params& params,
                                       Shared& shared, const Barriers& barriers, uint32_t smem) {
  const int count = ListItems(params).count;
  Rows rows(params);
  int pair = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    const ListRun item(params, number);
    const int pairs = item.pairs();
    rows.begin_item(item);
#pragma unroll 1
    for (int i = 0; i < pairs; ++i, ++pair) rows.copy_pair(shared, barriers, smem, i, pair);
  }
}

// The sums of an item and what becomes of them. `pair` counts pairs of tiles of all items. Calls
// `meanwhile` when nobody needs the queries any more.
template <int warpgroup, class Meanwhile>
__device__ __forceinline__ void compute(const blockflash_attention_index_params& params,
                                        Shared& shared, const Barriers& barriers, uint32_t smem,
                                        int number, int pair, const Meanwhile& meanwhile) {
  Sums<warpgroup> sums{params.scaled.decode, shared, barriers, smem};
  sums.clear();
  const int end = pair + ListRun(params, number).pairs();
#pragma unroll 1
  for (; pair < end; ++pair)
    if (!sums.pass_pair(pair)) sums.add_pair({}, 0, pair);
  sums.join_denominators();
  meanwhile();
  const ListRun item(params, ptx::opaque(number));
  if (item.runs > 1)
    store_partial(item, sums);
  else
    store_results(item, sums);
}

__device__ __forceinline__ void consume(const blockflash_attention_index_params& params,
                                        Shared& shared, const Barriers& barriers, uint32_t smem,
                                        int warp) {
  const blockflash_attention_decode_params& p = params.scaled.decode;
  const int count = ListItems(params).count;
  int pair = 0;
  const auto begin = [&](int number) {
    if (number < count) copy_queries(p, ListRun(params, number), smem + kQOffset);
  };
  begin(blockIdx.x);
#pragma unroll 1
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    Team::sync();
    const auto meanwhile = [&] { begin(number + static_cast<int>(gridDim.x)); };
    if (warp < 4)
      compute<0>(params, shared, barriers, smem, number, pair, meanwhile);
    else
      compute<1>(params, shared, barriers, smem, number, pair, meanwhile);
    const ListRun item(params, ptx::opaque(number));
    pair += item.pairs();
    if (item.runs > 1)
      combine_runs(p, true, item, shared.arrivals, shared.ending,
                   gridDim.x >= static_cast<unsigned>(count));
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  Shared& shared = *reinterpret_cast<Shared*>(smem_bytes + kSharedOffset);
  const Barriers barriers(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpSize, 0);
  constexpr int kLoaderWarp = Team::threads / kWarpSize;
  uint64_t* const arrivals = params.scaled.decode.arrivals;

  ptx::launch_dependents();
  if (threadIdx.x == Team::threads) barriers.init();
  ptx::wait_for_predecessors();
  if (threadIdx.x == 0 && arrivals != nullptr)
    shared.arrivals = Arrivals::begin(arrivals, LaunchWords::load(arrivals));
  __syncthreads();
  if (warp >= kLoaderWarp) {
    ptx::lower_registers<kLoaderRegisters>();
    gather(params, shared, barriers, smem);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume(params, shared, barriers, smem, warp);
  }
}

// Attention to listed keys for Hopper. Neighbouring queries visit the union of their lists, which
// the kernel before this one has made (index_union_sm80).
//
// A persistent CTA takes tiles of two row groups, 64 rows each, queries times heads that share a
// list and a key head, one for each of two consumer warpgroups. TMA loads the keys and values of
// each block that is listed for one of the row groups, or once for both. A warpgroup computes the
// steps of its own row group and masks what a query has not listed.
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_prefetch.cuh"
#include "loader.cuh"
#include "output.cuh"

namespace blockflash {
namespace {

constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

__device__ __forceinline__ void produce(const Params& params, Shared& shared,
                                        const Barriers& barriers, uint32_t smem, int warp) {
  if (warp == 0) load_steps<false>(params, shared, barriers, smem);
  if (warp == 1) schedule(params, shared, barriers, smem);
  if (warp == 2) load_steps<true>(params, shared, barriers, smem);
  if (warp == 3) scan_values(shared, barriers, smem);
}

__device__ __forceinline__ void consume(const Params& params, Shared& shared,
                                        const Barriers& barriers, uint32_t smem, int which) {
  Sums sums{params, shared, barriers, smem, which};
  int before = 0;  // steps of earlier tiles
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_full<kWorks>(barriers.work_full, n);
    const Work& work = shared.works[n % kWorks];
    if (work.tile.sequence < 0) return;
    const RowGroup group = RowGroup::of(params.unions, work.tile, which);
    const StepOrder order(work.steps);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sums.rows[half] = Row::of(params, work.tile, group, sums.row_of(half));
    sums.clear();
    wait_full<1>(barrier_of(barriers.q_full, which), n);
    sums.run(order, before);
    store_results(work.tile, group, sums);
    before += order.all();
    __syncwarp();  // all have read the tile
    if (sums.lane() == 0) ptx::mbarrier_arrive(barrier_of(barriers.work_empty, n % kWorks));
  }
}

// Zeros in place of values that are skipped, and in rows that no copy of queries writes.
__device__ __forceinline__ void store_zeros(const Params& params, uint32_t smem) {
  const int rows = params.unions.pack * params.unions.pack_queries, pieces = (kRows - rows) * 8;
  for (int i = threadIdx.x; i < 1024 / 16; i += Config::threads)
    ptx::store_shared_int4(smem + kZerosOffset + i * 16, make_int4(0, 0, 0, 0));
  for (int i = threadIdx.x; i < kRowGroups * kPanels * pieces; i += Config::threads) {
    const int panel = i / pieces;
    ptx::store_shared_int4(smem + panel * kQPanelBytes + rows * 128 + (i - panel * pieces) * 16,
                           make_int4(0, 0, 0, 0));
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  Shared& shared = *reinterpret_cast<Shared*>(smem_bytes + kSharedOffset);
  const Barriers barriers(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpSize, 0);

  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.q);
    ptx::prefetch_tensor_map(&params.k);
    ptx::prefetch_tensor_map(&params.v);
    barriers.init();
  }
  store_zeros(params, smem);
  ptx::fence_proxy_async();
  ptx::wait_for_predecessors();
  __syncthreads();
  if (warp < 4) {
    ptx::lower_registers<kProducerRegisters>();
    produce(params, shared, barriers, smem, warp);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume(params, shared, barriers, smem, warp / 4 - 1);
  }
}

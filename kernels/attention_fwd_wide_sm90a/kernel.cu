// Attention forward for head dimensions beyond 256, for Hopper.
//
// A CTA has 64 queries and walks tiles of 64 keys, which TMA loads. Two warpgroups take turns with
// the scores; each of them has half of the columns of the output, for all keys, and reads the
// probabilities of the other one in shared memory. So each product is computed once, and 64 × 512
// sums fit into registers.
#include "blockflash/ptx/launch.cuh"
#include "loader.cuh"
#include "output.cuh"

namespace blockflash {
namespace {

constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

template <int warpgroup>
__device__ __forceinline__ void consume(const Params& params, const Work& work, Shared& shared,
                                        const Barriers& barriers, uint32_t smem) {
  Sums<warpgroup> sums{params, work, shared, barriers, smem};
  sums.begin();
  if (work.pairs > 0) sums.run();
  sums.join_denominators();
  store_results(sums);
}

__device__ __forceinline__ void produce(const Params& params, const Work& work,
                                        const Barriers& barriers, uint32_t smem, int warp) {
  if (work.pairs == 0 || threadIdx.x % kWarpSize != 0) return;
  const TileRows rows = TileRows::of(params.base, work.tile);
  const auto values = [&]<int first>(std::integral_constant<int, first>) {
    load_tiles<1, first, first + kParts>(params.v, smem + kVOffset, work, rows, barriers.v_full,
                                         barriers.v_empty);
  };
  if (warp == 0) {
    load_queries(params, smem + kQOffset, work, rows, barriers.q_full);
    load_tiles<2, 0, kChunks>(params.k, smem + kKOffset, work, rows, barriers.k_full,
                              barriers.k_empty);
  } else if (warp == 1) {
    values(std::integral_constant<int, 0>{});
  } else if (warp == 2) {
    values(std::integral_constant<int, kParts>{});
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_fwd_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  Shared& shared = *reinterpret_cast<Shared*>(smem_bytes + kSharedOffset);
  const Barriers barriers(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpSize, 0);

  ptx::launch_dependents();
  if (threadIdx.x == 0) barriers.init();
  ptx::wait_for_predecessors();
  // One warp finds the tile, since offsets that change meanwhile could make others disagree.
  if (warp == 0) {
    Queue queue(params);
    QueryTile tile;
    if (!queue.take(tile)) tile.seqlen_q = 0;
    if (threadIdx.x == 0) shared.tile = tile;
  }
  __syncthreads();
  if (shared.tile.seqlen_q == 0) return;
  const Work work(params, shared.tile);
  constexpr int kLoaderWarp = kConsumers / kWarpSize;
  if (warp >= kLoaderWarp) {
    ptx::lower_registers<kProducerRegisters>();
    produce(params, work, barriers, smem, warp - kLoaderWarp);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    if (warp < kLoaderWarp / 2)
      consume<0>(params, work, shared, barriers, smem);
    else
      consume<1>(params, work, shared, barriers, smem);
  }
}

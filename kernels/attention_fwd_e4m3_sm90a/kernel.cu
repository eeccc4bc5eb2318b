// Attention forward for Hopper with queries, keys and values in e4m3: TMA, WGMMA of 8 bits, and
// persistent CTAs of one producer warpgroup and one to three consumer warpgroups, each with 64
// queries.
//
// Q, K and V are loaded as they are; two warps of the producer warpgroup transpose V in shared
// memory. The product of each key tile with V has accumulators of its own and is added to the
// output in f32, since the accumulators of these products keep few bits; that addition scales, so
// the probabilities of a tile are relative to its own largest score.
#include "consumer.cuh"
#include "producer.cuh"
#include "turn_values.cuh"

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_fwd_e4m3_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem + kBarrierOffset);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  ptx::launch_dependents();
  Queue queue(params.fwd);
  if (threadIdx.x / 32 == 1) {
    // The first tile may depend on data that the previous kernel writes.
    const blockflash_attention_fwd_params& base = params.fwd.base;
    if (base.cu_seqlens_q != nullptr || base.block_mask.row_ptr != nullptr)
      ptx::wait_for_predecessors();
    publish(queue, smem, 0);
  } else if (threadIdx.x == 0) {
    barriers.init();
  }
  ptx::fence_proxy_async();
  __syncthreads();

  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(params, smem, barriers);
    if (threadIdx.x / 32 == 1) schedule(queue, smem, barriers);
    if (threadIdx.x / 32 >= 2) turn_values(smem, barriers, threadIdx.x / 32 - 2);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    Consumer{params, barriers, smem}.run();
  }
}

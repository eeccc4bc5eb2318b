// Attention forward for Hopper, dense, under a block mask or over a cache: TMA, WGMMA, and
// persistent CTAs of one producer warpgroup and one to three consumer warpgroups, each with 64
// queries.
//
// The producer streams Q, K and V into rings in shared memory. Each consumer walks the key tiles of
// its queries from the last to the first and continues with its next queries without draining the
// pipeline: the tensor cores multiply for one consumer while another computes its softmax, and the
// last P·V of a query tile overlaps with the first scores of the next tile. Follows
// FlashAttention-3 (Shah et al., 2024). The softmax moves its reference only when a score exceeds
// it by a margin, and the tensor cores sum the denominator over columns of ones.
#include "consumer.cuh"
#include "producer.cuh"
#include "values.cuh"

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::KernelParams kernel_params) {
  using namespace blockflash;
  const Params& params = reinterpret_cast<const Params&>(kernel_params);
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem + kBarrierOffset);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  ptx::launch_dependents();
  Queue queue(kernel_params);
  if (threadIdx.x / 32 == 1) {
    // The first tile may depend on data that the previous kernel writes.
    if (Config::cache || params.base.cu_seqlens_q != nullptr ||
        params.base.block_mask.row_ptr != nullptr)
      ptx::wait_for_predecessors();
    publish(queue, smem, 0);
  } else if (threadIdx.x == 0) {
    barriers.init(scanners_of(params));
  } else if (threadIdx.x >= 64) {
    store_constants(smem, threadIdx.x - 64, Config::threads - 64);
    if constexpr (Config::cache)
      clear_rows_from(CacheRows::of(cache_params_of(params)).count(), smem, threadIdx.x - 64,
                      Config::threads - 64);
  }
  ptx::fence_proxy_async();
  __syncthreads();

  if (warpgroup == 0) {
    ptx::lower_registers<kProducerRegisters>();
    if constexpr (kTwoBlockRows) {
      if (threadIdx.x == 0) produce_two_block_rows(params, smem, barriers);
    } else {
      if (threadIdx.x < Origin::producers) produce(kernel_params, smem, barriers);
    }
    if (threadIdx.x / 32 == 1) schedule(queue, smem, barriers);
    if constexpr (Config::cache) {
      if (threadIdx.x / 32 == 2) scan_values(smem, barriers, 0);
      if (threadIdx.x / 32 == 3) produce_values(kernel_params, smem, barriers);
    } else if constexpr (kAddsTerms) {
      const int scanners = scanners_of(params), scanner = threadIdx.x / 32 - 2;
      if (scanner >= 0 && scanner < scanners) scan_values(smem, barriers, scanner, scanners);
      if (threadIdx.x / 32 == 3 && scanners == 1) produce_bias(terms_of(params), smem, barriers);
    } else {
      if (threadIdx.x / 32 >= 2) scan_values(smem, barriers, threadIdx.x / 32 - 2);
    }
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    // The first warpgroup may begin.
    if (warpgroup == kWarpgroups) PingPong<kWarpgroups>{kWarpgroups - 1}.arrive();
    Consumer{{{}, params, barriers, smem, warpgroup - 1}}.run();
    if (kStaged && threadIdx.x % 32 == 0) ptx::tensor_store_wait();
  }
}

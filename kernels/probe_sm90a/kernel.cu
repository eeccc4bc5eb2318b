// Measures the peak rate of one unit of a Hopper GPU: WGMMA from shared memory, bulk copies from L2
// to shared memory. See probe_sm80.
#include "blockflash/config/probe.cuh"
#include "blockflash/params/probe.h"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/wgmma.cuh"

namespace blockflash {
namespace {

constexpr int kProbe = ProbeConfig::probe;
constexpr int kRowBytes = 128;  // of a tile: 64 elements of 16 bits or 128 of 8 bits along K
constexpr int kWarpgroups = ProbeConfig::threads / 128;
constexpr int kABytes = 64 * kRowBytes, kBBytes = 256 * kRowBytes;
constexpr int kChunkBytes = 16384;  // of a bulk copy
constexpr int kStages = ProbeConfig::smem_bytes / kChunkBytes;

extern __shared__ __align__(1024) uint8_t smem[];

__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (kProbe == BLOCKFLASH_PROBE_WGMMA_F16) ptx::Wgmma<256, __half>::ss<true>(d, a, b);
  if constexpr (kProbe == BLOCKFLASH_PROBE_WGMMA_BF16)
    ptx::Wgmma<256, __nv_bfloat16>::ss<true>(d, a, b);
  if constexpr (kProbe == BLOCKFLASH_PROBE_WGMMA_E4M3) ptx::wgmma_m64n256k32_e4m3(d, a, b);
}

// Every warpgroup adds the product of its own 64 rows and 256 rows shared by all, again and again.
// The input holds the rows of the warpgroups, then the shared ones. The result of a thread is the
// sum of its accumulators.
__device__ __forceinline__ float matrix_rate(const blockflash_probe_params& p) {
  constexpr int kBytes = kWarpgroups * kABytes + kBBytes;
  static_assert(kProbe == BLOCKFLASH_PROBE_BULK || kBytes == ProbeConfig::smem_bytes,
                "manifest and kernel disagree on smem");
  for (int chunk = threadIdx.x; chunk < ProbeConfig::smem_bytes / 16; chunk += blockDim.x) {
    const int row = chunk / 8, swizzled = (chunk ^ row) % 8;
    reinterpret_cast<uint4*>(smem)[row * 8 + swizzled] = static_cast<const uint4*>(p.input)[chunk];
  }
  ptx::fence_proxy_async();
  __syncthreads();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint64_t a = ptx::wgmma_descriptor(base + threadIdx.x / 128 * kABytes);
  const uint64_t b = ptx::wgmma_descriptor(base + kWarpgroups * kABytes);
  float d[128] = {};
  for (int n = 0; n < p.iterations; ++n) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) wgmma(d, a + 2 * k, b + 2 * k);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  return sum;
}

// Each CTA streams chunks of the input into a ring in shared memory: chunk blockIdx.x + i ·
// gridDim.x, modulo their number. The result of a thread is the exclusive or of its share of the
// words that the ring holds in the end.
__device__ __forceinline__ uint32_t bulk_rate(const blockflash_probe_params& p) {
  __shared__ __align__(8) uint64_t arrived[kStages];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t barriers = static_cast<uint32_t>(__cvta_generic_to_shared(arrived));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(barriers + 8 * stage, 1);
    ptx::fence_mbarrier_init();
    const uint32_t chunks = static_cast<uint32_t>(p.bytes / kChunkBytes), step = gridDim.x % chunks;
    uint32_t chunk = blockIdx.x % chunks;
    auto at = PipelineState<kStages>::producer();
    for (int i = 0; i < p.iterations; ++i) {
      at.wait(barriers);  // for the copy before, since nobody reads
      const uint32_t barrier = at.of(barriers);
      const uint8_t* const from =
          static_cast<const uint8_t*>(p.input) + static_cast<int64_t>(chunk) * kChunkBytes;
      ptx::mbarrier_arrive_expect_tx(barrier, kChunkBytes);
      ptx::bulk_copy(ring + at.stage * kChunkBytes, from, kChunkBytes, barrier);
      chunk += step;
      if (chunk >= chunks) chunk -= chunks;
      at.advance();
    }
    // The last copy into each stage that was used.
    for (int i = max(p.iterations - kStages, 0); i < p.iterations; ++i)
      wait_full<kStages>(barriers, i);
  }
  __syncthreads();
  uint32_t fold = 0;
  const int words = min(p.iterations, kStages) * (kChunkBytes / 4);
  for (int word = threadIdx.x; word < words; word += blockDim.x)
    fold ^= reinterpret_cast<const uint32_t*>(smem)[word];
  return fold;
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const blockflash_probe_params params) {
  using namespace blockflash;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if constexpr (kProbe == BLOCKFLASH_PROBE_BULK)
    static_cast<uint32_t*>(params.output)[thread] = bulk_rate(params);
  else
    static_cast<float*>(params.output)[thread] = matrix_rate(params);
}

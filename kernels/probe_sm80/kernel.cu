// Measures the peak rate of one unit of the GPU, for sm_80 and newer: mma.sync, exponentials, reads
// and copies of device memory.
//
// Each probe keeps its unit busy and all others idle, on real data since zeros would save power,
// and writes its result so that the work can neither be skipped nor go wrong unnoticed.
#include "blockflash/config/probe.cuh"
#include "blockflash/params/probe.h"
#include "blockflash/ptx/math.cuh"
#include "blockflash/ptx/mma.cuh"

namespace blockflash {
namespace {

constexpr int kProbe = ProbeConfig::probe;
constexpr bool kIsMma = kProbe == BLOCKFLASH_PROBE_MMA_F16 || kProbe == BLOCKFLASH_PROBE_MMA_BF16 ||
                        kProbe == BLOCKFLASH_PROBE_MMA_E4M3;

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kProbe == BLOCKFLASH_PROBE_MMA_F16) ptx::mma_m16n8k16<__half>(d, a, b[0], b[1]);
  if constexpr (kProbe == BLOCKFLASH_PROBE_MMA_BF16)
    ptx::mma_m16n8k16<__nv_bfloat16>(d, a, b[0], b[1]);
  if constexpr (kProbe == BLOCKFLASH_PROBE_MMA_E4M3) ptx::mma_m16n8k32_e4m3(d, a, b[0], b[1]);
}

// Has no effect, since no input has 2^48 bytes, but the compiler cannot know that.
template <int kATiles, int kBTiles>
__device__ __forceinline__ void change(const blockflash_probe_params& p, int n,
                                       uint32_t (&a)[kATiles][4], uint32_t (&b)[kBTiles][2]) {
  const uint32_t bits = static_cast<uint32_t>(p.bytes >> 48) * n;
#pragma unroll
  for (int i = 0; i < kATiles * 4; ++i) a[i / 4][i % 4] ^= bits;
#pragma unroll
  for (int i = 0; i < kBTiles * 2; ++i) b[i / 2][i % 2] ^= bits;
}

// Each warp adds the same 2 × 8 tile products again and again. The input holds fragments as lanes
// do: register r of a[i] at word (4 i + r) * 32 + lane, followed by the fragments of b. The result
// of a thread is the sum of its accumulators.
__device__ __forceinline__ float matrix_rate(const blockflash_probe_params& p) {
  constexpr int kATiles = 2, kBTiles = 8;
  const uint32_t* const words = static_cast<const uint32_t*>(p.input) + threadIdx.x % kWarpSize;
  uint32_t a[kATiles][4], b[kBTiles][2];
  float d[kATiles][kBTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kATiles * 4; ++i) a[i / 4][i % 4] = words[i * kWarpSize];
#pragma unroll
  for (int i = 0; i < kBTiles * 2; ++i) b[i / 2][i % 2] = words[(kATiles * 4 + i) * kWarpSize];
  for (int n = 0; n < p.iterations; ++n) {
    // GPUs without warp-level FP8 MMA convert. Operands that might change keep the conversions in
    // the loop.
    if constexpr (kProbe == BLOCKFLASH_PROBE_MMA_E4M3) change(p, n, a, b);
#pragma unroll
    for (int j = 0; j < kBTiles; ++j)
#pragma unroll
      for (int i = 0; i < kATiles; ++i) mma(d[i][j], a[i], b[j]);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kATiles * kBTiles * 4; ++i) sum += d[i / 4 / kBTiles][i / 4 % kBTiles][i % 4];
  return sum;
}

// x = 2^-x from 16 starts, whose common limit is 0.6411857. The sign costs no instruction.
__device__ __forceinline__ float exponential_rate(const blockflash_probe_params& p) {
  constexpr int kChains = 16;
  float x[kChains], sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) x[i] = static_cast<float>(threadIdx.x + i) / 1024;
  for (int n = 0; n < p.iterations; ++n)
#pragma unroll
    for (int i = 0; i < kChains; ++i) x[i] = ptx::ex2_approx(-x[i]);
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += x[i];
  return sum;
}

constexpr int kInFlight = 8;  // 16-byte loads of a thread in flight

// Reads the input `iterations` times, bypassing L1. The result is the exclusive or of all words,
// which is the input's own or 0.
__device__ __forceinline__ uint32_t read_rate(const blockflash_probe_params& p) {
  const uint4* const input = static_cast<const uint4*>(p.input);
  const int64_t count = p.bytes / 16, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t fold = 0;
  for (int n = 0; n < p.iterations; ++n)
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += step * kInFlight) {
      uint4 words[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        words[j] = i + j * step < count ? __ldcg(input + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) fold ^= words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
    }
  return fold;
}

__device__ __forceinline__ void copy_rate(const blockflash_probe_params& p) {
  const uint4* const input = static_cast<const uint4*>(p.input);
  uint4* const output = static_cast<uint4*>(p.output);
  const int64_t count = p.bytes / 16, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int n = 0; n < p.iterations; ++n)
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += step * kInFlight) {
      uint4 words[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (i + j * step < count) words[j] = __ldcg(input + i + j * step);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (i + j * step < count) __stcg(output + i + j * step, words[j]);
    }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const blockflash_probe_params params) {
  using namespace blockflash;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if constexpr (kIsMma) static_cast<float*>(params.output)[thread] = matrix_rate(params);
  if constexpr (kProbe == BLOCKFLASH_PROBE_EXP2)
    static_cast<float*>(params.output)[thread] = exponential_rate(params);
  if constexpr (kProbe == BLOCKFLASH_PROBE_READ)
    static_cast<uint32_t*>(params.output)[thread] = read_rate(params);
  if constexpr (kProbe == BLOCKFLASH_PROBE_COPY) copy_rate(params);
}

// Epilogue: the partial results of the two warpgroups of a CTA become one, and go to global memory.
#pragma once

#include "../attention_fwd_sm90a/softmax.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

// Of each tile, the reference stays until a score exceeds it by 2^8, which no 16-bit probability
// overflows. The denominator is the sum of the unrounded probabilities.
using Softmax = HopperSoftmax<kRows / 2, false, true>;

constexpr int kOutput = kD / 2;                          // accumulators of a lane,
constexpr int kStored = kOutput / kWarpgroups;           // and those that it stores
constexpr int kExchangeBytes = 128 * (kStored + 4) * 4;  // from a warpgroup to the other one
static_assert(kWarpgroups == 1 || kWarpgroups == 2, "a warpgroup has one partner at most");
static_assert(kExchangeBytes <= kRingBytes, "partial results go where keys and values were");

// Adds the partial results of the other warpgroup. Thread by thread both hold the same rows and
// columns: each sends one half of the columns and completes the other half, `mine`.
__device__ __forceinline__ void exchange(const float (&o)[kOutput], float (&mine)[kStored],
                                         Softmax& softmax, uint32_t rings, int warpgroup) {
  constexpr int kUpper = kOutput - kStored;  // where the upper half of the columns begins
  const int thread = threadIdx.x % 128;
  const uint32_t to = rings + warpgroup * kRingBytes + thread * 16,
                 from = rings + (1 - warpgroup) * kRingBytes + thread * 16;
  const float state[4] = {softmax.reference[0], softmax.reference[1], softmax.exact[0],
                          softmax.exact[1]};
  // All warps of this warpgroup have read the keys and values that lay here.
  ptx::named_barrier_sync(1 + warpgroup, 128);
  ptx::store_shared_float4(to, state);
#pragma unroll
  for (int i = 0; i < kStored; i += 4) {
    float sent[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sent[e] = warpgroup == 0 ? o[kUpper + i + e] : o[i + e];
      mine[i + e] = warpgroup == 0 ? o[i + e] : o[kUpper + i + e];
    }
    ptx::store_shared_float4(to + (1 + i / 4) * 2048, sent);
  }
  __syncthreads();
  const auto load = [&](int at) { return ptx::load_shared_int4(from + at * 2048); };
  const int4 its = load(0);
  const float references[2] = {__int_as_float(its.x), __int_as_float(its.y)},
              sums[2] = {__int_as_float(its.z), __int_as_float(its.w)};
  float own_share[2], its_share[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float moved = fmaxf(softmax.reference[half], references[half]);
    own_share[half] = ptx::ex2_approx(softmax.reference[half] - moved);
    its_share[half] = ptx::ex2_approx(references[half] - moved);
    softmax.reference[half] = moved;
    softmax.exact[half] = softmax.exact[half] * own_share[half] + sums[half] * its_share[half];
  }
#pragma unroll
  for (int i = 0; i < kStored; i += 4) {
    const int4 other = load(1 + i / 4);
    const float x[4] = {__int_as_float(other.x), __int_as_float(other.y), __int_as_float(other.z),
                        __int_as_float(other.w)};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      mine[i + e] = mine[i + e] * own_share[e / 2] + x[e] * its_share[e / 2];
  }
}

// Normalised rows to global memory, 16 bytes per lane, and the log-sum-exp. `o` holds the columns
// from `first_column` on.
__device__ __forceinline__ void store_output(const float (&o)[kStored], const Softmax& softmax,
                                             const blockflash_attention_fwd_params& p,
                                             const QueryWork& work, int first_column) {
  constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
  const int lane = threadIdx.x % 32;
  const int first_row = work.q_begin + threadIdx.x / 32 % 4 * 16;
  Element* const o_head = static_cast<Element*>(p.o) +
                          work.batch * p.o_stride_batch * (p.cu_seqlens_q == nullptr) +
                          work.head * p.o_stride_head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + accumulator_row(lane, 2 * half);
    float reference = softmax.reference[half];
    float denominator = quad_sum(softmax.exact[half]);
    float scale = 1.f;
    if (p.sink != nullptr) {
      const float sink = p.sink[work.head] * kLog2e;
      const float moved = fmaxf(reference, sink);
      scale = ptx::ex2_approx(reference - moved);
      denominator = denominator * scale + ptx::ex2_approx(sink - moved);
      reference = moved;
    }
    // A row without keys has the sum 0 and the output 0. NaN is not equal to 0 and passes through.
    scale = denominator == 0.f ? 0.f : scale / denominator;
    if (p.lse != nullptr && first_column == 0 && lane % 4 == 0 && row < work.seqlen_q)
      p.lse[work.batch * p.lse_stride_batch + work.head * p.lse_stride_head + work.q_offset + row] =
          fmaf(ptx::lg2_approx(denominator), kLn2, reference * kLn2);
    Element* const o_row = o_head + (work.q_offset + row) * p.o_stride_seq;
#pragma unroll
    for (int d = 0; d < kStored / 4; d += 4) {
      uint32_t piece[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &o[4 * (d + i) + 2 * half];
        piece[i] = Traits::pack(pair[0] * scale, pair[1] * scale);
      }
      quad_transpose(piece, lane);
      const int column = first_column + (d + lane % 4) * 8;
      if (row < work.seqlen_q && column < p.head_dim)
        *reinterpret_cast<uint4*>(o_row + column) =
            make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
  }
}

}  // namespace
}  // namespace blockflash

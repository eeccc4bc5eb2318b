// Epilogue: the partial results of the warpgroups of a CTA become one, and go to global memory.
#pragma once

#include "../attention_fwd_sm90a/softmax.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/shared.cuh"
#include "row_end.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

// Of each tile, the reference stays until a score exceeds it by 2^8, which no 16-bit probability
// overflows. The denominator is the sum of the unrounded probabilities.
using Softmax = HopperSoftmax<kRows / 2, 0, Config::threads, false, true>;

constexpr int kOutput = kD / 2;                 // accumulators of a lane,
constexpr int kStored = kOutput / kWarpgroups;  // and those that it stores
constexpr int kPieceBytes = 128 * kStored * 4;  // from a warpgroup to another one
constexpr int kStateBytes = 128 * 16;
// Each warpgroup stores one half of the columns, of two rows per lane or of one.
constexpr int kLaneRows = kWarpgroups == 4 ? 1 : 2;
constexpr int kPieces = kStored / (8 * kLaneRows);  // of 16 bytes in each row, of a lane
static_assert(kWarpgroups == 2 || kWarpgroups == 4, "halves of the columns, halves of the rows");

// The accumulator of a lane that is element `i` of what a warpgroup stores, row by row of each
// eight columns.
constexpr int accumulator_of(int warpgroup, int i) {
  return kLaneRows == 2 ? warpgroup * kStored + i
                        : warpgroup / 2 * (kOutput / 2) + i / 2 * 4 + warpgroup % 2 * 2 + i % 2;
}
// The row of such an element, of the two rows of a lane.
__device__ __forceinline__ int row_of(int warpgroup, int i) {
  return kLaneRows == 2 ? i / 2 % 2 : warpgroup % 2;
}
static_assert(kStateBytes + kWarpgroups * kPieceBytes <= kRingBytes,
              "partial results go where keys and values were");

// Adds the partial results of all warpgroups, in their order. Thread by thread they hold the same
// rows and columns: each completes a part of the columns, `mine`, and sends the others theirs.
__device__ __forceinline__ void exchange(const float (&o)[kOutput], float (&mine)[kStored],
                                         Softmax& softmax, uint32_t rings, int warpgroup) {
  const uint32_t thread = rings + threadIdx.x % 128 * 16;
  // Where a warpgroup leaves its references and sums, and the columns that `to` completes.
  const auto state_of = [&](int from) { return thread + from * kRingBytes; };
  const auto piece_of = [&](int from, int to) {
    return state_of(from) + kStateBytes + to * kPieceBytes;
  };
  const float state[4] = {softmax.true_reference(0), softmax.true_reference(1), softmax.exact[0],
                          softmax.exact[1]};
  // All warps of this warpgroup have read the keys and values that were here.
  ptx::named_barrier_sync(1 + warpgroup, 128);
  ptx::store_shared_float4(state_of(warpgroup), state);
#pragma unroll
  for (int to = 0; to < kWarpgroups; ++to) {
    if (to == warpgroup) {
#pragma unroll
      for (int i = 0; i < kStored; ++i) mine[i] = o[accumulator_of(to, i)];
    } else {
#pragma unroll
      for (int i = 0; i < kStored; i += 4) {
        const float sent[4] = {o[accumulator_of(to, i)], o[accumulator_of(to, i + 1)],
                               o[accumulator_of(to, i + 2)], o[accumulator_of(to, i + 3)]};
        ptx::store_shared_float4(piece_of(warpgroup, to) + i / 4 * kStateBytes, sent);
      }
    }
  }
  __syncthreads();
  const auto load = [](uint32_t at) {
    const int4 x = ptx::load_shared_int4(at);
    return make_float4(__int_as_float(x.x), __int_as_float(x.y), __int_as_float(x.z),
                       __int_as_float(x.w));
  };
  float4 states[kWarpgroups];  // of both rows: references, sums
  float moved[2] = {state[0], state[1]};
#pragma unroll
  for (int from = 0; from < kWarpgroups; ++from) {
    states[from] = load(state_of(from));
    moved[0] = fmaxf(moved[0], states[from].x), moved[1] = fmaxf(moved[1], states[from].y);
  }
  float sums[2] = {0.f, 0.f}, added[kStored] = {};
#pragma unroll
  for (int from = 0; from < kWarpgroups; ++from) {
    const float share[2] = {ptx::ex2_approx(states[from].x - moved[0]),
                            ptx::ex2_approx(states[from].y - moved[1])};
    sums[0] = fmaf(states[from].z, share[0], sums[0]);
    sums[1] = fmaf(states[from].w, share[1], sums[1]);
#pragma unroll
    for (int i = 0; i < kStored; i += 4) {
      float4 x = make_float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
      if (from != warpgroup) x = load(piece_of(from, warpgroup) + i / 4 * kStateBytes);
      const float low = row_of(warpgroup, i) == 0 ? share[0] : share[1];
      const float high = row_of(warpgroup, i + 2) == 0 ? share[0] : share[1];
      added[i] = fmaf(x.x, low, added[i]), added[i + 1] = fmaf(x.y, low, added[i + 1]);
      added[i + 2] = fmaf(x.z, high, added[i + 2]), added[i + 3] = fmaf(x.w, high, added[i + 3]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    softmax.reference[half] = moved[half], softmax.exact[half] = sums[half];
#pragma unroll
  for (int i = 0; i < kStored; ++i) mine[i] = added[i];
}

// What this warpgroup completed, normalised, to global memory, 16 bytes per lane, and the
// log-sum-exp.
__device__ __forceinline__ void store_output(const float (&o)[kStored], const Softmax& softmax,
                                             const blockflash_attention_fwd_params& p,
                                             const Work& work, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const int first_column = warpgroup * kLaneRows / 2 * (kD / 2);
  const int first_row = work.q_begin + threadIdx.x / 32 % 4 * 16;
  Element* const o_head =
      static_cast<Element*>(p.o) + work.batch * p.o_stride_batch + work.head * p.o_stride_head;
  // All rows in each step, whose latencies overlap so.
  float reference[kLaneRows], denominator[kLaneRows], scale[kLaneRows];
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    const int half = row_of(warpgroup, 2 * r);
    reference[r] = half == 0 ? softmax.reference[0] : softmax.reference[1];
    denominator[r] = quad_sum(half == 0 ? softmax.exact[0] : softmax.exact[1]);
  }
  end_rows(p.scores, work.head, reference, denominator, scale);
  uint32_t pieces[kPieces][kLaneRows][4];
#pragma unroll
  for (int d = 0; d < kPieces; ++d)
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &o[2 * (kLaneRows * (4 * d + i) + r)];
        pieces[d][r][i] = Traits::pack(pair[0] * scale[r], pair[1] * scale[r]);
      }
      quad_transpose(pieces[d][r], lane);
    }
  const auto row_at = [&](int r) {
    return first_row + accumulator_row(lane, 2 * row_of(warpgroup, 2 * r));
  };
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    Element* const o_row = o_head + row_at(r) * p.o_stride_seq;
#pragma unroll
    for (int d = 0; d < kPieces; ++d) {
      const uint32_t(&piece)[4] = pieces[d][r];
      const int column = first_column + (4 * d + lane % 4) * 8;
      if (row_at(r) < p.seqlen_q && column < p.head_dim_v)
        *reinterpret_cast<uint4*>(o_row + column) =
            make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
  }
  if (p.lse == nullptr || first_column > 0 || lane % 4 > 0) return;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r)
    if (row_at(r) < p.seqlen_q)
      p.lse[work.batch * p.lse_stride_batch + work.head * p.lse_stride_head + row_at(r)] =
          fmaf(ptx::lg2_approx(denominator[r]), kLn2, reference[r] * kLn2);
}

}  // namespace
}  // namespace blockflash

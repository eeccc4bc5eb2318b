// Results of runs in the workspace: how they are stored, combined in a fixed order, and become
// rows of the output.
#pragma once

#include "blockflash/decode/partials.cuh"
#include "blockflash/decode/runs.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

constexpr int kTeamBarrier = 1;
constexpr int kColumns4 = Config::head_dim_v / 4;  // pieces of four columns

// The first threads of a CTA, which end an item.
struct Team {
  static constexpr int threads = Config::team;
  static __device__ __forceinline__ void sync() {
    if constexpr (threads == Config::threads)
      __syncthreads();
    else
      ptx::named_barrier_sync(kTeamBarrier, threads);
  }
  // Among those that have pieces of a row.
  static __device__ __forceinline__ void sync_rows() {
    if constexpr (kWarpSize % kColumns4 == 0)
      __syncwarp();
    else
      sync();
  }
};

// The rows of a row tile that exist.
__device__ __forceinline__ int rows_of(const blockflash_attention_decode_params& p,
                                       const DecodeRun& item) {
  return min(item.q_length * p.group - item.row_tile * Config::rows, Config::rows);
}

// A partial result in the workspace.
struct RunSlot {
  float* sums;
  float2* logs;
  __device__ __forceinline__ RunSlot(const blockflash_attention_decode_params& p, int number)
      : sums(p.partial_sums + static_cast<int64_t>(number) * p.partial_rows * p.head_dim_v),
        logs(reinterpret_cast<float2*>(p.partial_logs) +
             static_cast<int64_t>(number) * p.partial_rows) {}
};

// Adds the sums over later keys: of four columns what `Sums::join_after` does of all.
__device__ __forceinline__ void combine(Partial& x, const Partial& later) {
  const float moved = fmaxf(x.reference, later.reference);
  const float mine = ptx::ex2_approx(x.reference - moved),
              its = ptx::ex2_approx(later.reference - moved);
  x.reference = moved;
  x.denominator = fmaf(its, later.denominator, mine * x.denominator);
  x.sum.x = fmaf(its, later.sum.x, mine * x.sum.x);
  x.sum.y = fmaf(its, later.sum.y, mine * x.sum.y);
  x.sum.z = fmaf(its, later.sum.z, mine * x.sum.z);
  x.sum.w = fmaf(its, later.sum.w, mine * x.sum.w);
}

// Where a row of a row tile is in o and in the log-sum-exp, and its head.
struct RowPlace {
  int head;
  int64_t o, lse;
  __device__ __forceinline__ RowPlace(const blockflash_attention_decode_params& p,
                                      const DecodeRun& item, int row_in_tile) {
    const int row = item.row_tile * Config::rows + row_in_tile;
    const int query = small_quotient(row, p.group);
    const int64_t sequence = p.cu_seqlens_q != nullptr ? 0 : item.sequence;
    head = item.head_kv * p.group + row - query * p.group;
    o = sequence * p.o_stride_batch + static_cast<int64_t>(item.q_begin + query) * p.o_stride_seq +
        head * p.o_stride_head;
    lse = sequence * p.lse_stride_batch + head * p.lse_stride_head + item.q_begin + query;
  }
};

// What joins a row when all of its keys have.
__device__ __forceinline__ void end_row(const blockflash_attention_decode_params& p,
                                        const RowPlace& at, Partial& x) {
  if (p.scores.sink != nullptr) add_sink(x, Log2Units::sink(p.scores, at.head));
}

// Four columns of o, and with the first ones the log-sum-exp.
__device__ __forceinline__ void store_result(const blockflash_attention_decode_params& p,
                                             const DecodeRun& item, int row, int piece, Partial x) {
  const RowPlace at(p, item, row);
  end_row(p, at, x);
  *reinterpret_cast<uint2*>(static_cast<Element*>(p.o) + at.o + piece * 4) = quotient<Element>(x);
  if (p.lse != nullptr && piece == 0) p.lse[at.lse] = log_sum_exp(x);
}

// A part of the rows of a row tile, as equal as can be.
struct RowShare {
  int begin, end;
  __device__ __forceinline__ RowShare(int rows, int share, int shares)
      : begin(small_quotient(rows * share, shares)),
        end(small_quotient(rows * (share + 1), shares)) {}
};

// Combines the first `some` of the parts into parts[0]. Single splits are combined four by four,
// one after another; everything else is combined in pairs, and pairs of pairs.
template <int most>
__device__ __forceinline__ void join_all(Partial (&parts)[most], int some, bool are_splits) {
  const auto pair = [&](int earlier, int later) {
    if (later < some) combine(parts[earlier], parts[later]);
  };
#pragma unroll
  for (int s = 0; s < most; s += kInner) {
    pair(s, s + 1);
    if (are_splits) {
      pair(s, s + 2);
      pair(s, s + 3);
    } else {
      pair(s + 2, s + 3);
      pair(s, s + 2);
    }
  }
#pragma unroll
  for (int distance = kInner; distance < most; distance *= 2)
#pragma unroll
    for (int s = 0; s + distance < most; s += 2 * distance) pair(s, s + distance);
}

// Slots of the workspace: first, first + step, …, `count` of them.
struct Slots {
  int first, step, count;
  bool are_splits;  // each has a single split, and not several that were combined
};

// Combines some rows of the slots into slot `first`, or into the output. A thread has this
// number of pieces of rows, and of slots, on their way at once, since loads take long.
template <int at_once, int most>
__device__ __forceinline__ void combine_pieces(const blockflash_attention_decode_params& p,
                                               const DecodeRun& item, const Slots& slots,
                                               bool to_output, const RowShare& rows) {
  const auto [first, step, count, are_splits] = slots;
  const RunSlot slot(p, first);
  const int64_t rows_apart = static_cast<int64_t>(step) * p.partial_rows;
  const int pieces = (rows.end - rows.begin) * kColumns4;
#pragma unroll 1
  for (int i = 0; i < pieces; i += at_once * Team::threads) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const int piece = thread % kColumns4, first_row = rows.begin + (i + thread) / kColumns4;
    constexpr int kRowsApart = Team::threads / kColumns4;  // pieces of a thread
    const auto is_mine = [&](int n) {
      return first_row + n * kRowsApart < rows.end && piece * 4 < p.head_dim_v;
    };
    Partial all[at_once]{};
#pragma unroll 1
    for (int before = 0; before < count; before += most) {
      const int some = count - before;
      Partial parts[at_once][most];
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        const int row = first_row + n * kRowsApart;
        const float* sums = slot.sums + (row + before * rows_apart) * p.head_dim_v + piece * 4;
        const float2* logs = slot.logs + row + before * rows_apart;
#pragma unroll
        for (int s = 0; s < most; ++s) {
          parts[n][s] = {};
          if (!is_mine(n) || s >= some) continue;
          parts[n][s].sum = __ldcg(reinterpret_cast<const float4*>(sums));
          const float2 of_row = __ldcg(logs);
          parts[n][s].reference = of_row.x, parts[n][s].denominator = of_row.y;
          sums += rows_apart * p.head_dim_v, logs += rows_apart;
        }
      }
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        join_all(parts[n], some, are_splits);
        if (before == 0)
          all[n] = parts[n][0];
        else
          combine(all[n], parts[n][0]);
      }
    }
    Team::sync_rows();  // all have read the logarithms of slot `first`
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int row = first_row + n * kRowsApart;
      if (!is_mine(n)) continue;
      if (to_output) {
        store_result(p, item, row, piece, all[n]);
      } else {
        __stcg(reinterpret_cast<float4*>(slot.sums + row * p.head_dim_v + piece * 4), all[n].sum);
        if (piece == 0) __stcg(slot.logs + row, make_float2(all[n].reference, all[n].denominator));
      }
    }
  }
}

__device__ __forceinline__ void combine_slots(const blockflash_attention_decode_params& p,
                                              const DecodeRun& item, const Slots& slots,
                                              bool to_output, const RowShare& rows) {
  if (slots.count <= kInner)
    combine_pieces<kGroup / kInner, kInner>(p, item, slots, to_output, rows);
  else
    combine_pieces<1, kGroup>(p, item, slots, to_output, rows);
}

}  // namespace
}  // namespace blockflash

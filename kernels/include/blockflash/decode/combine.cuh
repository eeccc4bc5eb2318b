// From the results of splits in the workspace to the output: the CTA that completes a group of
// splits combines it, and the CTA that completes the groups combines those.
//
// `Tile` describes the tile of a kernel: `rows`, `columns` of the output, `threads` of a CTA,
// `Element`, and `store`, which writes four elements of a row of the output.
#pragma once

#include "blockflash/decode/arrivals.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {

constexpr int kInner = 4;                // splits that are combined first
constexpr int kGroup = kInner * kInner;  // and those that are combined then

// The rows of a row tile that exist.
template <class Tile>
__device__ __forceinline__ int rows_of(const blockflash_attention_decode_params& p,
                                       const DecodeItem& item) {
  const int rows = item.q_length * p.group;
  return min(rows - item.row_tile * Tile::rows, Tile::rows);
}

// A partial result in the workspace.
struct Slot {
  float* sums;
  float2* logs;
  __device__ __forceinline__ Slot(const blockflash_attention_decode_params& p, int number)
      : sums(p.partial_sums + static_cast<int64_t>(number) * p.partial_rows * p.head_dim_v),
        logs(reinterpret_cast<float2*>(p.partial_logs) +
             static_cast<int64_t>(number) * p.partial_rows) {}
  __device__ __forceinline__ float4* sum(const blockflash_attention_decode_params& p, int row,
                                         int piece) const {
    return reinterpret_cast<float4*>(sums + row * p.head_dim_v) + piece;
  }
  __device__ __forceinline__ Partial load(const blockflash_attention_decode_params& p, int row,
                                          int piece, int64_t rows_before) const {
    const float2 of_row = __ldcg(logs + row + rows_before);
    return {__ldcg(sum(p, row, piece) + rows_before * p.head_dim_v / 4), of_row.x, of_row.y};
  }
  // The logarithms of a row are stored with one of its pieces.
  __device__ __forceinline__ void store(const blockflash_attention_decode_params& p, int row,
                                        int piece, const Partial& x, int with_logs = 0) const {
    __stcg(sum(p, row, piece), x.sum);
    if (piece == with_logs) __stcg(logs + row, make_float2(x.reference, x.denominator));
  }
};

// Four columns of o, and with the first ones the log-sum-exp.
template <class Tile>
__device__ __forceinline__ void store_result(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int row_in_tile, int piece,
                                             Partial x) {
  using Element = typename Tile::Element;
  const int row = item.row_tile * Tile::rows + row_in_tile;
  const int query = small_quotient(row, p.group);
  const int head = item.head_kv * p.group + row - query * p.group;
  if (p.scores.sink != nullptr) add_sink(x, Log2Units::sink(p.scores, head));
  const bool packed = p.cu_seqlens_q != nullptr;
  Element* const o = static_cast<Element*>(p.o) + (packed ? 0 : item.sequence * p.o_stride_batch) +
                     static_cast<int64_t>(item.q_begin + query) * p.o_stride_seq +
                     head * p.o_stride_head;
  Tile::store(p, o, piece, x);
  if (p.lse != nullptr && piece == 0)
    p.lse[(packed ? 0 : item.sequence * p.lse_stride_batch) + head * p.lse_stride_head +
          item.q_begin + query] = log_sum_exp(x);
}

// Combines the results of the splits first, first + step, …, `count` of them, into that of split
// `first`, or into the output. With `inner` > 1 as many are first combined with each other.
template <class Tile, int inner>
__device__ __forceinline__ void combine_splits(const blockflash_attention_decode_params& p,
                                               const DecodeItem& item, int first, int step,
                                               int count, bool to_output) {
  constexpr int kColumns4 = Tile::columns / 4;  // pieces of four columns
  const Slot slot(p, item.slot_of(first));
  const int64_t rows_apart = static_cast<int64_t>(step) * item.slot_step * p.partial_rows;
  const int pieces = rows_of<Tile>(p, item) * kColumns4;
  // Where the threads take a row in several turns, the last one stores its logarithms: until then
  // they are those of split `first`.
  const int with_logs =
      kColumns4 > Tile::threads ? (p.head_dim_v / 4 - 1) / Tile::threads * Tile::threads : 0;
  // A thread has several pieces of larger tiles on their way at once.
  constexpr int kAtOnce = Tile::rows > kMostRowsOfRuns ? 2 : 1;
  for (int i = 0; i < pieces; i += kAtOnce * Tile::threads) {
    const int at = i + ptx::opaque(static_cast<int>(threadIdx.x));
    const auto row_of = [&](int n) { return (at + n * Tile::threads) / kColumns4; };
    const auto piece_of = [&](int n) { return (at + n * Tile::threads) % kColumns4; };
    const auto is_mine = [&](int n) {
      return at + n * Tile::threads < pieces && piece_of(n) * 4 < p.head_dim_v;
    };
    Partial x[kAtOnce];
    if (is_mine(0))
      combine_in_order<inner, 8>(
          count,
          [&](int n, int s) {
            return n == 0 || is_mine(n) ? slot.load(p, row_of(n), piece_of(n), s * rows_apart)
                                        : kNoPartial;
          },
          x);
    __syncthreads();  // all have read the logarithms of split `first`
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (!is_mine(n)) continue;
      if (to_output)
        store_result<Tile>(p, item, row_of(n), piece_of(n), x[n]);
      else
        slot.store(p, row_of(n), piece_of(n), x[n], with_logs);
    }
  }
}

// The group of an item's splits: a run does not cross groups.
struct SplitGroup {
  int first, count;  // first split, and splits

  __device__ __forceinline__ explicit SplitGroup(const DecodeItem& item)
      : first(item.split / kGroup * kGroup), count(min(item.splits - first, kGroup)) {}
};

// Most columns of a tile whose threads have registers for the results of a run.
constexpr int kMostColumnsOfRuns = 256;

// Whether the results of an item's splits are combined in registers, since there are few rows. A
// tile may say that it has no registers for that.
template <class Tile>
__device__ __forceinline__ bool combines_runs(const DecodeItem& item) {
  if constexpr (requires { Tile::holds_no_runs; }) return false;
  return Tile::rows <= kMostRowsOfRuns && Tile::columns <= kMostColumnsOfRuns &&
         1 << item.run_log2 >= kInner;
}

// Combines the splits of a complete group, and the groups when they are complete.
template <class Tile>
__device__ __forceinline__ void combine_group(const blockflash_attention_decode_params& p,
                                              const DecodeItem& item, const Arrivals& arrivals,
                                              bool& last) {
  const SplitGroup group(item);
  const int groups = ceil_div(item.splits, kGroup);
  const bool is_one = groups == 1;
  if (!combines_runs<Tile>(item))
    combine_splits<Tile, kInner>(p, item, group.first, 1, group.count, is_one);
  else if (item.count < group.count)
    combine_splits<Tile, 1>(p, item, group.first, kInner, ceil_div(group.count, kInner), is_one);
  if (is_one) return;
  __syncthreads();
  // With several groups there is a split 1, whose counter is not used by a group.
  if (threadIdx.x == 0) last = arrivals.are_complete_with_this(item.slot_of(1), groups);
  __syncthreads();
  if (last) combine_splits<Tile, 1>(p, item, 0, kGroup, groups, true);
}

// Ends item n with all threads. Whether it completed its group is asked for here and looked at when
// the next item ends, so that nobody waits for the answer. `Shared` has the items, n in slot n % 4,
// `arrivals`, and `last[2]`, whether an item completed its group.
template <class Tile, class Shared>
__device__ __forceinline__ void finish_item(const blockflash_attention_decode_params& p, int n,
                                            Shared& shared) {
  const DecodeItem& item = shared.items[n & 3];
  const bool ends = shared.items[(n + 1) & 3].sequence < 0;
  if (ends) ptx::launch_dependents();
  // First the item before this one; then, if no other follows, this one.
  int ended = n - 1;
#pragma unroll 1
  while (true) {
    bool& last = shared.last[ended & 1];
    if (ended >= 0 && last) combine_group<Tile>(p, shared.items[ended & 3], shared.arrivals, last);
    if (ended == n) return;
    __syncthreads();  // all have stored, and the stages may be filled again
    if (threadIdx.x == Tile::threads - 1) {
      const SplitGroup group(item);
      const int runs = ((group.count - 1) >> item.run_log2) + 1;
      shared.last[n & 1] = item.splits > 1 &&
                           shared.arrivals.are_complete_with_this(item.slot_of(group.first), runs);
    }
    if (!ends) return;
    __syncthreads();
    ended = n;
  }
}

}  // namespace blockflash

// From the sums of the warps to the output: warps are combined through shared memory, splits
// through the workspace, by the CTA that completes a row tile, or through the shared memory of a
// cluster.
#pragma once

#include "blockflash/decode/arrivals.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/params/kv_cache.h"
#include "code_sums.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {

constexpr int kInner = 4;                        // splits that are combined first
constexpr int kGroup = kInner * kInner;          // and those that are combined then
constexpr int kColumns4 = Config::head_dim / 4;  // pieces of four columns
constexpr int kPassRows = 8;                     // rows that warps exchange at once
constexpr int kQOffset = Config::warps * Config::stages * kStageBytes;
constexpr int kLogsOffset = kPassRows * Config::head_dim * 4;
static_assert(
    kLogsOffset + (kHasCodes ? 0 : Config::rows * 8) <= kStageBytes,
    "the sums of a pass, and reference and denominator of each row, are in a free stage of "
    "each warp; with codes, these are elsewhere");

struct Shared {
  DecodeItem items[4];          // item n in slot n % 4; three are in use at a time
  ItemWalk<Config::rows> walk;  // of the warp that publishes items,
  int number;                   // and the number of the item that it publishes next; -1: none
  int published;                // items 0 to `published` are
  int first_key[Config::warps][Config::stages];  // of the step in each stage
  int staging[Config::warps];                    // offset of a free stage
  LaunchWords launch_words;
  Arrivals arrivals;             // if there is a workspace
  bool last[2];                  // whether the item completed its group of splits
  float2 shown_logs[kPassRows];  // what the CTAs of a cluster read of each other

  // Four columns of a row for the other CTAs of the cluster.
  __device__ __forceinline__ void show(unsigned char* smem, int row, int piece, const Partial& x) {
    reinterpret_cast<float4*>(smem + kQOffset)[row * (Config::head_dim / 4) + piece] = x.sum;
    if (piece == 0) shown_logs[row] = make_float2(x.reference, x.denominator);
  }
};
constexpr int kCodesOffset = kQOffset + 2 * kQBytes + 1024;
static_assert(sizeof(Shared) <= 1024 &&
                  Config::smem_bytes ==
                      kCodesOffset + (kHasCodes ? static_cast<int>(sizeof(CodesShared)) : 0),
              "manifest and kernel disagree on smem");
__device__ __forceinline__ CodesShared& codes_shared(unsigned char* smem) {
  return *reinterpret_cast<CodesShared*>(smem + kCodesOffset);
}

// Reference and denominator of the rows of a warp whose free stage is at an offset.
__device__ __forceinline__ float2* logs_of(unsigned char* smem, int warp, int offset) {
  if constexpr (kHasCodes)
    return codes_shared(smem).logs[warp];
  else
    return reinterpret_cast<float2*>(smem + offset + kLogsOffset);
}

// Where a warp stages column `column` of row `row`. The permutation avoids bank conflicts.
__device__ __forceinline__ int staged(int row, int column) {
  return row * Config::head_dim + (column ^ (row / 2 % 4 * 8));
}

// The rows of a row tile that exist.
__device__ __forceinline__ int rows_of(const blockflash_attention_decode_params& p,
                                       const DecodeItem& item) {
  const int rows = item.q_length * p.group;
  return min(rows - item.row_tile * Config::rows, Config::rows);
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
  __device__ __forceinline__ void store(const blockflash_attention_decode_params& p, int row,
                                        int piece, const Partial& x) const {
    __stcg(sum(p, row, piece), x.sum);
    if (piece == 0) __stcg(logs + row, make_float2(x.reference, x.denominator));
  }
};

// Four columns of o, and with the first ones the log-sum-exp.
__device__ __forceinline__ void store_result(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int row_in_tile, int piece,
                                             Partial x) {
  const int row = item.row_tile * Config::rows + row_in_tile;
  const int query = small_quotient(row, p.group);
  const int head = item.head_kv * p.group + row - query * p.group;
  if (p.scores.sink != nullptr) add_sink(x, Log2Units::sink(p.scores, head));
  const bool packed = p.cu_seqlens_q != nullptr;
  Element* const o = static_cast<Element*>(p.o) + (packed ? 0 : item.sequence * p.o_stride_batch) +
                     static_cast<int64_t>(item.q_begin + query) * p.o_stride_seq +
                     head * p.o_stride_head;
  if (kHasCodes && with_scales(p).q_dtype == BLOCKFLASH_DTYPE_BF16)
    *reinterpret_cast<uint2*>(o + piece * 4) = quotient<__nv_bfloat16>(x);
  else
    *reinterpret_cast<uint2*>(o + piece * 4) = quotient<Element>(x);
  if (p.lse != nullptr && piece == 0)
    p.lse[(packed ? 0 : item.sequence * p.lse_stride_batch) + head * p.lse_stride_head +
          item.q_begin + query] = log_sum_exp(x);
}

// Combines the results of the splits first, first + step, …, `count` of them, into that of split
// `first`, or into the output. With `inner` > 1 as many are first combined with each other.
template <int inner>
__device__ __forceinline__ void combine_splits(const blockflash_attention_decode_params& p,
                                               const DecodeItem& item, int first, int step,
                                               int count, bool to_output) {
  const Slot slot(p, item.slot_of(first));
  const int64_t rows_apart = static_cast<int64_t>(step) * item.slot_step * p.partial_rows;
  const int pieces = rows_of(p, item) * kColumns4;
  // A thread has several pieces of larger tiles on their way at once.
  constexpr int kAtOnce = Config::rows > kPassRows ? 2 : 1;
  for (int i = 0; i < pieces; i += kAtOnce * Config::threads) {
    const int at = i + ptx::opaque(static_cast<int>(threadIdx.x));
    const auto row_of = [&](int n) { return (at + n * Config::threads) / kColumns4; };
    const auto piece_of = [&](int n) { return (at + n * Config::threads) % kColumns4; };
    const auto is_mine = [&](int n) {
      return at + n * Config::threads < pieces && piece_of(n) * 4 < p.head_dim_v;
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
        store_result(p, item, row_of(n), piece_of(n), x[n]);
      else
        slot.store(p, row_of(n), piece_of(n), x[n]);
    }
  }
}

// The group of an item's splits: a run does not cross groups.
struct SplitGroup {
  int first, count;  // first split, and splits

  __device__ __forceinline__ explicit SplitGroup(const DecodeItem& item)
      : first(item.split / kGroup * kGroup), count(min(item.splits - first, kGroup)) {}
};

// Runs of splits whose results are combined in registers, since there are few.
constexpr bool kCombinesRuns = Config::rows <= kPassRows;
static_assert(kPassRows == kMostRowsOfRuns, "whoever chooses runs knows whether they pay");

__device__ __forceinline__ bool combines_runs(const DecodeItem& item) {
  return kCombinesRuns && 1 << item.run_log2 >= kInner;
}

// What a thread holds of a run: the splits that are combined first, and the run if it is a group.
struct RunSums {
  static constexpr int kPieces =
      kCombinesRuns ? ceil_div(Config::rows * kColumns4, Config::threads) : 1;
  Partial inner[kPieces], all[kPieces];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) inner[i] = all[i] = kNoPartial;
  }
  // Takes the result of a split and stores what is complete with it.
  __device__ __forceinline__ void take(const blockflash_attention_decode_params& p,
                                       const DecodeItem& item, int split, int i, int row, int piece,
                                       const Partial& x) {
    add(inner[i], x);
    const bool ends = split + 1 == item.split + item.count;
    if (split % kInner != kInner - 1 && !ends) return;
    const SplitGroup group(item);
    if (item.count < group.count) {
      Slot(p, item.slot_of(split / kInner * kInner)).store(p, row, piece, inner[i]);
    } else {
      add(all[i], inner[i]);
      if (ends && item.count == item.splits)
        store_result(p, item, row, piece, all[i]);
      else if (ends)
        Slot(p, item.slot_of(group.first)).store(p, row, piece, all[i]);
    }
    inner[i] = kNoPartial;
  }
};

// Combines the splits of a complete group, and the groups when they are complete.
__device__ __forceinline__ void combine_group(const blockflash_attention_decode_params& p,
                                              const DecodeItem& item, const Arrivals& arrivals,
                                              bool& last) {
  const SplitGroup group(item);
  const int groups = ceil_div(item.splits, kGroup);
  const bool is_one = groups == 1;
  if (!combines_runs(item))
    combine_splits<kInner>(p, item, group.first, 1, group.count, is_one);
  else if (item.count < group.count)
    combine_splits<1>(p, item, group.first, kInner, ceil_div(group.count, kInner), is_one);
  if (is_one) return;
  __syncthreads();
  // With several groups there is a split 1, whose counter is not used by a group.
  if (threadIdx.x == 0) last = arrivals.are_complete_with_this(item.slot_of(1), groups);
  __syncthreads();
  if (last) combine_splits<1>(p, item, 0, kGroup, groups, true);
}

// Stores the result of a split with all threads: in a cluster in shared memory, where queries were.
template <bool in_cluster>
__device__ __forceinline__ void finish_split(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int split, Sums& sums,
                                             RunSums& run, Shared& shared, unsigned char* smem,
                                             int free_stage) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int offset = (warp * Config::stages + free_stage) * kStageBytes;
  if (lane == 0) shared.staging[warp] = offset;
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float denominator = column_sum(sums.denominator[row_tile][e]);
      if (lane < 4)
        logs_of(smem, warp, offset)[row_tile * 8 + lane * 2 + e] =
            make_float2(sums.reference[row_tile][e], denominator);
    }
  float* const staging = reinterpret_cast<float*>(smem + offset);
  const int rows = rows_of(p, item);
#pragma unroll
  for (int pass = 0; pass < Config::rows; pass += kPassRows) {
    if (pass > 0) __syncthreads();  // all have read the pass before
    sums.stage(staging, pass / 8, lane, staged);
    __syncthreads();
    const int pieces = min(rows - pass, kPassRows) * kColumns4;
#pragma unroll
    for (int i = 0; i < ceil_div(kPassRows * kColumns4, Config::threads); ++i) {
      const int at = i * Config::threads + thread;
      const int row = at / kColumns4, piece = at % kColumns4;
      if (at >= pieces || piece * 4 >= p.head_dim_v) continue;
      const Partial x = combine<Config::warps>([&](int w) {
        const unsigned char* const of_warp = smem + shared.staging[w];
        const float2 of_row = logs_of(smem, w, shared.staging[w])[pass + row];
        return Partial{*reinterpret_cast<const float4*>(of_warp + staged(row, piece * 4) * 4),
                       of_row.x, of_row.y};
      });
      if constexpr (in_cluster)
        shared.show(smem, row, piece, x);
      else if (item.splits == 1)
        store_result(p, item, pass + row, piece, x);
      else if (combines_runs(item))
        run.take(p, item, split, kCombinesRuns ? i : 0, row, piece, x);
      else
        Slot(p, item.slot_of(split)).store(p, pass + row, piece, x);
    }
  }
}

// Ends item n with all threads. Whether it completed its group is asked for here and looked at when
// the next item ends, so that nobody waits for the answer.
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
    if (ended >= 0 && last) combine_group(p, shared.items[ended & 3], shared.arrivals, last);
    if (ended == n) return;
    __syncthreads();  // all have stored, and the stages may be filled again
    if (threadIdx.x == Config::threads - 1) {
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

}  // namespace
}  // namespace blockflash

// From the sums of the warps to the output: warps are combined through shared memory, splits
// through the workspace, by the CTA that completes a row tile, or through the shared memory of a
// cluster.
#pragma once

#include "blockflash/decode/arrivals.cuh"
#include "blockflash/decode/combine.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/params/kv_cache.h"
#include "code_sums.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {

constexpr int kColumns4 = Config::head_dim / 4;  // pieces of four columns
constexpr int kPassRows = 8;                     // rows that warps exchange at once
// Most rows that the CTAs of a cluster combine.
constexpr int kShownRows = kHasIndex ? 16 : kPassRows;
constexpr int kQOffset = Config::warps * Config::stages * kStageBytes;
constexpr int kLogsOffset = kPassRows * Config::head_dim * 4;
static_assert(
    kLogsOffset + (kHasCodes ? 0 : Config::rows * 8) <= kStageBytes,
    "the sums of a pass, and reference and denominator of each row, are in a free stage of "
    "each warp; with codes, these are elsewhere");

struct Shared {
  Item items[4];  // item n in slot n % 4; three are in use at a time
  Walk walk;      // of the warp that publishes items,
  int number;     // and the number of the item that it publishes next; -1: none
  int published;  // items 0 to `published` are
  int first_key[Config::warps][Config::stages];  // of the step in each stage
  int staging[Config::warps];                    // offset of a free stage
  LaunchWords launch_words;
  Arrivals arrivals;              // if there is a workspace
  bool last[2];                   // whether the item completed its group of splits
  float2 shown_logs[kShownRows];  // what the CTAs of a cluster read of each other

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

// Lists have few splits, so that their kernels need no registers for runs of them.
template <bool has_index>
struct RunsOfTile {};
template <>
struct RunsOfTile<true> {
  static constexpr bool holds_no_runs = true;
};

// The output for decode/combine.cuh.
struct OutputTile : RunsOfTile<kHasIndex> {
  static constexpr int rows = Config::rows, columns = Config::head_dim, threads = Config::threads;
  using Element = Config::Element;

  static __device__ __forceinline__ void store(const blockflash_attention_decode_params& p,
                                               Element* row, int piece, const Partial& x) {
    if (kHasCodes && with_scales(p).q_dtype == BLOCKFLASH_DTYPE_BF16)
      *reinterpret_cast<uint2*>(row + piece * 4) = quotient<__nv_bfloat16>(x);
    else
      *reinterpret_cast<uint2*>(row + piece * 4) = quotient<Element>(x);
  }
};

// Runs of splits whose results are combined in registers, since there are few.
constexpr bool kCombinesRuns =
    !kHasIndex && Config::rows <= kPassRows && Config::head_dim <= kMostColumnsOfRuns;
// A pass over wide rows is many pieces for each thread of a single warp.
constexpr int kPiecesOfPass = ceil_div(kPassRows * kColumns4, Config::threads);
constexpr int kMostPiecesAtOnce = 8;
static_assert(kPassRows == kMostRowsOfRuns, "whoever chooses runs knows whether they pay");

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
        store_result<OutputTile>(p, item, row, piece, all[i]);
      else if (ends)
        Slot(p, item.slot_of(group.first)).store(p, row, piece, all[i]);
    }
    inner[i] = kNoPartial;
  }
};

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
  const int rows = rows_of<OutputTile>(p, item);
#pragma unroll
  for (int pass = 0; pass < Config::rows; pass += kPassRows) {
    if (pass > 0) __syncthreads();  // all have read the pass before
    sums.stage(staging, pass / 8, lane, staged);
    __syncthreads();
    const int pieces = min(rows - pass, kPassRows) * kColumns4;
    const auto finish_piece = [&](int i) {
      const int at = i * Config::threads + thread;
      const int row = at / kColumns4, piece = at % kColumns4;
      if (at >= pieces || piece * 4 >= p.head_dim_v) return;
      const Partial x = combine<Config::warps>([&](int w) {
        const unsigned char* const of_warp = smem + shared.staging[w];
        const float2 of_row = logs_of(smem, w, shared.staging[w])[pass + row];
        return Partial{*reinterpret_cast<const float4*>(of_warp + staged(row, piece * 4) * 4),
                       of_row.x, of_row.y};
      });
      if constexpr (in_cluster)
        shared.show(smem, pass + row, piece, x);
      else if (item.splits == 1)
        store_result<OutputTile>(p, item, pass + row, piece, x);
      else if (combines_runs<OutputTile>(item))
        run.take(p, item, split, kCombinesRuns ? i : 0, row, piece, x);
      else
        Slot(p, item.slot_of(split)).store(p, pass + row, piece, x);
    };
    if constexpr (kPiecesOfPass <= kMostPiecesAtOnce) {
#pragma unroll
      for (int i = 0; i < kPiecesOfPass; ++i) finish_piece(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < kPiecesOfPass; i += 4)
#pragma unroll
        for (int j = 0; j < 4; ++j) finish_piece(i + j);
    }
  }
}

}  // namespace
}  // namespace blockflash

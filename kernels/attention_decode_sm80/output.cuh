// From the sums of the warps to the output: warps are combined through shared memory, splits
// through the workspace, by the CTA that completes a row tile.
#pragma once

#include "blockflash/decode/partials.cuh"
#include "blockflash/ptx/global.cuh"
#include "warp_sums.cuh"

namespace blockflash {
namespace {

constexpr int kGroup = 16;                       // splits that are combined at once
constexpr int kColumns4 = Config::head_dim / 4;  // pieces of four columns
constexpr int kPassRows = Config::rows < 16 ? Config::rows : 16;
static_assert(kPassRows * Config::head_dim * 4 <= kStageBytes,
              "the sums of a pass lie in a free stage of each warp");

struct Shared {
  DecodeItem items[2];
  ItemWalk<Config::rows> walk;  // of the warp that takes the items,
  int number;                   // and the number of the item that it announces next; -1: none
  float2 logs[Config::warps][Config::rows];      // reference and denominator of a row
  int first_key[Config::warps][Config::stages];  // of the step in each stage
  int staging[Config::warps];                    // offsets in bytes
  bool last;
};
static_assert(Config::smem_bytes == Config::warps * Config::stages * kStageBytes + kQBytes + 2048 &&
                  sizeof(Shared) <= 2048,
              "manifest and kernel disagree on smem");

// Where a warp stages column `column` of row `row`. The permutation avoids bank conflicts.
__device__ __forceinline__ int staged(int row, int column) {
  return row * Config::head_dim + (column ^ (row / 2 % 4 * 8));
}

// The rows of a row tile that exist.
__device__ __forceinline__ int rows_of(const blockflash_attention_decode_params& p,
                                       const DecodeItem& item) {
  const int rows = item.q_length * (p.num_heads_q / p.num_heads_kv);
  return min(rows - item.row_tile * Config::rows, Config::rows);
}

// A partial result in the workspace.
struct Slot {
  float* sums;
  float2* logs;
  __device__ __forceinline__ Slot(const blockflash_attention_decode_params& p, int number)
      : sums(p.partial_sums + static_cast<int64_t>(number) * p.partial_rows * p.head_dim),
        logs(reinterpret_cast<float2*>(p.partial_logs) +
             static_cast<int64_t>(number) * p.partial_rows) {}
  __device__ __forceinline__ float4* sum(const blockflash_attention_decode_params& p, int row,
                                         int piece) const {
    return reinterpret_cast<float4*>(sums + row * p.head_dim) + piece;
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
  constexpr float kLog2e = 1.4426950408889634f;
  const int group = p.num_heads_q / p.num_heads_kv;
  const int row = item.row_tile * Config::rows + row_in_tile;
  const int query = row / group, head = item.head_kv * group + row % group;
  if (p.sink != nullptr) add_sink(x, p.sink[head] * kLog2e);
  const bool packed = p.cu_seqlens_q != nullptr;
  Element* const o = static_cast<Element*>(p.o) + (packed ? 0 : item.sequence * p.o_stride_batch) +
                     static_cast<int64_t>(item.q_begin + query) * p.o_stride_seq +
                     head * p.o_stride_head;
  *reinterpret_cast<uint2*>(o + piece * 4) = quotient<Element>(x);
  if (p.lse != nullptr && piece == 0)
    p.lse[(packed ? 0 : item.sequence * p.lse_stride_batch) + head * p.lse_stride_head +
          item.q_begin + query] = log_sum_exp(x);
}

// Combines the slots first, first + step, …, `count` of them, into slot `first`, or into the
// output.
__device__ __forceinline__ void combine_slots(const blockflash_attention_decode_params& p,
                                              const DecodeItem& item, int first, int step,
                                              int count, bool to_output) {
  const Slot slot(p, first);
  const int64_t rows_apart = static_cast<int64_t>(step) * p.partial_rows;
  const int pieces = rows_of(p, item) * kColumns4;
  for (int i = 0; i < pieces; i += Config::threads) {
    const int at = i + ptx::opaque(static_cast<int>(threadIdx.x));
    const int row = at / kColumns4, piece = at % kColumns4;
    const bool mine = at < pieces && piece * 4 < p.head_dim;
    Partial x;
    if (mine)
      x = combine<kGroup>(
          count, [&](int s) { return __ldcg(slot.logs + row + s * rows_apart); },
          [&](int s) {
            return __ldcg(slot.sum(p, row, piece) + s * (rows_apart * p.head_dim / 4));
          });
    __syncthreads();  // all have read the logarithms of slot `first`
    if (!mine) continue;
    if (to_output)
      store_result(p, item, row, piece, x);
    else
      slot.store(p, row, piece, x);
  }
}

// Whether this CTA is the last of `count` that arrive. Its threads see what the others stored.
__device__ __forceinline__ bool arrives_last(Shared& shared, uint32_t* arrivals, int count) {
  __syncthreads();  // all threads have stored
  if (threadIdx.x == 0) shared.last = ptx::atomic_inc_acq_rel(arrivals, count - 1) == count - 1;
  __syncthreads();
  return shared.last;
}

// Combines the splits of a row tile when they are complete.
__device__ __forceinline__ void combine_splits(const blockflash_attention_decode_params& p,
                                               const DecodeItem& item, Shared& shared) {
  const int group = item.split / kGroup, groups = ceil_div(item.splits, kGroup);
  const int first = item.slot + group * kGroup * item.slot_step;
  const int count = min(item.splits - group * kGroup, kGroup);
  if (!arrives_last(shared, p.arrivals + first, count)) return;
  combine_slots(p, item, first, item.slot_step, count, groups == 1);
  if (groups == 1) return;
  // With several groups there is a split 1, whose counter is not used by a group.
  if (!arrives_last(shared, p.arrivals + item.slot + item.slot_step, groups)) return;
  combine_slots(p, item, item.slot, kGroup * item.slot_step, groups, true);
}

// Ends an item with all threads.
__device__ __forceinline__ void finish_item(const blockflash_attention_decode_params& p,
                                            const DecodeItem& item, WarpSums& sums, Shared& shared,
                                            unsigned char* smem, int free_stage) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int offset = (warp * Config::stages + free_stage) * kStageBytes;
  if (lane == 0) shared.staging[warp] = offset;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float denominator = column_sum(sums.denominator[n][e]);
      if (lane < 4)
        shared.logs[warp][n * 8 + lane * 2 + e] = make_float2(sums.reference[n][e], denominator);
    }
  float* const staging = reinterpret_cast<float*>(smem + offset);
  const int rows = rows_of(p, item);
#pragma unroll
  for (int pass = 0; pass < Config::rows; pass += kPassRows) {
    if (pass > 0) __syncthreads();  // all have read the pass before
#pragma unroll
    for (int n = 0; n < kPassRows / 8; ++n)
#pragma unroll
      for (int d = 0; d < kDSteps; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          staging[staged(n * 8 + lane % 4 * 2 + i % 2, d * 16 + lane / 4 + i / 2 * 8)] =
              sums.o[d][pass / 8 + n][i];
    __syncthreads();
    const int pieces = min(rows - pass, kPassRows) * kColumns4;
    for (int at = thread; at < pieces; at += Config::threads) {
      const int row = at / kColumns4, piece = at % kColumns4;
      if (piece * 4 >= p.head_dim) continue;
      const Partial x = combine<Config::warps>(
          Config::warps, [&](int w) { return shared.logs[w][pass + row]; },
          [&](int w) {
            return *reinterpret_cast<const float4*>(smem + shared.staging[w] +
                                                    staged(row, piece * 4) * 4);
          });
      if (item.splits == 1)
        store_result(p, item, pass + row, piece, x);
      else
        Slot(p, item.slot + item.split * item.slot_step).store(p, pass + row, piece, x);
    }
  }
  if (item.splits == 1)
    __syncthreads();  // the stages may be filled again
  else
    combine_splits(p, item, shared);
}

}  // namespace
}  // namespace blockflash

// The copies of keys and queries into shared memory.
#pragma once

#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/cp_async_word.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "items.cuh"

namespace blockflash {
namespace {

// Lanes side by side copy a row, 16 bytes each.
constexpr int kRowLanes = kChunks;
constexpr int kRowsAtOnce = kWarpSize / kRowLanes;
static_assert(kWarpSize % kRowLanes == 0, "a warp copies whole rows");

// Starts the copies of 16 keys of a warp. Rows and columns that do not exist become zeros: a copy
// of no bytes reads no memory, wherever its source is.
__device__ __forceinline__ void copy_keys(const Params& p, const Item& item, int warp, int m_tile,
                                          uint32_t warp_smem, int lane) {
  lane = ptx::opaque(lane);  // nothing that follows from it stays in registers beside the keys
  const int row = lane / kRowLanes, chunk = lane % kRowLanes;
  const int64_t stride = p.rows.cache.k_stride_slot;
  const int piece = warp * kMTiles + m_tile;
  const Element* from =
      static_cast<const Element*>(p.rows.cache.k) + item.piece[piece] + row * stride + chunk * 8;
  const int rows = chunk * 8 < p.head_dim ? item.keys - (item.key + piece * 16) - row : 0;
#pragma unroll
  for (int r = 0; r < 16; r += kRowsAtOnce, from += kRowsAtOnce * stride)
    ptx::cp_async_cg_16(warp_smem + Layout::offset(m_tile * 16 + row + r, chunk), from,
                        r < rows ? 16 : 0);
}

// What a row of a stage is: a head of a query.
struct Column {
  int query, head;
  bool exists;

  // Column `at` of product `product` of an item.
  static __device__ __forceinline__ Column of(const Item& item, int product, int at) {
    const int groups = item.groups, heads = item.heads;
    int output, head;
    if constexpr (Config::is_wide) {
      const int products = (heads + kColumns - 1) / kColumns;
      output = small_quotient(product, products);
      head = (product - output * products) * kColumns + at;
    } else {
      const int tile = small_quotient(product, heads);
      output = tile * kColumns + at;
      head = product - tile * heads;
    }
    const int query = small_quotient(output, groups);
    const int group = item.head_k * groups + output - query * groups;
    return {query, group * heads + head, query < item.queries && head < heads};
  }
};

// Starts the copies of a warp's part of the columns of two products, and of their weights.
__device__ __forceinline__ void copy_queries(const Params& p, const Item& item, int stage_number,
                                             uint32_t stage_smem, uint32_t weights_smem, int warp,
                                             int lane) {
  lane = ptx::opaque(lane);
  constexpr int kWarpRows = kStageColumns / Config::warps;
  static_assert(kWarpRows <= kWarpSize && kColumns % kWarpRows == 0, "a lane for each row");
  const int first_row = warp * kWarpRows;
  const int own_row = first_row + lane % kWarpRows;
  const Column own =
      Column::of(item, stage_number * kStageProducts + own_row / kColumns, own_row % kColumns);
  const bool is_packed = p.rows.cu_seqlens_q != nullptr;
  const int64_t of_query =
      is_packed ? (item.row + own.query) * p.q_stride_seq
                : item.sequence * p.q_stride_batch + (item.first + own.query) * p.q_stride_seq;
  const int64_t offset = own.exists ? of_query + own.head * p.q_stride_head : 0;
  if (p.weights != nullptr && lane < kWarpRows) {
    const int64_t of_weight = own.exists ? (item.row + own.query) * p.weights_stride_row +
                                               own.head * p.weights_stride_head
                                         : 0;
    ptx::cp_async_ca_4_or_zero(weights_smem + own_row * 4, p.weights + of_weight, own.exists);
  }
  const int row = lane / kRowLanes, chunk = lane % kRowLanes;
  const unsigned existing = __ballot_sync(~0u, own.exists);
  const Element* const q = static_cast<const Element*>(p.q) + chunk * 8;
  const bool has_columns = chunk * 8 < p.head_dim;
#pragma unroll
  for (int r = 0; r < kWarpRows; r += kRowsAtOnce) {
    const int64_t from = __shfl_sync(~0u, offset, r + row);
    const bool exists = has_columns && (existing >> (r + row) & 1) != 0;
    ptx::cp_async_cg_16(stage_smem + Layout::offset(first_row + r + row, chunk), q + from,
                        exists ? 16 : 0);
  }
}

}  // namespace
}  // namespace blockflash

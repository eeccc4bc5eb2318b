// The copies of queries, keys and values into shared memory, in panels of 64 columns with rows of
// 128 bytes, the layout of WGMMA's 128-byte swizzle.
#pragma once

#include "blockflash/decode/runs.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/eviction.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

constexpr int kD = Config::head_dim;
constexpr int kChunks = kD / 8;  // 16-byte chunks of a row
constexpr int kPanelBytes = kTileKeys * 128;
constexpr int kTileBytes = kD / 64 * kPanelBytes;
constexpr int kStageBytes = 2 * kTileBytes;  // K, then V
static_assert(Config::rows == kTileKeys, "a tile of queries is as large as one of keys");
static_assert(Config::warps == 4, "each warp copies 16 of 64 keys and has 16 of 64 rows");

__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return chunk / 8 * kPanelBytes + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
}

// Starts the copy of the queries of an item by all threads of the CTA, as a part of the group that
// is committed next. Rows and columns that do not exist become zeros.
__device__ __forceinline__ void copy_queries(const blockflash_attention_decode_params& p,
                                             const DecodeRun& item, uint32_t q_smem) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const Element* const q = static_cast<const Element*>(p.q);
  const Element* const of_sequence =
      q + (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch
                                     : item.q_begin * p.q_stride_seq);
#pragma unroll 1
  for (int at = thread; at < Config::rows * kChunks; at += Config::threads) {
    const int row = item.row_tile * Config::rows + at / kChunks, column = at % kChunks * 8;
    const int query = small_quotient(row, p.group);
    const bool exists = query < item.q_length && column < p.head_dim_qk;
    const Element* const from = of_sequence + query * p.q_stride_seq +
                                (item.head_kv * p.group + row - query * p.group) * p.q_stride_head +
                                column;
    ptx::cp_async_cg_16(q_smem + tile_offset(at / kChunks, at % kChunks), exists ? from : q,
                        exists ? 16 : 0);
  }
}

// Copies 16 keys of each tile of an item, those of one warp.
struct Loader {
  int next, end;         // the warp's first key of the next tile; keys end
  int step;              // that comes next
  uint64_t policy;       // of L2
  const Element *k, *v;  // the head's first key, of the sequence if no memory says where pages are
  int page, slot;        // this lane's step of the 32 that were looked up together

  // Nothing that is read once should drive partial sums out of L2.
  __device__ __forceinline__ explicit Loader(const blockflash_attention_decode_params& p)
      : next(0),
        end(0),
        policy(p.seqlen_q * p.group <= Config::rows ? ptx::evict_first() : ptx::evict_normal()),
        k(nullptr),
        v(nullptr) {}

  // Reads nothing that predecessors write.
  __device__ __forceinline__ void begin_item(const blockflash_attention_decode_params& p,
                                             const DecodeRun& item, int warp) {
    const blockflash_kv_cache& cache = p.cache;
    next = item.keys.begin + warp * kStepKeys, end = item.keys.end;
    step = 0;
    const int64_t page = cache.block_table == nullptr ? item.sequence : 0;
    k = static_cast<const Element*>(cache.k) + item.head_kv * cache.k_stride_head +
        page * cache.k_stride_page;
    v = static_cast<const Element*>(cache.v) + item.head_kv * cache.v_stride_head +
        page * cache.v_stride_page;
  }
  // Whether another tile follows; the same for all warps.
  __device__ __forceinline__ bool has_tile(int warp) const { return next - warp * kStepKeys < end; }

  // Steps beyond the last key have the address of the last step.
  __device__ __forceinline__ int existing(int key) const {
    return min(key, (end - 1) & ~(kStepKeys - 1));
  }

  // Where the next 32 steps are, one per lane. Numbers of pages are data on the device that nobody
  // has validated.
  __device__ __forceinline__ void look_up(const blockflash_attention_decode_params& p,
                                          const DecodeRun& item, int lane) {
    const blockflash_kv_cache& cache = p.cache;
    const int key = existing(next + lane * kTileKeys);
    const int column = key / cache.page_size;
    slot = key - column * cache.page_size;
    page = page_of_column(cache, item.sequence, column);
  }

  // Starts the copy of the warp's part of the next tile.
  __device__ __forceinline__ void start_tile(const blockflash_attention_decode_params& p,
                                             const DecodeRun& item, uint32_t stage_smem, int warp,
                                             int lane) {
    const blockflash_kv_cache& cache = p.cache;
    const int key = next;
    int64_t at_page = 0, at_slot = existing(key);
    if (cache.block_table != nullptr) {
      if (step % 32 == 0) look_up(p, item, lane);
      at_page = __shfl_sync(~0u, page, step % 32);
      at_slot = __shfl_sync(~0u, slot, step % 32);
    }
    ++step, next += kTileKeys;
    const Element* const k_rows = k + at_page * cache.k_stride_page + at_slot * cache.k_stride_slot;
    const Element* const v_rows = v + at_page * cache.v_stride_page + at_slot * cache.v_stride_slot;
    const uint32_t rows_smem = stage_smem + warp * (kStepKeys * 128);
    const int rows_begin = item.any.begin - key, rows_end = item.any.end - key;
    if (rows_begin <= 0 && rows_end >= kStepKeys && min(p.head_dim_qk, p.head_dim_v) == kD) {
      start_rows(rows_smem, k_rows, cache.k_stride_slot, policy, lane);
      start_rows(rows_smem + kTileBytes, v_rows, cache.v_stride_slot, policy, lane);
    } else {
      start_part(rows_smem, k_rows, cache.k_stride_slot, rows_begin, rows_end, p.head_dim_qk, lane);
      start_part(rows_smem + kTileBytes, v_rows, cache.v_stride_slot, rows_begin, rows_end,
                 p.head_dim_v, lane);
    }
  }

  // Lanes side by side copy a row.
  static constexpr int kRowStep = kWarpSize / kChunks;
  static_assert(kRowStep * kChunks == kWarpSize, "a row is a whole fraction of a warp");

  __device__ __forceinline__ static void start_rows(uint32_t rows_smem, const Element* src,
                                                    int64_t stride, uint64_t policy, int lane) {
    const int first_row = lane / kChunks, chunk = lane % kChunks;
    const uint32_t to = rows_smem + tile_offset(first_row, chunk);
    // Strides of slots have 31 bits.
    const uint32_t row_bytes = ptx::opaque(static_cast<uint32_t>(stride) * 2);
    const char* const from = reinterpret_cast<const char*>(src + chunk * 8) +
                             static_cast<uint64_t>(row_bytes) * static_cast<uint32_t>(first_row);
    // The swizzle of row first_row + r differs from that of first_row by r.
#pragma unroll
    for (int r = 0; r < kStepKeys; r += kRowStep)
      ptx::cp_async_cg_16_hinted((to ^ (r % 8 * 16)) + r * 128,
                                 from + static_cast<uint64_t>(row_bytes) * static_cast<uint32_t>(r),
                                 policy);
  }

  // The same for rows [rows_begin, rows_end) and columns that exist; the rest becomes zeros. A copy
  // of no bytes, too, has an address inside the page. Rare, so small code.
  __device__ __forceinline__ static void start_part(uint32_t rows_smem, const Element* src,
                                                    int64_t stride, int rows_begin, int rows_end,
                                                    int columns, int lane) {
    const int chunk = lane % kChunks;
#pragma unroll 1
    for (int row = lane / kChunks; row < kStepKeys; row += kRowStep) {
      const bool exists = row >= rows_begin && row < rows_end && chunk * 8 < columns;
      ptx::cp_async_cg_16(rows_smem + tile_offset(row, chunk),
                          exists ? src + row * stride + chunk * 8 : src, exists ? 16 : 0);
    }
  }
};

}  // namespace
}  // namespace blockflash

// The copies of keys and values into the ring of one warp.
#pragma once

#include <type_traits>

#include "blockflash/config/attention_terms.cuh"
#include "blockflash/config/cache_codes.cuh"
#include "blockflash/config/kv_cache.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/cp_async_word.cuh"
#include "blockflash/ptx/eviction.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "index_items.cuh"

namespace blockflash {
namespace {

using Element = Config::Element;

// Of the cache: codes take half as many bytes.
using KvElement = std::conditional_t<kHasCodes, uint8_t, Element>;
constexpr int kKvBytes = sizeof(KvElement);
constexpr int kChunkElements = 16 / kKvBytes;
constexpr int kChunks = Config::head_dim / kChunkElements;  // 16-byte chunks of a key
// Lanes side by side copy a row, each a chunk or more that are so many apart.
constexpr int kRowLanes = kChunks < kWarpSize ? kChunks : kWarpSize;
constexpr int kTileBytes = kStepKeys * Config::head_dim * kKvBytes;
// K, then V, then the scales of each key.
constexpr int kScalesOffset = 2 * kTileBytes;
constexpr int kStageBytes = kScalesOffset + (kHasCodes ? 2 * kStepKeys * 4 : 0);
using TileLayout = Swizzle<kChunks>;

// Whether keys of a sequence have scales of their own.
__device__ __forceinline__ bool are_k_scales_of_keys(const blockflash_cache_scales& scales) {
  return scales.k != nullptr && (scales.k_stride_page | scales.k_stride_slot) != 0;
}
__device__ __forceinline__ bool are_v_scales_of_keys(const blockflash_cache_scales& scales) {
  return scales.v != nullptr && (scales.v_stride_page | scales.v_stride_slot) != 0;
}

// Copies the steps of a warp, every fourth of an item.
struct Loader {
  // With 32 rows, or biases of wide heads, registers are short, and each step finds its sources
  // again.
  static constexpr bool kKeepsSources =
      Config::rows < 32 && !((kHasTerms || kHasCodes) && Config::head_dim > 128);

  int next, end;              // position of the next step; positions end
  int step;                   // that comes next
  uint64_t policy;            // of L2
  const char *k, *v;          // this lane's part of a step in slot 0 of the first page
  int page, slot, first_key;  // this lane's step of the 32 that were looked up together

  // Nothing that is read once should drive partial sums out of L2.
  __device__ __forceinline__ explicit Loader(const blockflash_attention_decode_params& p)
      : next(0),
        end(0),
        policy(p.seqlen_q * p.group <= Config::rows ? ptx::evict_first() : ptx::evict_normal()) {}

  // Reads nothing that predecessors write.
  __device__ __forceinline__ void begin_item(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int warp, int lane) {
    next = item.positions.begin + warp * kStepKeys, end = item.positions.end;
    step = 0;
    find_sources(p, item, lane);
  }

  // What follows from the parameters and the item alone.
  __device__ __forceinline__ void find_sources(const blockflash_attention_decode_params& p,
                                               const DecodeItem& item, int lane) {
    const blockflash_kv_cache& cache = p.cache;
    const int64_t first_page = looks_up(p) ? 0 : item.sequence;
    const auto part_of = [&](const void* tensor, int64_t of_page, int64_t of_head, int64_t of_row) {
      return reinterpret_cast<const char*>(
          static_cast<const KvElement*>(tensor) + first_page * of_page + item.head_kv * of_head +
          lane / kRowLanes * of_row + lane % kRowLanes * kChunkElements);
    };
    k = part_of(cache.k, cache.k_stride_page, cache.k_stride_head, cache.k_stride_slot);
    v = part_of(cache.v, cache.v_stride_page, cache.v_stride_head, cache.v_stride_slot);
  }
  __device__ __forceinline__ bool has_step() const { return next < end; }

  // Whether memory says where steps are.
  static __device__ __forceinline__ bool looks_up(const blockflash_attention_decode_params& p) {
    return p.cache.block_table != nullptr || p.page_list != nullptr;
  }

  // Whether rows of K and of V are as wide as their tiles.
  static __device__ __forceinline__ bool has_full_rows(
      const blockflash_attention_decode_params& p) {
    return min(p.head_dim_qk, p.head_dim_v) == Config::head_dim;
  }

  // Where the next 32 steps are, one per lane. Numbers of pages are data on the device that nobody
  // has validated.
  __device__ __forceinline__ void look_up(const blockflash_attention_decode_params& p,
                                          const DecodeItem& item, int lane) {
    const blockflash_kv_cache& cache = p.cache;
    const int position =
        min(next + lane * (Config::warps * kStepKeys), (end - 1) & ~(kStepKeys - 1));
    int column = position / cache.page_size;
    slot = position - column * cache.page_size;
    if (p.page_list != nullptr) {
      const int32_t* const list =
          p.page_list + (static_cast<int64_t>(item.sequence) * p.num_heads_kv + item.head_kv) *
                            p.page_list_capacity;
      column = min(max(list[column], 0), cache.capacity / cache.page_size - 1);
    }
    first_key = column * cache.page_size + slot;
    page = page_of_column(cache, item.sequence, column);
  }

  // Starts the copy of the next step as one group and returns its first key.
  __device__ __forceinline__ int start_step(const blockflash_attention_decode_params& p,
                                            const DecodeItem& item, uint32_t stage_smem, int lane) {
    const blockflash_kv_cache& cache = p.cache;
    int64_t k_offset = next * cache.k_stride_slot, v_offset = next * cache.v_stride_slot;
    int key = next;
    if (looks_up(p)) {
      if (step % 32 == 0) look_up(p, item, lane);
      const int64_t at_page = __shfl_sync(~0u, page, step % 32);
      const int64_t at_slot = __shfl_sync(~0u, slot, step % 32);
      key = __shfl_sync(~0u, first_key, step % 32);
      k_offset = at_page * cache.k_stride_page + at_slot * cache.k_stride_slot;
      v_offset = at_page * cache.v_stride_page + at_slot * cache.v_stride_slot;
    }
    ++step, next += Config::warps * kStepKeys;
    if constexpr (!kKeepsSources) find_sources(p, item, lane);
    const int rows_begin = item.any.begin - key, rows_end = item.any.end - key;
    const char *const k_from = k + k_offset * kKvBytes, *const v_from = v + v_offset * kKvBytes;
    if (rows_begin <= 0 && rows_end >= kStepKeys && has_full_rows(p)) {
      start_tile(stage_smem, k_from, cache.k_stride_slot, policy, lane);
      start_tile(stage_smem + kTileBytes, v_from, cache.v_stride_slot, policy, lane);
    } else {
      start_part(stage_smem, k_from, cache.k, cache.k_stride_slot, rows_begin, rows_end,
                 p.head_dim_qk, lane);
      start_part(stage_smem + kTileBytes, v_from, cache.v, cache.v_stride_slot, rows_begin,
                 rows_end, p.head_dim_v, lane);
    }
    const auto has_scales = [&] {
      const blockflash_cache_scales& scales = with_scales(p).scales;
      return are_k_scales_of_keys(scales) || are_v_scales_of_keys(scales);
    };
    if (kHasCodes && has_scales()) {
      const int at_page = looks_up(p) ? __shfl_sync(~0u, page, (step - 1) % 32) : item.sequence;
      const int at_slot = looks_up(p) ? __shfl_sync(~0u, slot, (step - 1) % 32) : key;
      start_scales(with_scales(p).scales, item, stage_smem + kScalesOffset, at_page, at_slot,
                   rows_begin, rows_end, lane);
    }
    ptx::cp_async_commit_group();
    return key;
  }

  // The scales of K for lanes 0 to 15, of V for the others, where keys have scales of their own.
  // Those of keys that do not exist become 0.
  static __device__ __forceinline__ void start_scales(const blockflash_cache_scales& scales,
                                                      const DecodeItem& item, uint32_t to_smem,
                                                      int at_page, int at_slot, int rows_begin,
                                                      int rows_end, int lane) {
    const int row = lane % kStepKeys;
    const bool exists = row >= rows_begin && row < rows_end;
    const auto start = [&](const float* from, int64_t of_sequence, int64_t of_page, int64_t of_slot,
                           int64_t of_head) {
      const int64_t offset = item.sequence * of_sequence + at_page * of_page +
                             (at_slot + row) * of_slot + head_of_keys(item) * of_head;
      ptx::cp_async_ca_4_or_zero(to_smem + lane * 4, exists ? from + offset : from, exists);
    };
    if (lane < kStepKeys && are_k_scales_of_keys(scales))
      start(scales.k, scales.k_stride_sequence, scales.k_stride_page, scales.k_stride_slot,
            scales.k_stride_head);
    if (lane >= kStepKeys && are_v_scales_of_keys(scales))
      start(scales.v, scales.v_stride_sequence, scales.v_stride_page, scales.v_stride_slot,
            scales.v_stride_head);
  }

  static constexpr int kRowStep = kWarpSize / kRowLanes;
  static_assert(kRowStep * kRowLanes == kWarpSize && kChunks % kRowLanes == 0,
                "a row is a whole fraction of a warp, or a multiple");

  __device__ __forceinline__ static void start_tile(uint32_t tile_smem, const char* from,
                                                    int64_t stride, uint64_t policy, int lane) {
    const uint32_t to = tile_smem + TileLayout::offset(lane / kRowLanes, lane % kRowLanes);
    // Strides of slots have 31 bits.
    const uint32_t row_bytes = ptx::opaque(static_cast<uint32_t>(stride) * kKvBytes);
    // The swizzle of a row r further down differs by r.
#pragma unroll
    for (int r = 0; r < kStepKeys; r += kRowStep)
#pragma unroll
      for (int c = 0; c < kChunks; c += kRowLanes)
        ptx::cp_async_cg_16_hinted(
            (to ^ (r % TileLayout::period * 16)) + r * TileLayout::row_bytes + c * 16,
            from + static_cast<uint64_t>(row_bytes) * static_cast<uint32_t>(r) + c * 16, policy);
  }

  // The same for rows [rows_begin, rows_end) and columns that exist; the rest becomes zeros. A copy
  // of no bytes, too, has an address inside the tensor. Rare, so small code.
  __device__ __forceinline__ static void start_part(uint32_t tile_smem, const char* from,
                                                    const void* tensor, int64_t stride,
                                                    int rows_begin, int rows_end, int columns,
                                                    int lane) {
    const int chunk = lane % kRowLanes;
#pragma unroll 1
    for (int row = lane / kRowLanes; row < kStepKeys;
         row += kRowStep, from += kRowStep * stride * kKvBytes) {
#pragma unroll
      for (int c = 0; c < kChunks; c += kRowLanes) {
        const bool exists =
            row >= rows_begin && row < rows_end && (chunk + c) * kChunkElements < columns;
        ptx::cp_async_cg_16(tile_smem + TileLayout::offset(row, chunk + c),
                            exists ? from + c * 16 : tensor, exists ? 16 : 0);
      }
    }
  }
};
static_assert(TileLayout::period == 8 || Loader::kRowStep % 8 == 0,
              "rows that a lane copies differ in the swizzle by their distance, or not at all");

}  // namespace
}  // namespace blockflash

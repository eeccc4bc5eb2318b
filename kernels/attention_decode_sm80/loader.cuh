// The copies of keys and values into the ring of one warp.
#pragma once

#include "blockflash/config.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

using Config = AttentionDecodeConfig;
using Element = Config::Element;

constexpr int kChunks = Config::head_dim / 8;  // 16-byte chunks of a key
constexpr int kTileBytes = kStepKeys * Config::head_dim * 2;
constexpr int kStageBytes = 2 * kTileBytes;  // K, then V
using TileLayout = Swizzle<kChunks>;

// Copies the steps of a warp, every fourth of an item.
struct Loader {
  int next, end;              // position of the next step; positions end
  int step;                   // that comes next
  int page, slot, first_key;  // this lane's step of the 32 that were looked up together

  __device__ __forceinline__ void begin_item(const DecodeItem& item, int warp) {
    next = item.positions.begin + warp * kStepKeys, end = item.positions.end;
    step = 0;
  }
  __device__ __forceinline__ bool has_step() const { return next < end; }

  // Where the next 32 steps lie, one per lane. Numbers of pages are data on the device that nobody
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
    if (step % 32 == 0) look_up(p, item, lane);
    const int64_t at_page = __shfl_sync(~0u, page, step % 32);
    const int64_t at_slot = __shfl_sync(~0u, slot, step % 32);
    const int key = __shfl_sync(~0u, first_key, step % 32);
    ++step, next += Config::warps * kStepKeys;
    const blockflash_kv_cache& cache = p.cache;
    start_tile(p, stage_smem,
               static_cast<const Element*>(cache.k) + item.head_kv * cache.k_stride_head +
                   at_page * cache.k_stride_page + at_slot * cache.k_stride_slot,
               cache.k_stride_slot, item.any, key, lane);
    start_tile(p, stage_smem + kTileBytes,
               static_cast<const Element*>(cache.v) + item.head_kv * cache.v_stride_head +
                   at_page * cache.v_stride_page + at_slot * cache.v_stride_slot,
               cache.v_stride_slot, item.any, key, lane);
    ptx::cp_async_commit_group();
    return key;
  }

  // A copy of no bytes fills its chunk with zeros. Its address, too, lies inside the page.
  __device__ __forceinline__ void start_tile(const blockflash_attention_decode_params& p,
                                             uint32_t tile_smem, const Element* src, int64_t stride,
                                             KeyRange keys, int key, int lane) const {
    constexpr int kRowStep = kWarpSize / kChunks;
    static_assert(kRowStep * kChunks == kWarpSize, "a row is a whole fraction of a warp");
    lane = ptx::opaque(lane);
    stride = ptx::opaque(stride);
    const int chunk = lane % kChunks, first_row = lane / kChunks;
    const bool column_exists = chunk * 8 < p.head_dim;
    const Element* from = src + first_row * stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < kStepKeys; r += kRowStep) {
      const int row = first_row + r;
      const bool valid = column_exists && key + row >= keys.begin && key + row < keys.end;
      ptx::cp_async_cg_16(tile_smem + TileLayout::offset(row, chunk), valid ? from : src,
                          valid ? 16 : 0);
      from += kRowStep * stride;
    }
  }
};

}  // namespace
}  // namespace blockflash

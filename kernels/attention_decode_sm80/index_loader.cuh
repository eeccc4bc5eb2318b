// The copies of listed keys and their values into the ring of one warp.
#pragma once

#include "blockflash/ptx/shared.cuh"
#include "index_items.cuh"
#include "loader.cuh"

namespace blockflash {
namespace {

// A step has 16 positions of a list: keys side by side, of one page, or as many runs of them as it
// has entries. All rows of an item see the same keys. The others are zeros in shared memory, so
// nothing that they hold reaches a product.
struct IndexLoader : Loader {
  static constexpr int kStepLog2 = 4;
  static_assert(1 << kStepLog2 == kStepKeys, "keys of a step");
  static_assert(kChunks <= kWarpSize || !kHasIndex, "a lane has one chunk of a row");
  static constexpr uint32_t kAllKeys = (1u << kStepKeys) - 1;

  // The run of keys that this lane has looked up: addresses of its first row, and the bits of the
  // visible keys of its step.
  uint64_t k_at, v_at;
  uint32_t visible;

  __device__ __forceinline__ explicit IndexLoader(const blockflash_attention_decode_params& p)
      : Loader(p) {
    const bool are_read_once =
        p.seqlen_q * p.group * with_lists(p).units <= Config::rows * p.num_heads_kv;
    policy = are_read_once ? ptx::evict_first() : ptx::evict_normal();
    k = v = nullptr;
  }

  // Reads nothing that predecessors write.
  __device__ __forceinline__ void begin_item(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, int warp, int lane) {
    next = item.positions.begin + warp * kStepKeys, end = item.positions.end;
    step = 0;
  }

  // Log2 of the keys of a run.
  static __device__ __forceinline__ int run_log2(const IndexParams& p) {
    return min(p.lists.granularity_log2, kStepLog2);
  }

  // Where the next 32 runs are, one per lane. Entries and numbers of pages are data on the device
  // that nobody has validated: a run that does not exist or that is hidden has no visible keys, and
  // its page is not asked for.
  __device__ __forceinline__ void look_up(const IndexParams& p, const IndexItem& item, int lane) {
    const blockflash_kv_cache& cache = p.cache;
    const int log2 = p.lists.granularity_log2, keys_log2 = run_log2(p);
    const int runs_log2 = kStepLog2 - keys_log2;
    const int run = lane & ((1 << runs_log2) - 1);
    const int position =
        next + (lane >> runs_log2) * (Config::warps * kStepKeys) + (run << keys_log2);
    const int at = position >> log2;
    const int entry = at < p.lists.capacity ? item.list[at] : -1;
    page = slot = 0, visible = 0;
    // No key of an entry before the last visible one overflows.
    if (entry >= 0 && entry <= (item.any.end - 1) >> log2) {
      const int key = (entry << log2) + (position & ((1 << log2) - 1));
      const int first = min(max(item.any.begin - key, 0), 1 << keys_log2);
      const int last = min(max(item.any.end - key, first), 1 << keys_log2);
      visible = ((1u << last) - (1u << first)) << (run << keys_log2);
      if (visible != 0) {
        const int column = cache.block_table != nullptr ? key / cache.page_size : 0;
        slot = key - column * cache.page_size + item.first_row;
        page = p.cu_seqlens_kv != nullptr ? 0 : page_of_column(cache, item.sequence, column);
      }
    }
    const auto address_of = [&](const void* tensor, int64_t of_page, int64_t of_slot,
                                int64_t of_head) {
      return reinterpret_cast<uint64_t>(static_cast<const KvElement*>(tensor) + page * of_page +
                                        slot * of_slot + item.head_of_keys * of_head);
    };
    k_at = address_of(cache.k, cache.k_stride_page, cache.k_stride_slot, cache.k_stride_head);
    v_at = address_of(cache.v, cache.v_stride_page, cache.v_stride_slot, cache.v_stride_head);
    for (int distance = 1; distance < 1 << runs_log2; distance *= 2)
      visible |= __shfl_xor_sync(~0u, visible, distance);
  }

  // Starts the copy of the next step as one group and returns the bits of its visible keys. A step
  // without any is left as it is.
  __device__ __forceinline__ int start_step(const blockflash_attention_decode_params& base,
                                            const DecodeItem& item, uint32_t stage_smem, int lane) {
    const IndexParams& p = with_lists(base);
    // Of wide heads nothing that follows from the lane stays in registers.
    if constexpr (Config::head_dim > 128) lane = ptx::opaque(lane);
    const int keys_log2 = run_log2(p), runs_log2 = kStepLog2 - keys_log2;
    const int first_lane = (step << runs_log2) % kWarpSize;
    if (first_lane == 0) look_up(p, with_list(item), lane);
    ++step, next += Config::warps * kStepKeys;
    const uint32_t bits = __shfl_sync(~0u, visible, first_lane);
    if (bits != 0) {
      if (keys_log2 == kStepLog2)
        start_run(p, stage_smem, first_lane, bits, lane);
      else
        start_runs(p, stage_smem, first_lane, keys_log2, bits, lane);
      if constexpr (kHasCodes)
        start_scales_of_keys(p, item, stage_smem + kScalesOffset, first_lane, keys_log2, bits,
                             lane);
    }
    ptx::cp_async_commit_group();
    return static_cast<int>(bits);
  }

  // Of keys side by side.
  __device__ __forceinline__ void start_run(const IndexParams& p, uint32_t stage_smem,
                                            int first_lane, uint32_t bits, int lane) const {
    const blockflash_kv_cache& cache = p.cache;
    const auto source = [&](uint64_t at, int64_t stride) {
      const int64_t within = lane / kRowLanes * stride + lane % kRowLanes * kChunkElements;
      return reinterpret_cast<const char*>(__shfl_sync(~0u, at, first_lane)) + within * kKvBytes;
    };
    const char* const k_from = source(k_at, cache.k_stride_slot);
    const char* const v_from = source(v_at, cache.v_stride_slot);
    if (bits == kAllKeys && has_full_rows(p)) {
      start_tile(stage_smem, k_from, cache.k_stride_slot, policy, lane);
      start_tile(stage_smem + kTileBytes, v_from, cache.v_stride_slot, policy, lane);
    } else {
      const int begin = __ffs(static_cast<int>(bits)) - 1, end = 32 - __clz(bits);
      start_part(stage_smem, k_from, cache.k, cache.k_stride_slot, begin, end, p.head_dim_qk, lane);
      start_part(stage_smem + kTileBytes, v_from, cache.v, cache.v_stride_slot, begin, end,
                 p.head_dim_v, lane);
    }
  }

  // Of 2^keys_log2 keys at a time. The addresses of the runs pass through shared memory, where the
  // last rows of V come in the end: a load for both instead of four shuffles.
  __device__ __forceinline__ void start_runs(const IndexParams& p, uint32_t stage_smem,
                                             int first_lane, int keys_log2, uint32_t bits,
                                             int lane) const {
    constexpr int kPasses = kStepKeys / kRowStep, kAtOnce = kPasses < 4 ? kPasses : 4;
    static_assert(kAtOnce * kRowStep * TileLayout::row_bytes >= kStepKeys * 16,
                  "the rows that are copied last take the place of the addresses");
    const uint32_t addresses = stage_smem + 2 * kTileBytes - kStepKeys * 16;
    const int run = lane - first_lane;
    if (run >= 0 && run < kStepKeys >> keys_log2)
      ptx::store_shared_int4(addresses + run * 16,
                             make_int4(static_cast<int>(k_at), static_cast<int>(k_at >> 32),
                                       static_cast<int>(v_at), static_cast<int>(v_at >> 32)));
    __syncwarp();
    const auto row_bytes = [](int64_t stride) {  // strides of slots have 31 bits
      return ptx::opaque(static_cast<uint32_t>(stride) * kKvBytes);
    };
    const uint32_t k_row = row_bytes(p.cache.k_stride_slot),
                   v_row = row_bytes(p.cache.v_stride_slot);
    const int chunk = lane % kRowLanes, lane_row = lane / kRowLanes;
    const uint32_t to = stage_smem + TileLayout::offset(lane_row, chunk);
    const uint32_t k_bits = chunk * kChunkElements < p.head_dim_qk ? bits >> lane_row : 0;
    const uint32_t v_bits = chunk * kChunkElements < p.head_dim_v ? bits >> lane_row : 0;
    const uint32_t within = (1u << keys_log2) - 1;
#pragma unroll
    for (int first = 0; first < kPasses; first += kAtOnce) {
      int4 at[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        at[i] = ptx::load_shared_int4(addresses +
                                      (((first + i) * kRowStep + lane_row) >> keys_log2) * 16);
      if (first + kAtOnce == kPasses) __syncwarp();  // all have loaded the last addresses
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = (first + i) * kRowStep;
        const uint64_t in_run = (r + lane_row) & within;
        const auto start = [&](uint32_t smem, int low, int high, uint32_t row, uint32_t visible) {
          const uint64_t of_run =
              static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
          ptx::cp_async_cg_16((smem ^ (r % TileLayout::period * 16)) + r * TileLayout::row_bytes,
                              reinterpret_cast<const char*>(of_run + (in_run * row + chunk * 16)),
                              static_cast<int>(visible >> r & 1) * 16);
        };
        start(to, at[i].x, at[i].y, k_row, k_bits);
        start(to + kTileBytes, at[i].z, at[i].w, v_row, v_bits);
      }
    }
  }

  // Where keys have scales of their own.
  __device__ __forceinline__ void start_scales_of_keys(const IndexParams& p, const DecodeItem& item,
                                                       uint32_t to_smem, int first_lane,
                                                       int keys_log2, uint32_t bits,
                                                       int lane) const {
    if (!are_k_scales_of_keys(p.scales) && !are_v_scales_of_keys(p.scales)) return;
    const int row = lane % kStepKeys, of_run = first_lane + (row >> keys_log2);
    const int at_page = __shfl_sync(~0u, page, of_run);
    const int at_slot = __shfl_sync(~0u, slot, of_run) + (row & ((1 << keys_log2) - 1));
    start_scale(p.scales, item, to_smem, at_page, at_slot, bits >> row & 1, lane);
  }

  // The scale of this lane, of the key in a slot; `start_scales` copies those of keys side by side.
  static __device__ __forceinline__ void start_scale(const blockflash_cache_scales& scales,
                                                     const DecodeItem& item, uint32_t to_smem,
                                                     int at_page, int at_slot, bool exists,
                                                     int lane) {
    const auto start = [&](const float* from, int64_t of_sequence, int64_t of_page, int64_t of_slot,
                           int64_t of_head) {
      const int64_t offset = item.sequence * of_sequence + at_page * of_page + at_slot * of_slot +
                             head_of_keys(item) * of_head;
      ptx::cp_async_ca_4_or_zero(to_smem + lane * 4, exists ? from + offset : from, exists);
    };
    if (lane < kStepKeys && are_k_scales_of_keys(scales))
      start(scales.k, scales.k_stride_sequence, scales.k_stride_page, scales.k_stride_slot,
            scales.k_stride_head);
    if (lane >= kStepKeys && are_v_scales_of_keys(scales))
      start(scales.v, scales.v_stride_sequence, scales.v_stride_page, scales.v_stride_slot,
            scales.v_stride_head);
  }
};
using AnyLoader = std::conditional_t<kHasIndex, IndexLoader, Loader>;

}  // namespace
}  // namespace blockflash

// The copies of queries and keys into the ring of a CTA.
#pragma once

#include <type_traits>

#include "blockflash/config/cache_codes.cuh"
#include "blockflash/config/latent.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/latent/code_row.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/eviction.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

using Config = AttentionLatentConfig;
using Element = Config::Element;

static_assert(!kHasCodes || (Config::values == CodeRow::codes &&
                             Config::columns == CodeRow::codes + CodeRow::turned),
              "rows of codes have one form");

using TileLayout =
    std::conditional_t<kHasCodes, CodeRow, Swizzle<kHasCodes ? 4 : Config::columns / 8>>;
constexpr int kChunks = TileLayout::row_bytes / 16;  // 16-byte chunks of a row
// Of a stage: 16 keys, or the queries of a row tile, or beside shorter rows of codes a part of
// them: half of the columns of values, and half of those that are turned.
constexpr int kTileBytes = kStepKeys * TileLayout::row_bytes;
constexpr int kQueryParts = kHasCodes ? 2 : 1;
static_assert(Config::rows == kStepKeys, "queries pass through the ring, too");
// Of the cache.
using KeyElement = std::conditional_t<kHasCodes, uint8_t, Element>;

// Copies the steps of an item: its queries, then 16 keys at a time. An item without keys has none.
// All threads agree about what is copied.
struct Loader {
  // Eight threads side by side copy a row, 128 bytes at a time.
  static constexpr int kLine = 8;
  static constexpr int kLines = (kChunks + kLine - 1) / kLine;
  static_assert(Config::threads == kStepKeys * kLine, "each thread copies a part of one row");

  int next, end;     // position of the next keys; positions end
  int step;          // number of the next step, those of the queries are negative
  uint64_t policy;   // of L2
  const char* keys;  // this thread's part of the keys in slot 0 of the first page
  int page, slot;    // this lane's keys of the 32 steps that were looked up together

  // Nothing that is read once should drive partial sums out of L2.
  __device__ __forceinline__ explicit Loader(const blockflash_attention_decode_params& p)
      : next(0),
        end(0),
        policy(p.seqlen_q * p.group <= Config::rows ? ptx::evict_first() : ptx::evict_normal()) {}

  static __device__ __forceinline__ int row() { return threadIdx.x / kLine; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kLine; }

  __device__ __forceinline__ void begin_item(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item) {
    const blockflash_kv_cache& cache = p.cache;
    next = item.positions.begin, end = item.positions.end;
    step = -kQueryParts;
    const int64_t first_page = cache.block_table != nullptr ? 0 : item.sequence;
    keys = reinterpret_cast<const char*>(
        static_cast<const KeyElement*>(cache.k) + first_page * cache.k_stride_page +
        item.head_kv * cache.k_stride_head + row() * cache.k_stride_slot +
        chunk() * (16 / static_cast<int>(sizeof(KeyElement))));
  }
  __device__ __forceinline__ bool has_step() const { return next < end; }

  // Starts the copy of the next step as one group.
  __device__ __forceinline__ void start_step(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, uint32_t stage_smem) {
    const uint32_t to = stage_smem + TileLayout::offset(row(), chunk());
    if (step < 0)
      start_queries(p, item, to);
    else
      start_keys(p, item, to);
    ++step;
    ptx::cp_async_commit_group();
  }

 protected:
  // A row that does not exist becomes zeros. A copy of no bytes, too, has an address inside the
  // tensor, whose first row is `first`.
  static __device__ __forceinline__ void start_part(uint32_t to, const char* from,
                                                    const void* first, bool exists) {
    if (!exists) from = static_cast<const char*>(first);
#pragma unroll
    for (int i = 0; i < kLines; ++i)
      if (has_chunk(i)) ptx::cp_async_cg_16(to + i * 128, from + i * 128, exists ? 16 : 0);
  }

  // Whether this thread has a chunk of a line, the last of which may be a part of one.
  static __device__ __forceinline__ bool has_chunk(int line) {
    return kChunks % kLine == 0 || line < kLines - 1 || chunk() < kChunks % kLine;
  }

  __device__ __forceinline__ void start_queries(const blockflash_attention_decode_params& p,
                                                const DecodeItem& item, uint32_t to) const {
    // In the steps of keys nothing that follows from the thread here stays in registers.
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const int of_item = item.row_tile * Config::rows + thread / kLine;
    const int query = small_quotient(of_item, p.group);
    const int head = item.head_kv * p.group + of_item - query * p.group;
    int64_t of_sequence = p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch
                                                    : item.q_begin * p.q_stride_seq;
    if (Config::has_lists && p.cu_seqlens_q == nullptr)
      of_sequence += item.q_begin * p.q_stride_seq;
    const Element* const from = static_cast<const Element*>(p.q) + of_sequence +
                                query * p.q_stride_seq + head * p.q_stride_head +
                                thread % kLine * 8;
    const char* const first = reinterpret_cast<const char*>(from);
    if constexpr (kHasCodes)
      start_part_of_queries(to, first, p.q, query < item.q_length);
    else
      start_part(to, first, p.q, query < item.q_length);
  }

  // The part that is next of a row of queries, from this thread's first chunk of it on.
  __device__ __forceinline__ void start_part_of_queries(uint32_t to, const char* from,
                                                        const void* first, bool exists) const {
    constexpr int kElementBytes = sizeof(Element);
    constexpr int kPartBytes = CodeRow::codes / kQueryParts * kElementBytes;
    constexpr int kTurnedBytes = CodeRow::turned / kQueryParts * kElementBytes;
    const int part = step + kQueryParts;
#pragma unroll
    for (int i = 0; i <= kPartBytes / 128; ++i) {
      const bool is_turned = i == kPartBytes / 128;
      if (is_turned && chunk() >= kTurnedBytes / 16) break;
      const int at =
          is_turned ? kQueryParts * kPartBytes + part * kTurnedBytes : part * kPartBytes + i * 128;
      ptx::cp_async_cg_16(to + i * 128, exists ? from + at : first, exists ? 16 : 0);
    }
  }

  // Where the keys of the next 32 steps are, one step per lane. Numbers of pages are data on the
  // device that nobody has validated.
  __device__ __forceinline__ void look_up(const blockflash_kv_cache& cache,
                                          const DecodeItem& item) {
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
    const int position = min(next + lane * kStepKeys, (end - 1) & ~(kStepKeys - 1));
    const int column = position / cache.page_size;
    slot = position - column * cache.page_size;
    page = page_of_column(cache, item.sequence, column);
  }

  __device__ __forceinline__ void start_keys(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, uint32_t to) {
    const blockflash_kv_cache& cache = p.cache;
    int64_t offset = next * cache.k_stride_slot;
    if (cache.block_table != nullptr) {
      if (step % 32 == 0) look_up(cache, item);
      const int64_t at_page = __shfl_sync(~0u, page, step % 32);
      const int64_t at_slot = __shfl_sync(~0u, slot, step % 32);
      offset = at_page * cache.k_stride_page + at_slot * cache.k_stride_slot;
    }
    const char* const from = keys + offset * static_cast<int64_t>(sizeof(KeyElement));
    if (next >= item.any.begin && next + kStepKeys <= item.any.end) {
#pragma unroll
      for (int i = 0; i < kLines; ++i)
        if (has_chunk(i)) ptx::cp_async_cg_16_hinted(to + i * 128, from + i * 128, policy);
    } else {
      const int key = next + row();
      start_part(to, from, cache.k, key >= item.any.begin && key < item.any.end);
    }
    next += kStepKeys;
  }
};

}  // namespace
}  // namespace blockflash

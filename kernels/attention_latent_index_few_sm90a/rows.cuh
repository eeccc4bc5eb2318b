// The copies of queries and of listed rows into the stages of a CTA.
#pragma once

#include <type_traits>

#include "blockflash/config/cache_codes.cuh"
#include "blockflash/latent/code_row.cuh"
#include "blockflash/latent/list_item.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

using Config = AttentionLatentConfig;
using Element = Config::Element;

constexpr int kKeys = 64;  // of a step
static_assert(!kHasCodes || (Config::values == CodeRow::codes &&
                             Config::columns == CodeRow::codes + CodeRow::turned),
              "rows of codes have one form");
using QueryLayout = Swizzle<Config::columns / 8>;
using TileLayout = std::conditional_t<kHasCodes, CodeRow, QueryLayout>;
using KeyElement = std::conditional_t<kHasCodes, uint8_t, Element>;
constexpr int kStageBytes = kKeys * TileLayout::row_bytes;

// Which keys of a step are listed and seen: a byte for each warp that copies rows. The rows 4 w + r
// and 32 + 4 w + r of warp w are its bits r and 4 + r.
struct ListedKeys {
  alignas(8) uint8_t of[Config::stages][Config::warps];

  __device__ __forceinline__ uint64_t word(int stage) const {
    return *reinterpret_cast<const uint64_t*>(of[stage]);
  }
};
static_assert(Config::warps == 8, "a word has a byte for each warp");

// Eight threads copy a row, 128 bytes at a time; each copies parts of two rows of a step. The lanes
// of a warp look up the keys of four steps at once.
struct RowLoader {
  static constexpr int kLine = 8, kApart = Config::threads / kLine, kOfThread = kKeys / kApart;
  static constexpr int kWarpRows = kWarpSize / kLine;
  static constexpr int kSteps = kWarpSize / (kWarpRows * kOfThread), kLookUp = kSteps * kKeys;
  static_assert(kOfThread == 2 && kWarpRows * kOfThread == 8, "a warp has a byte of a step");

  const blockflash_attention_index_params& params;
  const char* keys;  // this thread's chunk of the first row of the key head
  const int32_t* entries;
  ListedQuery query;
  int next, end, step;  // position of the next keys; positions end; number of the step
  int entry;            // this lane's entry behind the next look-up,
  KeyPlace place;       // the place of its key in the next one,
  int64_t offset;       // and that of the current one in the cache, in bytes
  uint32_t listed;      // lanes that have a key in the current one

  // With all threads of a warp.
  __device__ __forceinline__ RowLoader(const blockflash_attention_index_params& params,
                                       const ListItem& item)
      : params(params), offset(0), listed(0) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    next = item.positions.begin, end = item.positions.end, step = 0;
    entries = params.lists.entries + item.list;
    // Entries are requested before what is to be found out about the query.
    const int first = load_entry(next), second = load_entry(next + kLookUp);
    keys = reinterpret_cast<const char*>(static_cast<const KeyElement*>(cache.k) +
                                         item.key_head * cache.k_stride_head) +
           chunk() * 16;
    query = ListedQuery::of(params, item.index, threadIdx.x % kWarpSize);
    place = KeyPlace::of(params, query, first, position(next));
    entry = second;
  }

  static __device__ __forceinline__ int row() { return threadIdx.x / kLine; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kLine; }
  __device__ __forceinline__ bool has_step() const { return next < end; }

  // Starts the copy of the next step, and of what is listed of it, as one group.
  __device__ __forceinline__ void start_step(uint32_t stage_smem, uint8_t (&bytes)[Config::warps]) {
    if (step % kSteps == 0) look_up();
    const int first_lane = step % kSteps * 8;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int of_row = first_lane + i * kWarpRows + row() % kWarpRows;
      const int64_t at = __shfl_sync(~0u, offset, of_row);
      const bool exists = listed >> of_row & 1;
      copy_row<TileLayout>(
          stage_smem, row() + i * kApart,
          exists ? keys + at : static_cast<const char*>(params.scaled.decode.cache.k), exists);
    }
    if (threadIdx.x % kWarpSize == 0) bytes[threadIdx.x / kWarpSize] = listed >> first_lane & 0xff;
    ++step, next += kKeys;
    ptx::cp_async_commit_group();
  }

  // The same for the queries. Rows that do not exist become zeros.
  static __device__ __forceinline__ void start_queries(const blockflash_attention_decode_params& p,
                                                       const ListItem& item, uint32_t smem) {
    if (row() < Config::rows) {
      const int of_unit = item.row_tile * Config::rows + row();
      const bool exists = of_unit < p.group;
      const Element* const q = static_cast<const Element*>(p.q) +
                               (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch : 0) +
                               item.q_begin * p.q_stride_seq +
                               (item.head_kv * p.group + of_unit) * p.q_stride_head + chunk() * 8;
      copy_row<QueryLayout>(
          smem, row(), exists ? reinterpret_cast<const char*>(q) : static_cast<const char*>(p.q),
          exists);
    }
    ptx::cp_async_commit_group();
  }

 private:
  // A copy of no bytes, too, has an address inside the tensor.
  template <class Layout>
  static __device__ __forceinline__ void copy_row(uint32_t smem, int row, const char* from,
                                                  bool exists) {
    constexpr int kChunks = Layout::row_bytes / 16;
    const uint32_t to = smem + Layout::offset(row, chunk());
#pragma unroll
    for (int line = 0; line * kLine < kChunks; ++line)
      if ((line + 1) * kLine <= kChunks || chunk() < kChunks % kLine)
        ptx::cp_async_cg_16(to + line * 128, from + line * 128, exists ? 16 : 0);
  }

  // The position of this lane's key in the look-up of the steps from one on.
  static __device__ __forceinline__ int position(int first) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % kWarpSize;
    return first + lane / 8 * kKeys + lane / kWarpRows % kOfThread * kApart +
           thread / kWarpSize * kWarpRows + lane % kWarpRows;
  }
  __device__ __forceinline__ int load_entry(int first) const {
    const int at = position(first);
    return at < end ? entries[at >> params.lists.granularity_log2] : -1;
  }

  // Entries and pages are requested two and one look-ups before the keys are.
  __device__ __forceinline__ void look_up() {
    offset = place.offset(params.scaled.decode.cache) * static_cast<int>(sizeof(KeyElement));
    listed = __ballot_sync(~0u, place.exists());
    if (next + kLookUp >= end) return;
    place = KeyPlace::of(params, query, entry, position(next + kLookUp));
    entry = load_entry(next + 2 * kLookUp);
  }
};

}  // namespace
}  // namespace blockflash

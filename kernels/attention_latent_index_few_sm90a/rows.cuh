// The copies of queries and of listed rows into the stages of a CTA.
#pragma once

#include <type_traits>

#include "blockflash/config/cache_codes.cuh"
#include "blockflash/latent/code_row.cuh"
#include "blockflash/latent/list_item.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {
namespace {

using Config = AttentionLatentConfig;
using Element = Config::Element;

constexpr int kKeys = 64;  // of a step
static_assert(!kHasCodes || (Config::values == CodeRow::codes &&
                             Config::columns == CodeRow::codes + CodeRow::turned),
              "rows of codes have one form");

// Rows as they are copied, 16 bytes apart, so that eight of them are in all groups of banks.
struct ApartRows {
  static constexpr int copied_bytes = Config::columns * 2, row_bytes = copied_bytes + 16;
  static_assert(row_bytes / 16 % 2 == 1, "the same chunk of eight rows is in different banks");

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * row_bytes + chunk * 16;
  }
};
using TileLayout = std::conditional_t<kHasCodes, CodeRow, ApartRows>;
using QueryLayout = Swizzle<Config::columns / 8>;
using KeyElement = std::conditional_t<kHasCodes, uint8_t, Element>;
constexpr int kRowBytes = kHasCodes ? CodeRow::row_bytes : ApartRows::copied_bytes;
constexpr int kStageBytes = kKeys * TileLayout::row_bytes;

// Which keys of a step are listed and seen: a byte for each warp, whose keys are 8 w + i.
struct ListedKeys {
  alignas(8) uint8_t of[Config::stages][Config::warps];

  __device__ __forceinline__ uint64_t word(int stage) const {
    return *reinterpret_cast<const uint64_t*>(of[stage]);
  }
};
static_assert(Config::warps * 8 == kKeys, "a word has a byte for each warp");

// A warp copies eight rows of a step, each by a bulk copy that one lane starts. Its lanes look up
// the keys of four steps at once.
struct RowLoader {
  static constexpr int kWarpRows = 8, kSteps = kWarpSize / kWarpRows, kLookUp = kSteps * kKeys;

  const blockflash_attention_index_params& params;
  const char* keys;  // the first row of the key head
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
                                         item.key_head * cache.k_stride_head);
    query = ListedQuery::of(params, item.index, lane());
    place = KeyPlace::of(params, query, first, position(next));
    entry = second;
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  __device__ __forceinline__ bool has_step() const { return next < end; }

  // Starts the copies of the next step into a stage that nobody reads any more. They arrive at its
  // mbarrier, with an arrival of each warp. Rows that are not listed become zeros, which are
  // visible behind the next barrier of the CTA.
  __device__ __forceinline__ void start_step(uint32_t stage_smem, uint8_t (&bytes)[Config::warps],
                                             uint32_t full) {
    if (step % kSteps == 0) look_up();
    const int first_lane = step % kSteps * kWarpRows;
    const uint32_t of_step = listed >> first_lane & 0xff;
    const uint32_t rows = stage_smem + TileLayout::offset(warp() * kWarpRows, 0);
    if (lane() == 0) {
      bytes[warp()] = static_cast<uint8_t>(of_step);
      ptx::mbarrier_arrive_expect_tx(full, __popc(of_step) * kRowBytes);
    }
    __syncwarp();  // bytes are expected before they come
    const int of_warp = lane() - first_lane;
    if (of_warp >= 0 && of_warp < kWarpRows && (of_step >> of_warp & 1)) {
      // Behind what threads have read and written here.
      ptx::fence_proxy_async();
      ptx::bulk_copy(rows + of_warp * TileLayout::row_bytes, keys + offset, kRowBytes, full);
    }
#pragma unroll 1
    for (uint32_t others = ~of_step & 0xff; others != 0; others &= others - 1) {
      const uint32_t row = rows + (__ffs(static_cast<int>(others)) - 1) * TileLayout::row_bytes;
#pragma unroll 1
      for (int at = lane() * 16; at < kRowBytes; at += kWarpSize * 16)
        ptx::store_shared_int4(row + at, make_int4(0, 0, 0, 0));
    }
    ++step, next += kKeys;
  }

  // Starts the copy of the queries as a group of each thread. Rows that do not exist become zeros.
  static __device__ __forceinline__ void start_queries(const blockflash_attention_decode_params& p,
                                                       const ListItem& item, uint32_t smem) {
    constexpr int kLine = 8, kChunks = Config::columns / 8;
    static_assert(kChunks % kLine == 0, "rows are whole lines of 128 bytes");
    const int row = threadIdx.x / kLine, chunk = threadIdx.x % kLine;
    if (row < Config::rows) {
      const int of_unit = item.row_tile * Config::rows + row;
      const bool exists = of_unit < p.group;
      const Element* const q = static_cast<const Element*>(p.q) +
                               (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch : 0) +
                               item.q_begin * p.q_stride_seq +
                               (item.head_kv * p.group + of_unit) * p.q_stride_head + chunk * 8;
      // A copy of no bytes, too, has an address inside the tensor.
      const Element* const from = exists ? q : static_cast<const Element*>(p.q);
      const uint32_t to = smem + QueryLayout::offset(row, chunk);
#pragma unroll
      for (int line = 0; line < kChunks / kLine; ++line)
        ptx::cp_async_cg_16(to + line * 128, from + line * 64, exists ? 16 : 0);
    }
    ptx::cp_async_commit_group();
  }

 private:
  // The position of this lane's key in the look-up of the steps from one on.
  static __device__ __forceinline__ int position(int first) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % kWarpSize;
    return first + lane / kWarpRows * kKeys + thread / kWarpSize * kWarpRows + lane % kWarpRows;
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

// Shared memory and its barriers, and the copies of queries and of listed rows into the stages.
#pragma once

#include <type_traits>

#include "blockflash/config/cache_codes.cuh"
#include "blockflash/latent/code_row.cuh"
#include "blockflash/latent/list_item.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/barrier.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/cp_async_arrive.cuh"
#include "blockflash/ptx/opaque.cuh"

namespace blockflash {
namespace {

using Config = AttentionLatentConfig;
using Element = Config::Element;

constexpr int kKeys = 64;  // of a step
constexpr int kStages = Config::stages;
static_assert(!kHasCodes || (Config::values == CodeRow::codes &&
                             Config::columns == CodeRow::codes + CodeRow::turned),
              "rows of codes have one form");
using QueryLayout = Swizzle<Config::columns / 8>;
using TileLayout = std::conditional_t<kHasCodes, CodeRow, QueryLayout>;
using KeyElement = std::conditional_t<kHasCodes, uint8_t, Element>;
constexpr int kStageBytes = kKeys * TileLayout::row_bytes;

// The last warpgroup copies rows, the warps of the others compute.
constexpr int kLoaderWarps = 4, kWarps = Config::warps - kLoaderWarps;
struct Team {
  static constexpr int threads = kWarps * kWarpSize, barrier = 1, vote = 2;

  static __device__ __forceinline__ void sync() { ptx::named_barrier_sync(barrier, threads); }
};
static_assert(kWarps * 8 == kKeys, "a warp has the scores of 8 keys");

// Which keys of a step are listed and seen, as 16 bits of each warp that copies rows: row
// 16 i + 4 w + r is bit 4 i + r of warp w.
struct ListedKeys {
  alignas(8) uint16_t of[kStages][kLoaderWarps];

  __device__ __forceinline__ uint64_t word(int stage) const {
    return *reinterpret_cast<const uint64_t*>(of[stage]);
  }
};

// The mbarriers of the stages. Warps that copy say so before what they have started arrives. The
// last stage is released once more than it is filled, since queries are there at first.
struct Barriers : PipelineBarriers<kStages> {
  using PipelineBarriers::PipelineBarriers;

  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(barrier_of(full, stage), kLoaderWarps * (kWarpSize + 1));
      ptx::mbarrier_init(barrier_of(empty, stage), kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  // Before `use` of a stage, of all of them.
  __device__ __forceinline__ void wait_empty(int stage, int use) const {
    ptx::mbarrier_wait(barrier_of(empty, stage), (use & 1) ^ (stage < kStages - 1));
  }
};

// Copies `bytes`, 16 or none, of the chunks of a row that a thread has, one of each 128 bytes.
template <class Layout>
__device__ __forceinline__ void copy_chunks(uint32_t smem, int row, int chunk, const char* from,
                                            int bytes) {
  constexpr int kLine = 8, kChunks = Layout::row_bytes / 16;
  const uint32_t to = smem + Layout::offset(row, chunk);
#pragma unroll
  for (int line = 0; line * kLine < kChunks; ++line)
    if ((line + 1) * kLine <= kChunks || chunk < kChunks % kLine)
      ptx::cp_async_cg_16(to + line * 128, from + line * 128, bytes);
}

// The copy of the queries by the team. Rows that do not exist become zeros.
__device__ __forceinline__ void copy_queries(const blockflash_attention_decode_params& p,
                                             const ListItem& item, uint32_t smem) {
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  if (row < Config::rows) {
    const int of_unit = item.row_tile * Config::rows + row;
    const bool exists = of_unit < p.group;
    const Element* const q = static_cast<const Element*>(p.q) +
                             (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch : 0) +
                             item.q_begin * p.q_stride_seq +
                             (item.head_kv * p.group + of_unit) * p.q_stride_head + chunk * 8;
    // A copy of no bytes, too, has an address inside the tensor.
    const void* const from = exists ? q : p.q;
    copy_chunks<QueryLayout>(smem, row, chunk, static_cast<const char*>(from), exists ? 16 : 0);
  }
  ptx::cp_async_wait_all();
}

// Eight threads copy a row, each parts of four rows of a step. The lanes of a warp look up those
// of two steps at once.
struct RowLoader {
  static constexpr int kLine = 8, kApart = kLoaderWarps * kWarpSize / kLine,
                       kOfThread = kKeys / kApart, kWarpRows = kWarpSize / kLine;
  static constexpr int kSteps = kWarpSize / (kWarpRows * kOfThread), kLookUp = kSteps * kKeys;
  static_assert(kWarpRows * kOfThread == 16, "a warp has 16 bits of a step");

  const blockflash_attention_index_params& params;
  const char* keys;  // this thread's chunk of the first row of the key head
  const int32_t* entries;
  ListedQuery query;
  int next, end;   // position of the next keys; positions end
  int entry;       // this lane's entry behind the next look-up,
  KeyPlace place;  // and the place of its key in the next one

  // With all threads of a warp.
  __device__ __forceinline__ RowLoader(const blockflash_attention_index_params& params,
                                       const ListItem& item)
      : params(params) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    next = item.positions.begin, end = item.positions.end;
    entries = params.lists.entries + item.list;
    // Entries are requested before what is to be found out about the query.
    const int first = load_entry(next), second = load_entry(next + kLookUp);
    keys = reinterpret_cast<const char*>(static_cast<const KeyElement*>(cache.k) +
                                         item.key_head * cache.k_stride_head) +
           chunk() * 16;
    query = ListedQuery::of(params, item.index, lane());
    place = KeyPlace::of(params, query, first, position(next));
    entry = second;
  }

  static __device__ __forceinline__ int thread() { return threadIdx.x - Team::threads; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kLine; }

  // Copies the steps of the item. Rows of keys that the query does not see become zeros.
  __device__ __forceinline__ void copy_steps(uint32_t smem, ListedKeys& listed_keys,
                                             const Barriers& barriers) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    int stage = 0, use = 0;
#pragma unroll 1
    while (next < end) {
      // Entries and pages are requested two and one look-ups before the keys are.
      const int64_t offset = place.offset(cache) * static_cast<int>(sizeof(KeyElement));
      uint32_t listed = __ballot_sync(~0u, place.exists());
      place = KeyPlace::of(params, query, entry, position(next + kLookUp));
      entry = load_entry(next + 2 * kLookUp);
#pragma unroll 1
      for (int step = 0; step < kSteps && next < end; ++step, next += kKeys, listed >>= 16) {
        barriers.wait_empty(stage, use);
        if (lane() == 0)
          listed_keys.of[stage][thread() / kWarpSize] = static_cast<uint16_t>(listed);
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          const int of_row = i * kWarpRows + lane() / kLine;
          const int64_t at = __shfl_sync(~0u, offset, step * 16 + of_row);
          const bool exists = listed >> of_row & 1;
          copy_chunks<TileLayout>(smem + stage * kStageBytes, thread() / kLine + i * kApart,
                                  chunk(), exists ? keys + at : static_cast<const char*>(cache.k),
                                  exists ? 16 : 0);
        }
        const uint32_t full = barrier_of(barriers.full, stage);
        ptx::cp_async_arrive(full);
        if (lane() == 0) ptx::mbarrier_arrive(full);
        if (++stage == kStages) stage = 0, ++use;
      }
    }
  }

 private:
  // The position of this lane's key in the look-up of the steps from one on.
  static __device__ __forceinline__ int position(int first) {
    const int of_step = lane() % 16;
    return first + lane() / 16 * kKeys + of_step / kWarpRows * kApart +
           thread() / kWarpSize * kWarpRows + of_step % kWarpRows;
  }
  __device__ __forceinline__ int load_entry(int first) const {
    const int at = position(first);
    return at < end ? entries[at >> params.lists.granularity_log2] : -1;
  }
};

}  // namespace
}  // namespace blockflash

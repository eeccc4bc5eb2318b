// The copies of the keys that lists name into the ring of a CTA.
#pragma once

#include "blockflash/latent/list_item.cuh"
#include "blockflash/latent/loader.cuh"

namespace blockflash {
namespace {

// Which keys of the steps in the ring are listed and seen: a byte for each warp that copies rows,
// with a bit for each of them.
struct ListedKeys {
  alignas(4) unsigned char of[Config::stages][4];

  __device__ __forceinline__ uint32_t word(int stage) const {
    return *reinterpret_cast<const uint32_t*>(of[stage]);
  }
};

// Copies the steps of an item: its queries, then the keys of 16 positions at a time. Rows of keys
// that the query does not see become zeros.
struct ListLoader : Loader {
  // A warp copies four rows of a step, and its lanes look up those of eight steps at once.
  static constexpr int kWarpRows = kWarpSize / kLine, kSteps = kWarpSize / kWarpRows;
  static constexpr int kLookUp = kSteps * kStepKeys;  // positions

  const int32_t* entries;  // of the list
  ListedQuery query;
  int entry;        // this lane's entry behind the next look-up,
  KeyPlace place;   // the place of its key in the next one,
  int64_t offset;   // and that of the current one in the cache, in elements
  unsigned listed;  // lanes that have a key in the current one

  // With all threads of a warp.
  __device__ __forceinline__ ListLoader(const blockflash_attention_index_params& params,
                                        const ListItem& item)
      : Loader(params.scaled.decode), offset(0), listed(0) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    next = item.positions.begin, end = item.positions.end;
    step = -kQueryParts;
    keys = reinterpret_cast<const char*>(static_cast<const KeyElement*>(cache.k) +
                                         item.key_head * cache.k_stride_head +
                                         chunk() * (16 / static_cast<int>(sizeof(KeyElement))));
    entries = params.lists.entries + item.list;
    // Entries are requested before what is to be found out about the query.
    const int first = load_entry(params, next), second = load_entry(params, next + kLookUp);
    query = ListedQuery::of(params, item.index, threadIdx.x % kWarpSize);
    place = KeyPlace::of(params, query, first, position(next));
    entry = second;
  }

  __device__ __forceinline__ bool has_step() const { return step < 0 || next < end; }

  // Starts the copy of the next step as one group. `bytes` is of its stage.
  __device__ __forceinline__ void start_step(const blockflash_attention_index_params& params,
                                             const ListItem& item, uint32_t stage_smem,
                                             unsigned char (&bytes)[4]) {
    const uint32_t to = stage_smem + TileLayout::offset(row(), chunk());
    if (step < 0)
      start_queries(params.scaled.decode, item, to);
    else
      start_keys(params, to, bytes);
    ++step;
    ptx::cp_async_commit_group();
  }

 private:
  // The position of this lane's key in the look-up of the steps from one on.
  static __device__ __forceinline__ int position(int first) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % kWarpSize;
    return first + lane / kWarpRows * kStepKeys + thread / kWarpSize * kWarpRows + lane % kWarpRows;
  }
  __device__ __forceinline__ int load_entry(const blockflash_attention_index_params& params,
                                            int first) const {
    const int at = position(first);
    return at < end ? entries[at >> params.lists.granularity_log2] : -1;
  }

  // Entries and pages are requested two and one look-ups before the keys are.
  __device__ __forceinline__ void look_up(const blockflash_attention_index_params& params) {
    offset = place.offset(params.scaled.decode.cache);
    listed = __ballot_sync(~0u, place.exists());
    if (next + kLookUp >= end) return;
    place = KeyPlace::of(params, query, entry, position(next + kLookUp));
    entry = load_entry(params, next + 2 * kLookUp);
  }

  __device__ __forceinline__ void start_keys(const blockflash_attention_index_params& params,
                                             uint32_t to, unsigned char (&bytes)[4]) {
    if (step % kSteps == 0) look_up(params);
    const int first_lane = step % kSteps * kWarpRows, of_row = first_lane + row() % kWarpRows;
    const int64_t at = __shfl_sync(~0u, offset, of_row);
    start_part(to, keys + at * static_cast<int64_t>(sizeof(KeyElement)),
               params.scaled.decode.cache.k, listed >> of_row & 1);
    if (threadIdx.x % kWarpSize == 0)
      bytes[threadIdx.x / kWarpSize] = listed >> first_lane & ((1 << kWarpRows) - 1);
    next += kStepKeys;
  }
};

}  // namespace
}  // namespace blockflash

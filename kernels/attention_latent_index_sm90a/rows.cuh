// What the four warps of the producer do: they copy the rows that lists name.
#pragma once

#include "blockflash/decode/listed_queries.cuh"
#include "blockflash/latent_hopper/layout.cuh"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/cp_async_arrive.cuh"

namespace blockflash {
namespace {

// How many items there are, each a split of the positions of a list for one row tile of one query,
// and what they are.
struct ListItems {
  int splits, row_tiles, of_split, count;

  __device__ __forceinline__ explicit ListItems(const blockflash_attention_index_params& params)
      : splits(ListSplits(params).splits),
        row_tiles(ceil_div(params.scaled.decode.group, Config::rows)),
        of_split(row_tiles * params.units),
        count(params.lists.queries * splits * of_split) {}
};

struct ListRun : DecodeRun {
  int index;      // of the query, of all
  int positions;  // of the list, and the first one:
  int first_position;

  __device__ __forceinline__ ListRun(const blockflash_attention_index_params& params, int number) {
    const blockflash_attention_decode_params& p = params.scaled.decode;
    const ListItems all(params);
    index = number / (all.splits * all.of_split);
    const int first = index * all.splits * all.of_split, within = number - first;
    run = within / all.of_split, runs = all.splits;
    const int of_tile = within - run * all.of_split;
    row_tile = of_tile / params.units, head_kv = of_tile - row_tile * params.units;
    slot = first + of_tile, slot_step = all.of_split;
    const bool packed = p.cu_seqlens_q != nullptr;
    sequence = packed ? 0 : index / p.seqlen_q;
    q_begin = packed ? index : index - sequence * p.seqlen_q, q_length = 1;
    first_position = run * params.chunk;
    positions = max(min(ListSplits(params).positions - first_position, params.chunk), 0);
  }
  __device__ __forceinline__ int pairs() const { return ceil_div(positions, 2 * kKeys); }
};

// A thread copies 16 bytes of each line of 128 of the rows r, r + 16, r + 32 and r + 48 of a tile.
// The lanes of a warp, whose threads copy 16 rows, look up those of both tiles of a pair.
struct Rows {
  static constexpr int kLine = 8, kApart = 4 * kWarpSize / kLine, kOfThread = kKeys / kApart;

  const blockflash_attention_index_params& params;
  const char* keys;        // the chunk of this thread in the first row of the key head
  const int32_t* entries;  // of the list, from the first position of the item on
  ListedQuery query;
  int first, left;  // position of the item, and how many this lane's is before its end
  int entry;        // this lane's entry of the pair behind the next one,
  KeyPlace place;   // and the place of its key in the next one

  __device__ __forceinline__ explicit Rows(const blockflash_attention_index_params& params)
      : params(params) {}

  static __device__ __forceinline__ int thread() { return threadIdx.x - Team::threads; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  // The position of this lane's key in a pair of tiles.
  static __device__ __forceinline__ int in_pair() {
    constexpr int kWarpRows = kWarpSize / kLine;
    const int of_tile = lane() % (kWarpSize / 2);
    return lane() / (kWarpSize / 2) * kKeys + of_tile / kWarpRows * kApart +
           thread() / kWarpSize * kWarpRows + of_tile % kWarpRows;
  }

  __device__ __forceinline__ void begin_item(const ListRun& item) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    const blockflash_index_lists& lists = params.lists;
    const int key_head = item.head_kv * params.scaled.decode.num_heads_kv / params.units;
    keys = reinterpret_cast<const char*>(static_cast<const Element*>(cache.k) +
                                         key_head * cache.k_stride_head + thread() % kLine * 8);
    entries = lists.entries + item.head_kv * lists.groups / params.units * lists.stride_group +
              item.index * lists.stride_query;
    first = item.first_position + in_pair(), left = item.positions - in_pair();
    // Entries are requested before what is to be found out about the query.
    const int now = load_entry(0), next = load_entry(1);
    query = ListedQuery::of(params, item.index, lane());
    place = KeyPlace::of(params, query, now, first);
    entry = next;
  }

  // Copies a pair of tiles of the item. `pair` counts those of all items.
  __device__ __forceinline__ void copy_pair(Shared& shared, const Barriers& barriers, uint32_t smem,
                                            int of_item, int pair) {
    const blockflash_kv_cache& cache = params.scaled.decode.cache;
    const int64_t offset = place.offset(cache) * static_cast<int>(sizeof(Element));
    const uint32_t listed = __ballot_sync(~0u, place.exists());
    place = KeyPlace::of(params, query, entry, first + (of_item + 1) * 2 * kKeys);
    entry = load_entry(of_item + 2);
    const int row = thread() / kLine, chunk = thread() % kLine;
    const uint32_t to = smem + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      const char* from[kOfThread];
      int bytes[kOfThread];
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const int of_row = stage * 16 + i * 4 + lane() / kLine;
        const int64_t at = __shfl_sync(~0u, offset, of_row);
        const bool exists = listed >> of_row & 1;
        from[i] = exists ? keys + at : static_cast<const char*>(cache.k);
        bytes[i] = exists ? 16 : 0;
      }
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        ptx::mbarrier_wait(barrier_of(barriers.empty, 2 * stage + part), (pair & 1) ^ 1);
        // Nobody reads the words of the pair before the last one any more: its columns are free.
        if (stage == 0 && part == 0 && lane() == 0) {
          shared.listed.of[pair % 2][0][thread() / kWarpSize] = static_cast<uint16_t>(listed);
          shared.listed.of[pair % 2][1][thread() / kWarpSize] = listed >> 16;
        }
        copy_part(to + stage * kTileBytes, from, bytes, part, stage);
        const uint32_t full = barrier_of(barriers.full, 2 * stage + part);
        ptx::cp_async_arrive(full);
        if (lane() == 0) ptx::mbarrier_arrive(full);
      }
    }
  }

 private:
  __device__ __forceinline__ int load_entry(int pair) const {
    if (pair * 2 * kKeys >= left) return -1;
    return entries[(first + pair * 2 * kKeys) >> params.lists.granularity_log2];
  }

  static __device__ __forceinline__ void copy_part(uint32_t to, const char* (&from)[kOfThread],
                                                   int (&bytes)[kOfThread], int part, int stage) {
    const auto copy = [&](int panel) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i)
        ptx::cp_async_cg_16(to + panel * kPanelBytes + i * kApart * 128, from[i] + panel * 128,
                            bytes[i]);
    };
#pragma unroll
    for (int panel = 0; panel < kValuePanels / 2; ++panel) copy(part * (kValuePanels / 2) + panel);
    if (kSparePanel && part == part_of(kValuePanels, stage)) copy(kValuePanels);
  }
};

}  // namespace
}  // namespace blockflash

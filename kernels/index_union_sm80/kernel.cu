// The union of the lists of neighbouring queries, for attention that visits it: for each listed
// block which queries have listed it.
//
// A CTA has a tile. It marks the queries of each block in shared memory, in a window of blocks at a
// time, and writes the marked blocks in ascending order. An entry whose block its query has marked
// before is marked again in a further round, so a block that a query lists n times is written n
// times. Marks do not depend on the order in which threads make them.
#include <stdint.h>

#include "blockflash/attention/index_tiles.cuh"
#include "blockflash/config/index_union.cuh"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

using Config = IndexUnionConfig;
constexpr int kThreads = Config::threads, kWarps = kThreads / kWarpSize;
constexpr int kMostQueries = 2 * 64;  // of a tile
static_assert(kMostQueries <= kThreads, "a thread finds what a query sees");

struct Shared {
  IndexTile tile;
  int beyond;
  int first_block, last_block;  // that queries see; the latter is not among them
  int2 visible[kMostQueries];   // of each query
  int64_t lists[kMostQueries];  // where they begin
  uint64_t sums[kWarps];
  uint32_t members[Config::words];
  uint32_t left[Config::words];  // entries for the next round
};

struct Lists {
  const blockflash_index_union_params& params;
  Shared& shared;
  const int capacity, words;
  int written[kKinds] = {0, 0, 0};

  __device__ __forceinline__ Lists(const blockflash_index_union_params& params, Shared& shared)
      : params(params),
        shared(shared),
        capacity(params.index.lists.capacity),
        words(params.unions.member_words) {}
  __device__ __forceinline__ int queries() const { return kRowGroups * params.unions.pack_queries; }

  // Finds what each query sees.
  __device__ __forceinline__ void begin() {
    const blockflash_attention_index_params& p = params.index;
    const IndexTile& tile = shared.tile;
    const int i = threadIdx.x;
    if (i < queries()) {
      const int which = i >= params.unions.pack_queries;
      const RowGroup rows = RowGroup::of(params.unions, tile, which);
      const int query = rows.begin + i - which * params.unions.pack_queries;
      const int64_t row = (p.scaled.decode.cu_seqlens_q != nullptr
                               ? tile.q_begin
                               : static_cast<int64_t>(tile.sequence) * p.scaled.decode.seqlen_q) +
                          query;
      int2 visible = {0, 0};
      if (query < rows.end && row < p.lists.queries) {
        const KeyRange keys = mask_of(p, tile).keys_of(query);
        const int log2 = p.lists.granularity_log2;
        if (keys.begin < keys.end) visible = {keys.begin >> log2, ((keys.end - 1) >> log2) + 1};
      }
      shared.visible[i] = visible;
      const int group =
          static_cast<int>(static_cast<int64_t>(tile.unit) * p.lists.groups / p.units);
      shared.lists[i] = group * p.lists.stride_group + row * p.lists.stride_query;
      if (visible.x < visible.y) {
        atomicMin(&shared.first_block, visible.x);
        atomicMax(&shared.last_block, visible.y);
      }
    }
    for (int at = threadIdx.x; at < (queries() * capacity + 31) / 32; at += kThreads)
      shared.left[at] = 0;
  }

  // Marks the entries of a round in blocks [first, last). Returns whether a thread has left some
  // for the next one.
  __device__ __forceinline__ bool mark(int round, int first, int last) {
    bool any = false;
    const int entries = queries() * capacity;
#pragma unroll 1
    for (int i = threadIdx.x; i < entries; i += kThreads) {
      const uint32_t bit = 1u << i % 32;
      if (round > 0 && !(shared.left[i / 32] & bit)) continue;
      const int query = i / capacity;
      const int2 visible = shared.visible[query];
      if (visible.x >= visible.y) continue;  // also of one that does not exist
      const int block = params.index.lists.entries[shared.lists[query] + (i - query * capacity)];
      if (block < max(visible.x, first) || block >= min(visible.y, last)) continue;
      const uint32_t member = 1u << query % 32;
      const bool again =
          atomicOr(&shared.members[(block - first) * words + query / 32], member) & member;
      any |= again;
      if (again && round == 0) atomicOr(&shared.left[i / 32], bit);
      if (!again && round > 0) atomicAnd(&shared.left[i / 32], ~bit);
    }
    return any;
  }

  // The kind of a marked block, or -1.
  __device__ __forceinline__ int kind_of(const uint32_t* members) const {
    uint32_t first = 0, second = 0;
    for (int word = 0; word < words; ++word) {
      const int of_first = min(max(params.unions.pack_queries - 32 * word, 0), 32);
      const uint32_t mask = static_cast<uint32_t>(bits_below(of_first));
      first |= members[word] & mask, second |= members[word] & ~mask;
    }
    return (first != 0) + 2 * (second != 0) - 1;
  }

  // Writes the blocks that were marked behind those before.
  __device__ __forceinline__ void write(int first, int last) {
    constexpr int kBits = 21;  // of the number of a kind
    const int each = (last - first + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, last - first),
              end = min(begin + each, last - first);
    uint64_t mine = 0;
    for (int at = begin; at < end; ++at) {
      const int kind = kind_of(shared.members + at * words);
      if (kind >= 0) mine += uint64_t{1} << kind * kBits;
    }
    uint64_t until = mine;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const uint64_t others = __shfl_up_sync(~0u, until, distance);
      if (lane >= distance) until += others;
    }
    if (lane == kWarpSize - 1) shared.sums[warp] = until;
    __syncthreads();
    uint64_t before = until - mine, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += shared.sums[i];
      all += shared.sums[i];
    }
    const auto number = [](uint64_t of, int kind) {
      return static_cast<int>(of >> kind * kBits & ((1 << kBits) - 1));
    };
    int at_kind[kKinds];
    for (int kind = 0; kind < kKinds; ++kind) at_kind[kind] = written[kind] + number(before, kind);
    const ListedPlaces places(params.unions, capacity, blockIdx.x);
    // Lists that change meanwhile could make more entries than there is room for.
    const int room = places.half;
    for (int at = begin; at < end; ++at) {
      const uint32_t* const members = shared.members + at * words;
      const int kind = kind_of(members);
      if (kind < 0) continue;
      const int entry = kind == 0 ? at_kind[0]++ : kind == 1 ? at_kind[1]++ : at_kind[2]++;
      if (entry >= room) continue;
      const int64_t place = places.of(kind, entry);
      params.unions.entries[place] = first + at;
      for (int word = 0; word < words; ++word)
        params.unions.members[place * words + word] = members[word];
    }
    for (int kind = 0; kind < kKinds; ++kind)
      written[kind] = min(written[kind] + number(all, kind), room);
  }

  __device__ __forceinline__ void unite() {
    const int window = Config::words / words;
#pragma unroll 1
    for (int first = shared.first_block; first < shared.last_block; first += window) {
      const int last = min(first + window, shared.last_block);
#pragma unroll 1
      for (int round = 0;; ++round) {
        for (int at = threadIdx.x; at < (last - first) * words; at += kThreads)
          shared.members[at] = 0;
        __syncthreads();
        const bool again = __syncthreads_or(mark(round, first, last));
        write(first, last);
        if (!again) break;
        __syncthreads();  // all have read the marks
      }
      __syncthreads();
    }
  }
};

// Results of rows that are in no sequence: those of tile `beyond` among the ones without queries.
// There are at least as many of these as such rows need.
__device__ __forceinline__ void clear_rows(const blockflash_index_union_params& params,
                                           int beyond) {
  const blockflash_attention_decode_params& d = params.index.scaled.decode;
  if (d.cu_seqlens_q == nullptr || d.batch == 0) return;
  const int begin = min(max(d.cu_seqlens_q[0], 0), d.total_q),
            end = min(max(d.cu_seqlens_q[d.batch], begin), d.total_q);
  const int queries = kRowGroups * params.unions.pack_queries;
  for (int i = 0; i < queries; ++i) {
    const int64_t number = static_cast<int64_t>(beyond) * queries + i;
    const int64_t row = number < begin ? number : number - begin + end;
    if (row >= d.total_q) return;
    for (int head = threadIdx.x / kWarpSize; head < d.num_heads_q; head += kWarps) {
      uint4* const o = reinterpret_cast<uint4*>(static_cast<uint16_t*>(d.o) + row * d.o_stride_seq +
                                                head * d.o_stride_head);
      const int lane = threadIdx.x % kWarpSize;
      for (int at = lane; at < d.head_dim_v / 8; at += kWarpSize) o[at] = make_uint4(0, 0, 0, 0);
      if (lane == 0 && d.lse != nullptr)
        d.lse[head * d.lse_stride_head + row] = __int_as_float(0xFF800000);
    }
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_index_union_params params) {
  using namespace blockflash;
  __shared__ Shared shared;
  ptx::launch_dependents();
  ptx::wait_for_predecessors();
  if (threadIdx.x < kWarpSize) {
    int beyond = 0;
    const IndexTile tile = find_index_tile(
        params, params.unions.first + static_cast<int>(blockIdx.x), threadIdx.x, beyond);
    if (threadIdx.x == 0) {
      shared.tile = tile, shared.beyond = beyond;
      shared.first_block = INT32_MAX, shared.last_block = 0;
    }
  }
  __syncthreads();
  Lists lists(params, shared);
  const bool exists = shared.tile.sequence >= 0;
  if (exists) {
    lists.begin();
    __syncthreads();
    lists.unite();
  } else {
    clear_rows(params, shared.beyond);
  }
  if (threadIdx.x == 0) {
    IndexTile& tile = reinterpret_cast<IndexTile*>(params.unions.tiles)[blockIdx.x];
    for (int kind = 0; kind < kKinds; ++kind) shared.tile.listed[kind] = lists.written[kind];
    tile = shared.tile;
  }
}

// dq beside dk and dv: every block of keys adds its share to the sums of each query tile that it
// visits, in semaphore order: the order in which blocks of keys are started, so the result does
// not depend on scheduling, and a CTA waits only for CTAs that run already.
//
// Consumers leave the gradients of the scores of a tile in shared memory, multiply those of the
// tile before by K, and stage their part of dq. Two warps of the producer warpgroup take the staged
// tiles alternately: each waits until the semaphore of the query tile has reached its block's rank
// and adds the tile by one bulk copy. The first block stores instead of adding, so nothing has to
// be cleared.
#pragma once

#include "blockflash/params/attention_bwd.h"
#include "blockflash/ptx/global.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

constexpr int kScoresPanel = kResidentRows * 128;  // 64 queries of each key
constexpr int kScoresBytes = kStreamRows / 64 * kScoresPanel;
constexpr int kSumsTile = kStatisticsTile * kD * 4;       // dq of 64 queries
constexpr int kSumsBytes = kStreamRows / 64 * kSumsTile;  // and of a query tile
constexpr int kScoresOffset = kRingEnd, kStagingOffset = kScoresOffset + 2 * kScoresBytes;
constexpr int kStagings = kSpecialized ? 1 : 2;  // staged tiles of dq
static_assert(!Config::dq || kStagingOffset + kStagings * kSumsBytes <= kStatisticsOffset,
              "manifest and kernel disagree on shared memory");

// Under a mask with a right limit: the heads, from the first one on, whose last block comes first.
// Where a group of query heads is split, each part of it counts as a head of keys here and below.
// Each block starts at its first visible query, where all later blocks have already been, so nobody
// waits. If heads start together, those of the last section ascend nonetheless: what starts last
// should be short.
__device__ __forceinline__ int descending_heads(const Params& params) {
  const blockflash_attention_fwd_params& p = params.base.base;
  if (p.scores.window.right == BLOCKFLASH_WINDOW_UNBOUNDED) return 0;
  const int together = params.heads_per_section;
  return Keys::parts(params) - (together > 1 ? together : 0);
}

// The blocks of keys in the order in which they are started. Neighbours among ascending ones belong
// to different heads, so that few blocks of one head wait for each other at first. Within a head,
// either way, blocks are started in the order of their ranks: a block waits for earlier tickets
// only. Whoever has drawn one of these runs already, and takes its tickets in ascending order, so
// the earliest ticket that is not done waits for nobody.
__device__ __forceinline__ Keys keys_of(const Params& params, int ticket) {
  const int tiles = Keys::tiles_of_keys(params.base), heads = Keys::parts(params);
  const int descending = descending_heads(params), together = params.heads_per_section;
  if (ticket < descending * tiles) return Keys(params, ticket / tiles, tiles - 1 - ticket % tiles);
  const int section = descending + (ticket - descending * tiles) / (together * tiles) * together;
  const int rest = ticket - section * tiles, width = min(together, heads - section);
  return Keys(params, section + rest % width, rest / width);
}
__device__ __forceinline__ Keys draw_keys(const Params& params) {
  return keys_of(params, static_cast<int>(atomicAdd(params.tile_counter, 1u)));
}

// In the second counter: somebody has given up waiting, so nobody waits any more.
constexpr uint32_t kGivenUp = 1u << 31;

constexpr int kAdders = 2;

// The adders of a CTA are counted when they wait no more, so that none of them gives up after the
// last one has reset the counters for the next launch, which may be one of another kernel.
__device__ __forceinline__ void close_semaphores(const Params& params, uint32_t adders) {
  __threadfence();
  const uint32_t before = atomicAdd(params.tile_counter + 1, adders) & ~kGivenUp;
  if (before + adders == kAdders * gridDim.x) params.tile_counter[0] = params.tile_counter[1] = 0;
}

// How many blocks of keys come before this one at a query tile.
__device__ __forceinline__ uint32_t rank_at(const Params& params, const Keys& work,
                                            int first_query) {
  const blockflash_attention_fwd_params& p = params.base.base;
  const QueryRange range = work.range(p);
  const KeyRange any =
      range.mask.keys_of_any(first_query, min(first_query + kStreamRows, range.seqlen_q) - 1);
  const int block = work.k_begin / kResidentRows;
  return work.part < descending_heads(params)
             ? (any.end + kResidentRows - 1) / kResidentRows - 1 - block
             : block - any.begin / kResidentRows;
}

// The mbarriers of rings of two stages each: the gradients of scores (DS of the diagram in
// README.md) and the staged sums of dq. And the places where the thread that reads all lists
// publishes a tile for the adders. A staged tile holds back the consumers after two more tiles and
// these the producer after two more, so eight places suffice. A persistent CTA has two more buffers
// for its blocks of keys, and releases of the two resident tiles.
struct DqBarriers {
  static constexpr int kPlaces = 8, kBytes = 112;
  uint32_t scores, scores_empty, staged, staged_empty, blocks, blocks_empty, resident_empty, places;

  __device__ __forceinline__ explicit DqBarriers(uint32_t smem)
      : scores(page_base(smem) + kPageEnd),
        scores_empty(scores + 16),
        staged(scores + 32),
        staged_empty(scores + 48),
        blocks(scores + 64),
        blocks_empty(scores + 80),
        resident_empty(scores + 96),
        places(scores + kBytes) {}

  // In packed batches the warp that clears rows reads the blocks too.
  __device__ __forceinline__ void init(bool packed) const {
    for (int i = 0; i < 6; ++i) ptx::mbarrier_init(scores + 8 * i, kSpecialized && i < 2 ? 4 : 8);
    for (int i = 6; i < 8; ++i) ptx::mbarrier_init(scores + 8 * i, 1);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(blocks + 8 * i, 1);
      ptx::mbarrier_init(blocks_empty + 8 * i, packed ? 9 : 8);
      ptx::mbarrier_init(resident_empty + 8 * i, 8);
    }
  }
  __device__ __forceinline__ void publish(uint32_t n, int tile, uint32_t rank, bool whole) const {
    const uint32_t at = places + n % kPlaces * 8;
    ptx::store_shared(at, static_cast<uint32_t>(tile));
    ptx::store_shared(at + 4, rank * 2 + whole);
  }
  // Both threads that add tiles read the end of the queue.
  __device__ __forceinline__ void end(uint32_t n) const {
    publish(n, -1, 0, false), publish(n + 1, -1, 0, false);
  }
};
static_assert(!Config::dq || kPageEnd + DqBarriers::kBytes + 8 * DqBarriers::kPlaces <= kPageLimit,
              "the page is too small");

// Consumers count blocks, modulo 4, in the two highest bits of the number of a tile. As many tiles
// of 64 rows as the others can count do not fit into memory.
constexpr uint32_t kNextBlock = 1u << 30;

// A warp arrives at the mbarrier of tile or block n, of which there are two.
__device__ __forceinline__ void arrive(uint32_t barriers, uint32_t n) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier_of(barriers, n & 1));
}
// Passes on what a warp has stored for tile n. The fence takes hundreds of clocks where products
// keep shared memory busy, so it comes after the next products have been queued.
__device__ __forceinline__ void pass_on(uint32_t barriers, uint32_t n) {
  ptx::fence_proxy_async();
  arrive(barriers, n);
}

// A block of keys of a persistent CTA.
struct Block {
  Keys keys;
  int first_tile, tiles;    // of queries, for each head
  int all_tiles;            // for all heads; -1: there are no more blocks
  uint32_t resident_phase;  // of the arrival of its K and V

  // Blocks alternate between two places.
  static __device__ __forceinline__ Block& at(uint32_t block) {
    __shared__ __align__(16) unsigned char bytes[2][sizeof(Block)];
    return reinterpret_cast<Block&>(bytes[block % 2]);
  }

  __device__ __forceinline__ void wait_resident(uint32_t barrier) const {
    PipelineState<1>{0, resident_phase}.wait(barrier);
  }

  // There is no block mask beside sums of dq.
  __device__ __forceinline__ void find_tiles(const Params& params) {
    const QueryRange range = keys.range(params.base.base);
    const int last_key = min(keys.k_begin + kResidentRows, keys.seqlen_kv) - 1;
    const int begin = range.queries_of(keys.k_begin).begin, end = range.queries_of(last_key).end;
    first_tile = begin / kStreamRows;
    // Keys that no query sees visit nothing: semaphores count only blocks of keys that a tile sees.
    tiles = begin < end ? (end + kStreamRows - 1) / kStreamRows - first_tile : 0;
    all_tiles = tiles * keys.heads;
  }
  // The place of the statistics of a head, in whole tiles of them.
  __device__ __forceinline__ int statistics_tile(const blockflash_attention_bwd_params& b,
                                                 int head) const {
    const bool packed = b.base.cu_seqlens_q != nullptr;
    return static_cast<int>((keys.batch * b.statistics_stride_batch * !packed +
                             head * b.statistics_stride_head +
                             statistics_row(packed, keys.batch, keys.q_offset)) /
                            kStatisticsTile);
  }
};

// The next block that has keys: one of a short sequence may have none. By one thread.
__device__ __forceinline__ bool draw_block(const Params& params, Keys& keys) {
  const uint32_t blocks = Keys::tiles_of_keys(params.base) * Keys::parts(params);
#pragma unroll 1
  while (true) {
    const uint32_t ticket = atomicAdd(params.tile_counter, 1u);
    if (ticket >= blocks) return false;
    keys = keys_of(params, static_cast<int>(ticket));
    if (keys.k_begin < keys.seqlen_kv) return true;
  }
}

// Waits until a tile has been added to `rank` times. If somebody else writes to the workspace while
// the kernel runs, that may never come true. A wait takes microseconds, so after about two seconds
// of polling the sums are worthless anyway, and all that is left to do is to end.
__device__ __forceinline__ void wait_for_rank(const uint32_t* semaphore, uint32_t rank,
                                              uint32_t* counter) {
  constexpr uint32_t kPolls = 1u << 21, kBetween = 1u << 10;
#pragma unroll 1
  for (uint32_t poll = 1; ptx::load_acquire(semaphore) < rank; ++poll) {
    if (poll % kBetween != 0) continue;
    if (ptx::load_acquire(counter) & kGivenUp) return;
    if (poll >= kPolls) {
      atomicOr(counter, kGivenUp);
      return;
    }
  }
}

// One thread that adds every second staged tile, in semaphore order.
__device__ __forceinline__ void add_in_order(const Params& params, uint32_t smem, int which) {
  const DqBarriers barriers(smem);
  const uint32_t staged = smem + kStagingOffset + which % kStagings * kSumsBytes;
  ptx::wait_for_predecessors();  // which clear the semaphores
#pragma unroll 1
  for (uint32_t n = which;; n += 2) {
    wait_full<2>(barriers.staged, n);
    const uint32_t place = barriers.places + n % DqBarriers::kPlaces * 8;
    const int tile = static_cast<int>(ptx::load_shared(place));
    const uint32_t rank_and_whole = ptx::load_shared(place + 4), rank = rank_and_whole / 2;
    if (tile < 0) return;
    // Of a larger tile, what is beyond its sequence has no place.
    const bool whole = rank_and_whole % 2 != 0;
    const uint32_t bytes = whole ? kSumsBytes : kSumsTile;
    float* const sums = params.dq_sums + static_cast<int64_t>(tile) * (kSumsTile / 4);
    uint32_t* const semaphore = params.base.semaphores + tile;
    if (rank == 0) {
      ptx::bulk_store(sums, staged, bytes);
    } else {
      wait_for_rank(semaphore, rank, params.tile_counter + 1);
      ptx::fence_proxy_async_global();
      ptx::bulk_add(sums, staged, bytes);
    }
    ptx::tensor_store_commit();
    ptx::tensor_store_wait_read();
    ptx::mbarrier_arrive(barrier_of(barriers.staged_empty, which));
    ptx::tensor_store_wait();
    ptx::fence_proxy_async_global();
    ptx::max_release(semaphore, rank + 1);
    // Nobody waits for the second word, but where it is 0 the sums were never written.
    if (kSumsBytes > kSumsTile && whole) ptx::max_release(semaphore + 1, rank + 1);
  }
}

}  // namespace
}  // namespace blockflash

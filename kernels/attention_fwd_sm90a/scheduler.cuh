// The scheduler warp of the Hopper attention kernels. Their layout.cuh comes first.
#pragma once

#include "blockflash/ptx/launch.cuh"

namespace blockflash {

// A whole warp takes the next two block rows, whose steps end before `end`.
__device__ __forceinline__ bool publish_pair(Queue& queue, uint32_t smem, uint32_t slot, int end) {
  const int lane = threadIdx.x % 32;
  const blockflash_attention_fwd_params& p = queue.params.base;
  QueryTile tile;
  if (!queue.take(tile)) {
    if (lane == 0) QueryTile{0, 0, 0, 0, 0, 0, 0, -1}.store(slot);
    return false;
  }
  tile.key_tiles = write_steps(p, tile, {smem + kStepOffset}, end, slot + kWalkInSlot);
  tile.first_key_tile = end - tile.key_tiles;
  if (lane == 0) {
    tile.store(slot);
    queue.rows_of(tile).store(slot + kRowsInSlot);
  }
  if (lane < 2) ptx::store_shared(slot + kPairInSlot + 4 * lane, tile.q_begin);
  return true;
}

// The key tiles before part `i` of n equal ones.
__device__ __forceinline__ int part_of(int key_tiles, int i, int n) {
  return static_cast<int>(static_cast<int64_t>(key_tiles) * i / n);
}

// A whole warp takes the next query tile and computes its walks, one number per lane.
template <class Queue>  // so that what a cache has is discarded without one
__device__ __forceinline__ bool publish(Queue& queue, uint32_t smem, int n) {
  const uint32_t slot = slot_of(smem, n);
  if constexpr (kTwoBlockRows) {
    // Positions descend from tile to tile without a gap, so they tell the stages.
    const int before = QueryTile::load(slot_of(smem, n + kSlots - 1)).first_key_tile;
    return publish_pair(queue, smem, slot, n == 0 ? 1 << 30 : before);
  }
  const blockflash_attention_fwd_params& p = queue.params.base;
  const int lane = threadIdx.x % 32;
  QueryTile tile;
  if (!queue.take(tile)) {
    if (lane == 0) QueryTile{0, 0, 0, 0, 0, 0, 0, -1}.store(slot);
    return false;
  }
  TileList list = Origin::has_block_masks
                      ? TileList::of(p.block_mask, kBlockKv, tile.batch, tile.head, tile.q_begin)
                      : TileList{nullptr, 0, 1};
  // Lanes 0 and 1 find the ends of the whole tile, lanes 4 w + 4 to 4 w + 7 the walk of warpgroup
  // w.
  const int warpgroup = lane / 4 - 1, word = lane % 4;
  const bool whole = warpgroup < 0;
  int step = kRowStep, rows_of_tile = Config::block_q, rows_of_warpgroup = 64;
  if constexpr (!Origin::has_block_masks) {
    step = rows_of_warpgroup = queue.all.pack_queries;
    rows_of_tile = kWarpgroups * rows_of_warpgroup;
  }
  const KeyLimits limits = KeyLimits::of<kBlockKv>(p, tile, whole ? 0 : warpgroup * step,
                                                   whole ? rows_of_tile : rows_of_warpgroup);
  const int limit = whole ? (word == 0 ? limits.begin : limits.end)
                          : (word < 2    ? limits.end
                             : word == 2 ? limits.unmasked_begin
                                         : limits.unmasked_end);
  const int position = limit > 0 ? list.lower_bound(limit) : 0;
  int first = __shfl_sync(~0u, position, 0);
  int key_tiles = max(__shfl_sync(~0u, position, 1) - first, 0);
  if constexpr (!Origin::has_block_masks) {
    const int before = part_of(key_tiles, queue.split, queue.splits);
    key_tiles = part_of(key_tiles, queue.split + 1, queue.splits) - before;
    first += before;
    // There is no list. In place of its sizes: which split this is, and of how many.
    list.count = queue.split, list.tiles_per_col = queue.splits;
  }
  const int left = min(max(position - first, 0), key_tiles);
  const int walk = word == 0   ? left
                   : word == 1 ? key_tiles - left
                   : word == 2 ? max(position, first)
                               : position - 1;
  if (!whole && warpgroup < kWarpgroups)
    ptx::store_shared(slot + kWalkInSlot + 16 * warpgroup + 4 * word, walk);
  if (lane == 0) {
    tile.first_key_tile = first, tile.key_tiles = key_tiles;
    tile.store(slot);
    queue.rows_of(tile).store(slot + kRowsInSlot);
    // Nobody searches the list any more. In place of its length: the bits of a block that come
    // before those of these queries.
    if (kHasBits && list.cols != nullptr)
      list.count = tile.q_begin % p.block_mask.block_q / 64 * (p.block_mask.block_kv / 64);
    list.store(slot + kListInSlot);
  }
  return true;
}

// The scheduler warp. It prefetches the next query tile kRequestAhead key tiles before the
// producer needs it: early enough to hide the lookup, late enough to keep dynamic load balancing.
// The first tile has been published already.
constexpr int kRequestAhead = kTwoBlockRows ? 16 : 8;
__device__ __forceinline__ void schedule(Queue& queue, uint32_t smem, const Barriers& barriers) {
  const auto published = [&] {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.published);
  };
  published();
  ptx::wait_for_predecessors();
  bool more = QueryTile::load(slot_of(smem, 0)).key_tiles >= 0;
  for (int n = 1; more; ++n) {
    // Ahead of time, since an index takes as long as a step.
    if constexpr (kTwoBlockRows) queue.advance();
    barriers.wait_requested(n);
    __syncwarp();
    if constexpr (!kTwoBlockRows) queue.advance();
    more = publish(queue, smem, n);
    published();
  }
  if (threadIdx.x % 32 == 0) queue.close();
}

}  // namespace blockflash

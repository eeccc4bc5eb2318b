// How the producer of the Hopper attention kernel walks key tiles. With score terms it also finds
// the bits of partial blocks and loads the bias.
#pragma once

#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "blockflash/ptx/tensor_prefetch.cuh"
#include "layout.cuh"

namespace blockflash {

// Walks the list of a slot and the bits of its blocks, which it prefetches as it does columns.
struct BitsWalk : DescendingTiles {
  const blockflash_attention_fwd_tma_terms_params& all;
  // The words of block_bits of this block and of the prefetched one. They are used as late as
  // possible, since the producer must not wait for device memory.
  int word, ahead;

  __device__ __forceinline__ BitsWalk(const blockflash_attention_fwd_tma_terms_params& all,
                                      uint32_t slot, int position)
      : DescendingTiles(slot + kListInSlot, position), all(all), word(-1), ahead(-1) {
    const TileList tiles = TileList::load(list);
    if (all.terms.block_bits == nullptr || tiles.cols == nullptr || position < 0) return;
    word = of_column(tiles, position / tiles.tiles_per_col);
    ahead = of_column(tiles, listed);
  }
  __device__ __forceinline__ void advance() {
    const bool leaves_block = within == 0;
    DescendingTiles::advance();
    if (!leaves_block) return;
    word = ahead;
    const TileList tiles = TileList::load(list);
    if (all.terms.block_bits != nullptr && tiles.cols != nullptr) ahead = of_column(tiles, listed);
  }
  __device__ __forceinline__ int of_column(const TileList& tiles, int column) const {
    return all.terms.block_bits[tiles.cols - all.fwd.base.block_mask.col_idx + column];
  }
  // The bits of the key tile, from those of the first warpgroup on, or -1 where all pairs are
  // visible. Words of block_bits are data on the device that nobody has validated. Opaque, since
  // the thread has no register for the tiles of a block.
  __device__ __forceinline__ int bits() const {
    const blockflash_block_mask& mask = all.fwd.base.block_mask;
    const int of_block =
        min(word, all.terms.bit_tiles - ptx::opaque(mask.block_q) / 64 * (mask.block_kv / 64));
    return of_block < 0 ? -1 : of_block + TileList::load(list).count + within * (kBlockKv / 64);
  }
  // Starts bits on their way into L2, where consumers find them.
  __device__ __forceinline__ void prefetch_bits() const {
    const int first = bits();
    if (first < 0) return;
    const uint32_t* at = all.terms.bits + static_cast<int64_t>(first) * BLOCKFLASH_BIT_TILE_WORDS;
#pragma unroll
    for (int w = 0; w < (kRowStep > 0 ? kWarpgroups : 1); ++w) {
      ptx::bulk_prefetch(at, kBlockKv / 64 * 4 * BLOCKFLASH_BIT_TILE_WORDS);
      at += all.fwd.base.block_mask.block_kv / 64 * BLOCKFLASH_BIT_TILE_WORDS;
    }
  }
};

// The walk over the key tiles of a slot, down from a position.
template <class Given>
__device__ __forceinline__ auto walk_of(const Given& kernel_params, uint32_t slot, int position) {
  if constexpr (kHasBits)
    return BitsWalk(kernel_params, slot, position);
  else
    return typename Origin::Walk(slot + kListInSlot, position);
}

// The bias has a warp of its own, which learns of query tiles as NaN-scanner warps do. It loads
// boxes as they become free, for each warpgroup those of the key tiles that it computes. All lanes
// walk together and have the same numbers, which `uniform` tells the compiler: TMA takes
// coordinates from uniform registers, and moving them there from those of one lane takes longer
// than the load of a box.
__device__ __forceinline__ void produce_bias(const blockflash_attention_fwd_tma_terms_params& all,
                                             uint32_t smem, const Barriers& barriers) {
  const blockflash_score_terms& terms = all.terms;
  const bool issues = threadIdx.x % 32 == 0;
  const auto uniform = [](int x) { return __shfl_sync(~0u, x, 0); };
  // Otherwise the next key tile is fetched into L2 ahead: a box is free for too short a time to
  // hide device memory.
  const bool is_shared =
      terms.bias_stride_head == 0 || (terms.bias_stride_batch == 0 && all.fwd.base.batch > 1);
  PhaseBits empty = PhaseBits::producer(), full = PhaseBits::consumer();
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int q = Barriers::kQ + n % Config::q_stages * kWarpgroups;
    full.wait(barriers.full, q);
    __syncwarp();
    if (issues) ptx::mbarrier_arrive(barrier_of(barriers.empty, q));
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    const int key_tiles = uniform(tile.key_tiles);
    if (key_tiles < 0) break;
    DescendingTiles tiles(slot + kListInSlot, uniform(tile.first_key_tile) + key_tiles - 1);
    const int row = uniform(tile.q_begin),
              head = terms.bias_stride_head == 0 ? 0 : uniform(tile.head),
              batch = terms.bias_stride_batch == 0 ? 0 : uniform(tile.batch);
    int computed[kWarpgroups];  // by each warpgroup
#pragma unroll
    for (int w = 0; w < kWarpgroups; ++w)
      computed[w] = uniform(KeyWalk::load(slot + kWalkInSlot + 16 * w).left);
#pragma unroll 1
    for (int left = key_tiles; left > 0; --left) {
      const int key = uniform(tiles.tile()) * kBlockKv;
      tiles.advance();
      const bool prefetches = issues && !is_shared && left > 1;
      const int next_key = uniform(tiles.tile()) * kBlockKv;
#pragma unroll
      for (int w = 0; w < kWarpgroups; ++w) {
        if (left > computed[w]) continue;
#pragma unroll
        for (int i = 0; i < kBlockKv / 64; ++i) {
          const int box = next_box(empty, w), w_row = row + w * kRowStep,
                    w_head = terms.bias_stride_head == 0 ? 0 : head + w * kHeadStep;
          const uint32_t arrived = barrier_of(barriers.full, Barriers::kBias + box);
          empty.wait(barriers.empty, Barriers::kBias + box);
          if (issues) {
            ptx::mbarrier_arrive_expect_tx(arrived, kBoxBytes);
            ptx::tensor_copy_4d(smem + kBiasOffset + box * kBoxBytes, &all.bias, key + 64 * i,
                                w_row, w_head, batch, arrived);
          }
          if (prefetches)
            ptx::tensor_prefetch_4d(&all.bias, next_key + 64 * i, w_row, w_head, batch);
        }
      }
    }
  }
}

}  // namespace blockflash

// Scores of blocks of keys for each query, for sm_80 and newer: queries times heads against the
// keys of a cache, reduced over heads and over the keys of a block before anything is stored.
//
// Each warp has 64 keys in registers, as the rows of products by mma.sync, while queries pass by in
// a ring in shared memory that all warps read. The README says why.
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"
#include "copies.cuh"
#include "narrow.cuh"
#include "wide.cuh"

namespace blockflash {
namespace {

using Outputs = std::conditional_t<Config::is_wide, Wide, Narrow>;
constexpr int kStages = Config::stages;
constexpr int kKeyBytes = Config::warps * kWarpBytes;
constexpr int kItems = 3;  // item n in slot n % 3

struct Shared {
  float weights[kStages][kStageColumns];
  SplitBlocks split;
  Item items[kItems];
  ItemWalk walk;  // of the warp that publishes items,
  int number;     // and the number of the item that it publishes next; -1: none
};
constexpr int kSharedBytes = 3072;
static_assert(sizeof(Shared) <= kSharedBytes, "the manifest counts on it");
static_assert(Config::smem_bytes == kKeyBytes + kStages * kStageBytes + kSharedBytes,
              "manifest and kernel disagree on smem");

__device__ __forceinline__ int stages_of(const Item& item) {
  return (item.products + kStageProducts - 1) / kStageProducts;
}

// Writes -inf where no item writes: to the blocks outside of the tiles that the tile of queries of
// a row sees.
__device__ __forceinline__ void fill_hidden(const Params& p, int warp, int lane) {
  const int64_t all = static_cast<int64_t>(p.groups) * p.rows.rows;
  for (int64_t i = blockIdx.x * Config::warps + warp; i < all; i += gridDim.x * Config::warps) {
    const int group = static_cast<int>(i / p.rows.rows);
    const int row = static_cast<int>(i - static_cast<int64_t>(group) * p.rows.rows);
    const IndexRow at = IndexRow::of(p.rows, row);
    KeyTiles tiles{0, 0};
    if (at.exists) {
      const int first = small_quotient(at.query, p.item_queries) * p.item_queries;
      const int last = min(first + p.item_queries, at.sequence.queries.length) - 1;
      tiles = KeyTiles::of(at.sequence.mask(p.rows), first, last);
    }
    const int shift = __ffs(p.granularity) - 1;
    const int begin = tiles.begin * kTileKeys >> shift;
    const int skipped = min(tiles.end * kTileKeys >> shift, p.blocks) - begin;
    float* const scores = p.scores + group * p.scores_stride_group + row * p.scores_stride_row;
    for (int block = lane; block < p.blocks - skipped; block += kWarpSize)
      scores[block < begin ? block : block + skipped] = -CUDART_INF_F;
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_index_scores_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t keys_smem =
      static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + warp * kWarpBytes;
  const uint32_t ring_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + kKeyBytes;
  Shared& shared = *reinterpret_cast<Shared*>(smem + kKeyBytes + kStages * kStageBytes);
  const uint32_t weights_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared.weights));
  const auto item_of = [&](int n) -> Item& {
    return shared.items[static_cast<unsigned>(n) % kItems];
  };

  // One warp takes the items for all, since lengths that change meanwhile could make warps disagree
  // about how often they meet.
  const auto publish = [&](int n) {
    __syncwarp();  // the lanes see what the first one has left
    const int number = shared.number;
    ItemWalk walk = shared.walk;
    __syncwarp();
    const bool counts = p.tile_counter != nullptr && lane == 0 && number >= 0;
    const int step_on = counts ? static_cast<int>(atomicAdd(p.tile_counter, 1)) : number;
    const int next = static_cast<int>(gridDim.x) + step_on;
    const bool found = number >= 0 && walk.find(p, number, item_of(n), lane);
    __syncwarp();
    if (lane > 0) return;
    shared.walk = walk;
    shared.number = found ? next : -1;
    if (!found) item_of(n).sequence = -1;
    // The last CTA that gets none leaves the counter as it was.
    if (!found && counts &&
        ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
      p.tile_counter[0] = 0;
  };
  for (int i = threadIdx.x; i < kStages * kStageColumns; i += Config::threads)
    shared.weights[i / kStageColumns][i % kStageColumns] = 1.f;
  for (int i = threadIdx.x; i < 2 * kMostSpans * kStageColumns; i += Config::threads)
    (&shared.split.scores[0][0][0])[i] = nullptr;
  if (threadIdx.x == 0) shared.number = blockIdx.x, shared.walk = {};
  ptx::wait_for_predecessors();
  if (warp == 0) {
    publish(0);
    publish(1);
  }
  __syncthreads();

  // The stage that is copied next, of an item that is not beyond the next one.
  int copy_item = 0, copy_stage = 0, copy_slot = 0;
  int copied = 0, step = 0, slot = 0;  // stages: copied, and used
  const auto copy_stages = [&](int limit, int last_item) {
    while (copied < limit) {
      if (copy_item > last_item || item_of(copy_item).sequence < 0) break;
      const Item& item = item_of(copy_item);
      copy_queries(p, item, copy_stage, ring_smem + copy_slot * kStageBytes,
                   weights_smem + copy_slot * kStageColumns * 4, warp, lane);
      ++copied, copy_slot = next_stage<kStages>(copy_slot);
      if (++copy_stage == stages_of(item)) ++copy_item, copy_stage = 0;
    }
  };
  if (item_of(0).sequence >= 0) {
#pragma unroll 1
    for (int m = 0; m < kMTiles; ++m) copy_keys(p, item_of(0), warp, m, keys_smem, lane);
    copy_stages(kStages - 1, 1);
  }
  ptx::cp_async_commit_group();

  Keys keys;
  Outputs outputs;
  const LaneCoords column_at = lane_col_major(lane);
  const LaneAddress<kChunks> columns(ring_smem, column_at.row, column_at.chunk);
  const bool splits = p.granularity > kWarpKeys;
#pragma unroll 1
  for (int n = 0; item_of(n).sequence >= 0; ++n) {
    const Item& item = item_of(n);
    const int stages = stages_of(item);
    int copied_keys = 0;  // of the next item
    outputs.begin_item();
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      // A stage is in the group before the youngest one, but the first stages of an item.
      if (stage == 0 || kStages < 3)
        ptx::cp_async_wait_group<0>();
      else
        ptx::cp_async_wait_group<1>();
      __syncthreads();
      if (stage == 0) keys.load(keys_smem, lane), __syncwarp();
      copy_stages(step + kStages, n + 1);
      if (copied_keys < kMTiles && item_of(n + 1).sequence >= 0) {
        // All at once, or beside each of the first stages: whoever waits for a stage waits for the
        // copies before it, too.
        const int upto = stages < kMTiles + 2 ? kMTiles : copied_keys + 1;
#pragma unroll 1
        for (; copied_keys < upto; ++copied_keys)
          copy_keys(p, item_of(n + 1), warp, copied_keys, keys_smem, lane);
      }
      ptx::cp_async_commit_group();
      if (splits) finish_split_blocks(p, shared.split, (step & 1) ^ 1);
      if (warp == 0 && stage == 0) publish(n + 2);
      const BlockWriter writer{p, item, shared.split, warp, lane, step & 1};
#pragma unroll 1
      for (int i = 0; i < kStageProducts; ++i) {
        if (stage * kStageProducts + i >= item.products) break;
        const uint32_t weights = weights_smem + (slot * kStageColumns + i * kColumns) * 4;
        const Columns at{columns, i * kColumns, static_cast<uint32_t>(slot * kStageBytes)};
        outputs.add(writer, keys, at, weights, i);
      }
      ++step, slot = next_stage<kStages>(slot);
    }
    if (n == 0) ptx::launch_dependents();
  }
  if (splits) {
    __syncthreads();
    finish_split_blocks(p, shared.split, (step & 1) ^ 1);
  }
  if (!p.leaves_hidden) fill_hidden(p, warp, lane);
}

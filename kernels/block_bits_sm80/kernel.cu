// Partial blocks of block masks, made on the GPU from pairs of tokens, for sm_80 and newer.
//
// The first launch classifies: a CTA has neighbouring blocks of a row of a head. Where the source
// allows it, bounds over the queries of the row tell which blocks have no visible pair, or all of
// them, without looking at pairs. Of the others, warps compute which pairs are visible, 64 × 64 at
// a time, as a bit per pair. A block without any is not visited; one with all pairs is full; any
// other takes tiles of bits from a counter and writes them, in the order in which accumulators hold
// scores, and transposed where a transpose is wanted. Where there is no room, the block is not
// visited: a pair that the source hides is never seen. The lists of visited blocks are built by
// block_mask_sm80. The last launch looks up, for each listed block, where its bits are.
//
// Which block gets which tiles depends on the order of CTAs; what attention computes does not.
#include "sources.cuh"

namespace blockflash {
namespace {

using Config = BlockBitsConfig;
constexpr int kTileWords = 128;  // words of the bits of a tile
constexpr int kThreads = Config::threads;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxTiles = Config::max_tiles;
static_assert(kWarps == 4, "a warp has 32 of the blocks of a CTA, and 4 of the blocks of 64 nodes");
static_assert(kMaxTiles >= kWarps, "each warp has a tile where blocks are tiles");
static_assert(kSpan == kWarps * 4 * kSide, "four threads of a warp have a block of nodes each");

// A tile as bits: two words of 32 keys for each query.
struct alignas(16) Tile {
  uint32_t words[2 * kSide];
};

// The nodes of trees that a CTA links.
struct Nodes {
  uint64_t seen[kSpan];
  int32_t up[kSpan];
};

// Shared memory of the first steps.
union Shared {
  struct {
    Tile tiles[kMaxTiles];
    uint32_t unsure[kWarps];
    int32_t place;
  } blocks;
  Nodes nodes;
};

__device__ __forceinline__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}

// The bits of 64 × 64 pairs from this query and key on; whether a lane saw any, or one was hidden.
struct Found {
  bool all = true, any = false;

  __device__ __forceinline__ void tile(const Params& p, int group, int query, int key, Tile& tile) {
    const bool aligned = (reinterpret_cast<uintptr_t>(p.source) | p.seqlen_kv) % 16 == 0;
    const bool is_read =
        p.source_kind == BLOCKFLASH_PAIRS_BOOL && aligned && p.seqlen_kv - key >= kSide;
    if (is_read) {
      booleans(p, group, query, key, tile);
      __syncwarp();  // other lanes have read the words that follow
    }
    query += lane_of_thread() / 2, key += lane_of_thread() % 2 * 32;
#pragma unroll 1
    for (int i = lane_of_thread(); i < 2 * kSide; i += kWarpSize, query += kWarpSize / 2) {
      const uint32_t exist = query < p.seqlen_q ? lowest_bits(p.seqlen_kv - key) : 0;
      uint32_t bits = 0;
      if (is_read)
        bits = is_bounded(p) ? tile.words[i] & window_of(p, query).from(key) : tile.words[i];
      else if (exist != 0)
        bits = visible(p, group, query, key) & exist;
      tile.words[i] = bits;
      all &= bits == exist;
      any |= bits != 0;
    }
  }

  // The bits of booleans. A lane has 16 keys of eight queries, of which four are read at the same
  // time; those of queries that do not exist are 0.
  __device__ __forceinline__ static void booleans(const Params& p, int group, int query, int key,
                                                  Tile& tile) {
    constexpr int kReads = 4;
    query += lane_of_thread() / 4;
    const uint8_t* pairs = pairs_of(p, group, query) + key + lane_of_thread() % 4 * 16;
    const int64_t step = 8 * static_cast<int64_t>(p.seqlen_kv);
    uint16_t* halves = reinterpret_cast<uint16_t*>(tile.words) + lane_of_thread();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint4 bytes[kReads];
#pragma unroll
      for (int i = 0; i < kReads; ++i, query += 8, pairs += step) {
        bytes[i] = {0, 0, 0, 0};
        if (query < p.seqlen_q) bytes[i] = __ldg(reinterpret_cast<const uint4*>(pairs));
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i, halves += kWarpSize)
        *halves = static_cast<uint16_t>(bits_of_bytes(bytes[i]));
    }
  }
};

// Writes the bits of a tile: in the order of accumulators, word i of this lane has rows 16 i + the
// quarter of the lane, and 8 more, and of each 8 columns those from `col` on, two of them.
struct Writer {
  int row = lane_of_thread() / 4, col = lane_of_thread() % 4 * 2;

  // Rows are queries.
  __device__ __forceinline__ void write(const Tile& tile, uint32_t* to) const {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 keys =
            *reinterpret_cast<const uint2*>(tile.words + 2 * (16 * i + 8 * half + row));
        // The products bring the two bits of each byte side by side; no two of their terms meet.
        const uint32_t low = (keys.x >> col & 0x03030303u) * 0x01041040u >> 24;
        const uint32_t high = (keys.y >> col & 0x03030303u) * 0x01041040u >> 24;
        word |= (low | high << 8) << 16 * half;
      }
      to[i * kWarpSize + lane_of_thread()] = word;
    }
  }

  // Rows are keys, and columns queries.
  __device__ __forceinline__ void write_transposed(const Tile& tile, uint32_t* to) const {
    // Of the lower and the upper keys, and of queries 0 to 31 and 32 to 63: a byte for each of four
    // keys that are 8 apart.
    uint32_t sums[2][2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 keys = *reinterpret_cast<const uint4*>(tile.words + 2 * (8 * i + col));
      const auto add = [&](uint32_t& sum, uint32_t word, int bit) {
        sum += (word >> row & 0x01010101u) << bit;
      };
      add(sums[0][i / 4], keys.x, i % 4 * 2);
      add(sums[1][i / 4], keys.y, i % 4 * 2);
      add(sums[0][i / 4], keys.z, i % 4 * 2 + 1);
      add(sums[1][i / 4], keys.w, i % 4 * 2 + 1);
    }
#pragma unroll
    for (int i = 0; i < kWarps; ++i)
      to[i * kWarpSize + lane_of_thread()] =
          __byte_perm(sums[i / 2][0], sums[i / 2][1], i % 2 == 0 ? 0x5140 : 0x7362);
  }
};

__device__ __forceinline__ void note(const Params& p, int64_t block, bool visited, int32_t first) {
  p.visited[block] = visited;
  p.first[block] = first;
}

// Tiles for a block, or -1 if there are none left.
__device__ __forceinline__ int32_t take_tiles(const Params& p, int count) {
  const int32_t first = atomicAdd(p.counter, count);
  // The counter has no more than the tiles of all blocks, which are fewer than 2^31, unless other
  // builds run at the same time: then it may be anything.
  return first < 0 || first > p.capacity - count || first % count != 0 ? -1 : first;
}

// Blocks are made by the CTA, tile by tile of a warp; where they are tiles, by a warp alone.
__device__ __forceinline__ void make_block(const Params& p, Shared& shared, int group, int row,
                                           int col) {
  const int down = p.block_q / kSide, across = p.block_kv / kSide, tiles = down * across;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const bool alone = tiles == 1;
  Tile* const own = shared.blocks.tiles + (alone ? warp : 0);
  Found found;
  for (int tile = alone ? 0 : warp; tile < tiles; tile += kWarps)
    found.tile(p, group, row * p.block_q + tile / across * kSide,
               col * p.block_kv + tile % across * kSide, own[tile]);
  const bool all = (alone ? __all_sync(kAllLanes, found.all) : __syncthreads_and(found.all)) != 0;
  const bool any = (alone ? __any_sync(kAllLanes, found.any) : __syncthreads_or(found.any)) != 0;
  const bool partial = any && !all;
  int32_t place = -1;
  if ((alone ? lane_of_thread() : static_cast<int>(threadIdx.x)) == 0) {
    if (partial) place = take_tiles(p, tiles);
    note(p, (int64_t{group} * p.rows + row) * p.cols + col, partial ? place >= 0 : any, place);
    // Others have read the place of the block before: they passed the barriers above.
    if (!alone) shared.blocks.place = place;
  }
  if (!partial) return;
  if (alone) {
    place = __shfl_sync(kAllLanes, place, 0);
  } else {
    __syncthreads();
    place = shared.blocks.place;
  }
  __syncwarp();  // each warp writes the tiles that it has read
  if (place < 0) return;
  const Writer writer;
  const auto at = [&](uint32_t* words, int tile) {
    return words + static_cast<int64_t>(place + tile) * kTileWords;
  };
  for (int tile = alone ? 0 : warp; tile < tiles; tile += kWarps) {
    writer.write(own[tile], at(p.bits, tile));
    // Rows of tiles become columns of tiles.
    const int turned = tile % across * down + tile / across;
    if (p.bits_t != nullptr) writer.write_transposed(own[tile], at(p.bits_t, turned));
  }
  __syncwarp();  // before the next block is read
}

__device__ __forceinline__ void classify(const Params& p, Shared& shared) {
  const unsigned chunks = static_cast<unsigned>(p.cols - 1) / p.cols_of_cta + 1;
  const int first = static_cast<int>(blockIdx.x % chunks) * p.cols_of_cta;
  const int count = min(p.cols - first, p.cols_of_cta);
  const int row = static_cast<int>(blockIdx.x / chunks % p.rows);
  const int group = static_cast<int>(blockIdx.x / chunks / p.rows);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  Sight sight = Sight::kSome;
  if (warp * kWarpSize < count && (p.source_kind != BLOCKFLASH_PAIRS_BOOL || is_bounded(p)))
    sight = glance(p, group, row, first + thread);
  if (thread < count && sight != Sight::kSome)
    note(p, (int64_t{group} * p.rows + row) * p.cols + first + thread, sight == Sight::kAll, -1);
  const uint32_t unsure = __ballot_sync(kAllLanes, thread < count && sight == Sight::kSome);
  if (lane_of_thread() == 0) shared.blocks.unsure[warp] = unsure;
  __syncthreads();
  const bool alone = p.block_q == kSide && p.block_kv == kSide;
  int turn = 0;
  for (int i = 0; i < kWarps; ++i)
    for (uint32_t left = shared.blocks.unsure[i]; left != 0; left &= left - 1)
      if (!alone || turn++ % kWarps == warp)
        make_block(p, shared, group, row,
                   first + i * kWarpSize + __ffs(static_cast<int>(left)) - 1);
}

// Links nodes of trees: to the ancestors in the same 64 nodes, and to the first ones outside.
__device__ __forceinline__ void link_nodes(const Params& p, Shared& shared) {
  Nodes& nodes = shared.nodes;
  const unsigned spans = static_cast<unsigned>(p.seqlen_q - 1) / kSpan + 1;
  const int start = static_cast<int>(blockIdx.x % spans) * kSpan;
  const int64_t batch = blockIdx.x / spans;
  const int count = min(p.seqlen_q - start, kSpan);
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t* const parents = static_cast<const int32_t*>(p.source) + batch * p.seqlen_q + start;
  for (int i = thread; i < kSpan; i += kThreads) {
    const int parent = i < count ? __ldg(parents + i) : -1;
    nodes.up[i] = parent >= 0 && parent < start + i ? parent : -1;
  }
  __syncthreads();
  // A thread has 64 nodes, in order: parents come before their children.
  if (lane_of_thread() < 4) {
    const int first = (thread / kWarpSize * 4 + lane_of_thread()) * kSide;
    for (int i = 0; i < kSide; ++i) {
      int up = nodes.up[first + i];
      uint64_t seen = uint64_t{1} << i;
      if (up >= start + first) seen |= nodes.seen[up - start], up = nodes.up[up - start];
      nodes.seen[first + i] = seen, nodes.up[first + i] = up;
    }
  }
  __syncthreads();
  int4* const jumps = reinterpret_cast<int4*>(p.jumps) + batch * p.seqlen_q + start;
  for (int i = thread; i < count; i += kThreads) {
    int skip = nodes.up[i];
    while (skip >= start) skip = nodes.up[skip - start];
    jumps[i] = {static_cast<int>(nodes.seen[i]), static_cast<int>(nodes.seen[i] >> 32), nodes.up[i],
                skip};
  }
}

// Looks up the first tile of each block of a row. Of the transposed lists, rows are block columns.
__device__ __forceinline__ void gather(const Params& p, bool transposed) {
  const int rows = transposed ? p.cols : p.rows, cols = transposed ? p.rows : p.cols;
  const unsigned index = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (index >= static_cast<unsigned>(p.batch) * p.heads * rows) return;
  if (index == 0 && threadIdx.x == 0) atomicMax(p.counter + 1, p.counter[0]);
  const unsigned group = index / rows;
  const int row = static_cast<int>(index % rows);
  const int32_t* const ends = p.row_ptr + index + group;  // a group has one entry more than rows
  for (int at = ends[0] + static_cast<int>(threadIdx.x) % kWarpSize; at < ends[1];
       at += kWarpSize) {
    const int col = p.col_idx[at];
    if (col >= cols) continue;  // half of another build
    const int of_head = transposed ? col * p.cols + row : row * p.cols + col;
    p.block_bits[at] = p.first[group * p.rows * p.cols + of_head];
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_block_bits_params p) {
  using namespace blockflash;
  __shared__ Shared shared;
  switch (p.step) {
    case BLOCKFLASH_BLOCK_BITS_JUMPS:
      return link_nodes(p, shared);
    case BLOCKFLASH_BLOCK_BITS_CLASSIFY:
      return classify(p, shared);
    default:
      return gather(p, p.step == BLOCKFLASH_BLOCK_BITS_GATHER_T);
  }
}

// Partial blocks of block masks, made on the GPU from pairs of tokens, for sm_80 and newer.
//
// The first launch classifies: a CTA has one block of a head, or neighbours in a row where the
// source is ranges. It reads which pairs of a block are visible, 64 × 64 at a time, as a bit per
// pair. A block without any is not visited; one with all pairs is full; any other takes tiles of
// bits from a counter and writes them, in the order in which accumulators hold scores, and
// transposed where a transpose is wanted. Where there is no room, the block is not visited: a pair
// that the source hides is never seen. The lists of visited blocks are built by block_mask_sm80.
// The last launch looks up, for each listed block, where its bits are.
//
// Which block gets which tiles depends on the order of CTAs; what attention computes does not.
#include "blockflash/config/block_bits.cuh"
#include "blockflash/params/block_bits.h"

namespace blockflash {
namespace {

using Params = blockflash_block_bits_params;
using Config = BlockBitsConfig;
constexpr int kSide = 64;        // queries and keys of a tile
constexpr int kTileWords = 128;  // words of its bits
constexpr int kThreads = Config::threads;
constexpr int kMaxTiles = Config::max_tiles;
static_assert(kThreads == kTileWords, "a thread has half a row of a tile, or a word of its bits");

// A tile as bits: two words of 32 keys for each query.
using Tile = uint32_t[2 * kSide];

// Bits [0, count), none below 0 and all from 32 on.
__device__ __forceinline__ uint32_t lowest_bits(int count) {
  return count <= 0 ? 0 : count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
}

// Four bytes as four bits, which are set where a byte is not 0.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) {
  // Each byte becomes 0 or 1. The product then brings them side by side; no two of its terms meet.
  const uint32_t ones = __vcmpne4(bytes, 0) & 0x01010101u;
  return ones * 0x01020408u >> 24 & 0xF;
}

// Which of 32 keys from `key` on a query sees. The query exists, and at least one of the keys.
__device__ __forceinline__ uint32_t visible_bool(const Params& p, int64_t row, int key) {
  const uint8_t* const pairs = static_cast<const uint8_t*>(p.source) + row * p.seqlen_kv + key;
  uint32_t bits = 0;
  if (key + 32 <= p.seqlen_kv && reinterpret_cast<uintptr_t>(pairs) % 16 == 0) {
    const uint4 low = __ldg(reinterpret_cast<const uint4*>(pairs));
    const uint4 high = __ldg(reinterpret_cast<const uint4*>(pairs) + 1);
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= bits_of_bytes(words[i]) << 4 * i;
    return bits;
  }
  const int count = min(32, p.seqlen_kv - key);
#pragma unroll 8
  for (int i = 0; i < count; ++i) bits |= static_cast<uint32_t>(pairs[i] != 0) << i;
  return bits;
}

__device__ __forceinline__ uint32_t visible_ranges(const Params& p, int64_t row, int key) {
  const int32_t* const ranges = static_cast<const int32_t*>(p.source) + row * p.ranges * 2;
  uint32_t bits = 0;
  for (int i = 0; i < p.ranges; ++i) {
    // Ends are cut to the keys before anything is subtracted from them.
    const int begin = max(ranges[2 * i], 0), end = max(min(ranges[2 * i + 1], p.seqlen_kv), 0);
    bits |= lowest_bits(end - key) & ~lowest_bits(begin - key);
  }
  return bits;
}

// The word of a tile's bits that this thread writes: in the order of accumulators, it has rows
// `row` and `row + 8`, and of each 8 columns those from `col` on, two of them.
struct Word {
  int row = static_cast<int>(threadIdx.x) / kWarpSize * 16 +
            static_cast<int>(threadIdx.x) % kWarpSize / 4;
  int col = static_cast<int>(threadIdx.x) % 4 * 2;

  // Rows are queries.
  __device__ __forceinline__ uint32_t of(const uint32_t* tile) const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pairs = tile[2 * (row + i / 2 * 8) + i % 2] >> col & 0x03030303u;
      // The product brings the two bits of each byte side by side; no two of its terms meet.
      word |= (pairs * 0x01041040u >> 24) << 8 * i;
    }
    return word;
  }

  // Rows are keys, and columns queries.
  __device__ __forceinline__ uint32_t transposed_of(const uint32_t* tile) const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t keys = tile[2 * (i / 2 * 8 + col + i % 2) + row / 32] >> row % 32;
      word |= ((keys & 1) | (keys << 8 & 0x10000)) << i;
    }
    return word;
  }
};

// Shared memory of the first step.
struct Shared {
  Tile tiles[kMaxTiles];
  int32_t place;
};

__device__ __forceinline__ void classify_block(const Params& p, Shared& shared, int64_t group,
                                               int row, int col) {
  const int down = p.block_q / kSide, across = p.block_kv / kSide;
  const auto each_tile = [&](auto visit) {
    for (int i = 0, tile = 0; i < down; ++i)
      for (int j = 0; j < across; ++j, ++tile) visit(tile, i, j);
  };
  bool all = true, any = false;
  each_tile([&](int tile, int i, int j) {
    const int query = row * p.block_q + i * kSide + static_cast<int>(threadIdx.x) / 2;
    const int key = col * p.block_kv + j * kSide + static_cast<int>(threadIdx.x) % 2 * 32;
    const uint32_t exist = query < p.seqlen_q ? lowest_bits(p.seqlen_kv - key) : 0;
    uint32_t bits = 0;
    if (exist != 0) {
      const int64_t at = group * p.seqlen_q + query;
      bits = p.source_kind == BLOCKFLASH_PAIRS_BOOL ? visible_bool(p, at, key)
                                                    : visible_ranges(p, at, key);
      bits &= exist;
    }
    shared.tiles[tile][threadIdx.x] = bits;
    all &= bits == exist;
    any |= bits != 0;
  });
  // Both are barriers: all threads have written their bits.
  all = __syncthreads_and(all) != 0;
  any = __syncthreads_or(any) != 0;
  const bool partial = any && !all;
  if (threadIdx.x == 0) {
    int32_t first = -1;
    bool visited = any;
    if (partial) {
      first = atomicAdd(p.counter, down * across);
      // The counter has no more than the tiles of all blocks, which are fewer than 2^31, unless
      // other builds run at the same time: then it may be anything.
      if (first < 0 || first > p.capacity - down * across || first % (down * across) != 0) {
        first = -1;
        visited = false;
      }
    }
    const int64_t block = (group * p.rows + row) * p.cols + col;
    p.visited[block] = visited;
    p.first[block] = first;
    shared.place = first;
  }
  if (!partial) return;
  __syncthreads();
  const int place = shared.place;
  const Word word;
  const auto at = [&](uint32_t* words, int tile) -> uint32_t& {
    return words[static_cast<int64_t>(place + tile) * kTileWords + threadIdx.x];
  };
  if (place >= 0) {
    each_tile([&](int tile, int i, int j) {
      at(p.bits, tile) = word.of(shared.tiles[tile]);
      // Rows of tiles become columns of tiles.
      if (p.bits_t != nullptr) at(p.bits_t, j * down + i) = word.transposed_of(shared.tiles[tile]);
    });
  }
  __syncthreads();  // before the next block is written
}

__device__ __forceinline__ void classify(const Params& p) {
  __shared__ Shared shared;
  // Ranges are read again for each block, from the cache for neighbours.
  const int count = p.source_kind == BLOCKFLASH_PAIRS_BOOL ? 1 : Config::range_cols;
  const unsigned chunks = static_cast<unsigned>(p.cols - 1) / count + 1;
  const int first = static_cast<int>(blockIdx.x % chunks) * count;
  const int row = static_cast<int>(blockIdx.x / chunks % p.rows);
  const int64_t group = blockIdx.x / chunks / p.rows;
  for (int col = first; col < min(first + count, p.cols); ++col)
    classify_block(p, shared, group, row, col);
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
  if (p.step == BLOCKFLASH_BLOCK_BITS_CLASSIFY)
    classify(p);
  else
    gather(p, p.step == BLOCKFLASH_BLOCK_BITS_GATHER_T);
}

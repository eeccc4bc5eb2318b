// Two block rows of a head in one CTA, each with a list of key tiles of its own. They are
// neighbours in the order of lengths, and where lists are equally long in the tensor as well.
//
// A step of the pipeline has two key tiles, for one of the rows or for both. Steps for the first
// and for the second row alternate, then come those that both rows visit, and the last one of the
// second row ends the query tile, so that the rows change to the next tile one after the other.
// What the longer list has beyond that comes before everything. The scheduler writes the steps into
// a ring in shared memory before the producer begins with them, so all other warps just read them.
#pragma once

#include "blockflash/attention/visible.cuh"
#include "query_tiles.cuh"

namespace blockflash {

// Two key tiles that are loaded together. The second one may be missing; the first one is then
// loaded twice and masked.
struct KeyStep {
  // In 16 bits for each key tile: its number, for which rows it has a mask, and which rows visit
  // it.
  static constexpr int kTileBits = 11, kMaskedBit = kTileBits, kRowsBit = kTileBits + 2;
  uint32_t bits;

  __device__ __forceinline__ int tile(int half) const {
    return bits >> (16 * half) & ((1 << kTileBits) - 1);
  }
  __device__ __forceinline__ bool has_second() const { return bits >> (16 + kRowsBit) != 0; }
  // 1 or 2: for the first or for the second row alone; 3: for both.
  __device__ __forceinline__ int rows() const { return bits >> kRowsBit & 3; }
  __device__ __forceinline__ bool is_for(int row) const { return bits >> (kRowsBit + row) & 1; }
  __device__ __forceinline__ bool is_masked(int row) const {
    return (bits | bits >> 16) >> (kMaskedBit + row) & 1;
  }
  __device__ __forceinline__ bool is_masked() const {
    return (bits | bits >> 16) & 3 << kMaskedBit;
  }
  // A bit per key of a lane whose first column this is, as from visible_keys: the first key tile in
  // the lower half, the second one in the upper half.
  __device__ __forceinline__ uint32_t visible(const KeyRange& keys, int column) const {
    const int first = tile(0) * 64 + column, second = (tile(1) - 1) * 64 + column;
    return (visible_keys(keys.begin - first, keys.end - first) & 0xFFFF) |
           (has_second() ? visible_keys(keys.begin - second, keys.end - second) & 0xFFFF0000 : 0);
  }
};

// The ring of steps and, for the scheduler, a bit per key tile and row.
struct StepRing {
  // A query tile has at most half as many steps as there are key tiles, and three.
  static constexpr int kTiles = 1 << KeyStep::kTileBits, kSteps = 2048,
                       kBytes = 4 * kSteps + kTiles / 4;
  uint32_t smem;

  __device__ __forceinline__ uint32_t at(int position) const {
    return smem + (position & (kSteps - 1)) * 4;
  }
  __device__ __forceinline__ KeyStep step(int position) const {
    return {ptx::load_shared(at(position))};
  }
  __device__ __forceinline__ uint32_t bits(int row) const {
    return smem + 4 * kSteps + kTiles / 8 * row;
  }
};

// The key tiles from `begin` to `end` that 64 bits have; their first one is `first`.
__device__ __forceinline__ uint64_t bits_between(int begin, int end, int first) {
  const auto below = [](int n) {
    return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  };
  return below(end - first) & ~below(begin - first);
}

// Marks the key tiles of a list in the ring's bits of a row. The even lanes of a warp do this for
// one row while the odd ones do it for the other.
__device__ __forceinline__ void mark_tiles(const TileList& list, uint32_t bits) {
#pragma unroll 2
  for (int i = threadIdx.x % 32 / 2; i < list.count; i += 16) {
    int key_tile = list.cols[i] * list.tiles_per_col;
    for (int left = list.tiles_per_col; left > 0; --left, ++key_tile)
      if (key_tile >= 0 && key_tile < StepRing::kTiles)
        ptx::or_shared(bits + key_tile / 32 * 4, 1u << key_tile % 32);
  }
}

// Up to 2048 bits of which each lane of a warp has 64, and how many are set up to its last one.
struct LaneBits {
  uint64_t bits;
  int until;

  static __device__ __forceinline__ LaneBits of(uint64_t bits) {
    int until = __popcll(bits);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, until, distance);
      if (static_cast<int>(threadIdx.x % 32) >= distance) until += before;
    }
    return {bits, until};
  }

  // Where the bit is that has `rank` set ones below it. Each lane may ask for another one.
  __device__ __forceinline__ int find(int rank) const {
    int lane = 0;  // the first one with more
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      if (__shfl_sync(~0u, until, lane + step - 1) <= rank) lane += step;
    const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(bits), lane),
                   high = __shfl_sync(~0u, static_cast<uint32_t>(bits >> 32), lane);
    int left = rank - __shfl_sync(~0u, until - __popcll(bits), lane), at = 64 * lane;
    uint32_t word = low;
    if (left >= __popc(low)) left -= __popc(low), word = high, at += 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const int below = __popc(word & ((1u << step) - 1));
      if (left >= below) left -= below, word >>= step, at += step;
    }
    return at;
  }
};

// Where the steps of a query tile are, by the number of key tiles of each kind: for the first row,
// for the second one, and for both.
struct StepOrder {
  int key_tiles[3];

  __device__ __forceinline__ int steps(int kind) const { return (key_tiles[kind] + 1) / 2; }
  // Steps for the first and for the second row alternate; the longer list has more.
  __device__ __forceinline__ int rounds() const { return min(steps(0), steps(1)); }
  __device__ __forceinline__ int more() const { return max(steps(0), steps(1)) - rounds(); }
  __device__ __forceinline__ int all() const { return steps(2) + 2 * rounds() + more(); }
  // The place of the step-th one of a kind, from the last one that is taken.
  __device__ __forceinline__ int place(int kind, int step) const {
    if (kind == 2) return step + (rounds() > 0);
    if (step >= rounds()) return steps(2) + rounds() + step;
    if (kind == 0) return steps(2) + 2 * step + 1;
    return step > 0 ? steps(2) + 2 * step : 0;
  }
};

// Writes the steps of a query tile into the ring, below `end`, and the walks of both rows; returns
// the number of steps. An even lane has the first row of the tile, an odd one the second.
__device__ __forceinline__ int write_steps(const blockflash_attention_fwd_params& p,
                                           const QueryTile& tile, const StepRing& ring, int end,
                                           uint32_t walks) {
  const int lane = threadIdx.x % 32;
  const KeyLimits own = KeyLimits::of<64>(p, tile, 0, 64);
  const TileList list = own.begin < own.end
                            ? TileList::of(p.block_mask, 64, tile.batch, tile.head, tile.q_begin)
                            : TileList{nullptr, 0, 1};
  ptx::store_shared_int4(ring.bits(0) + lane * 16, make_int4(0, 0, 0, 0));
  __syncwarp();
  mark_tiles(list, ring.bits(lane % 2));
  __syncwarp();
  KeyLimits limits[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const auto of_row = [&](int x) { return __shfl_sync(~0u, x, row); };
    limits[row] = {of_row(own.begin), of_row(own.end), of_row(own.unmasked_begin),
                   of_row(own.unmasked_end)};
  }
  uint64_t visited[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t at = ring.bits(row) + 8 * lane;
    const uint64_t listed =
        static_cast<uint64_t>(ptx::load_shared(at + 4)) << 32 | ptx::load_shared(at);
    visited[row] = (p.block_mask.row_ptr != nullptr ? listed : ~uint64_t{0}) &
                   bits_between(limits[row].begin, limits[row].end, 64 * lane);
  }
  uint64_t both = visited[0] & visited[1], only[2] = {visited[0] & ~both, visited[1] & ~both};
  const auto total = [](uint64_t bits) { return __reduce_add_sync(~0u, __popcll(bits)); };
  StepOrder order = {{static_cast<int>(total(only[0])), static_cast<int>(total(only[1])),
                      static_cast<int>(total(both))}};
  // Where an odd number would leave several steps with one key tile, one that both rows visit is
  // loaded for each of them.
  if (order.key_tiles[2] % 2 != 0 && (order.key_tiles[0] % 2 != 0 || order.key_tiles[1] % 2 != 0)) {
    if (lane == 31 - __clz(__ballot_sync(~0u, both != 0))) {
      const uint64_t last = uint64_t{1} << (63 - __clzll(both));
      only[0] |= last, only[1] |= last, both &= ~last;
    }
    ++order.key_tiles[0], ++order.key_tiles[1], --order.key_tiles[2];
  }
  const int all = order.all();
#pragma unroll 1
  for (int kind = 0; kind < 3; ++kind) {
    const LaneBits bits = LaneBits::of(kind == 0 ? only[0] : kind == 1 ? only[1] : both);
    const int key_tiles = kind == 0   ? order.key_tiles[0]
                          : kind == 1 ? order.key_tiles[1]
                                      : order.key_tiles[2];
#pragma unroll 1
    for (int first = 0; first < key_tiles; first += 32) {
      const int rank = first + lane, key_tile = bits.find(rank);
      if (rank >= key_tiles) break;
      uint32_t masked = 0;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        if (key_tile < limits[row].unmasked_begin || key_tile >= limits[row].unmasked_end)
          masked |= 1u << row;
      const uint32_t at = ring.at(end - all + order.place(kind, rank / 2)), rows = kind + 1;
      ptx::store_shared_u16(at + 2 * (rank % 2),
                            key_tile | masked << KeyStep::kMaskedBit | rows << KeyStep::kRowsBit);
      if (rank % 2 == 0 && rank + 1 == key_tiles)
        ptx::store_shared_u16(at + 2, key_tile | 3u << KeyStep::kMaskedBit);
    }
  }
  if (lane < 2) {
    // The row with fewer steps waits while the other one begins.
    const bool waits = (lane == 0 ? order.steps(0) : order.steps(1)) == order.rounds();
    const int lead = waits ? order.more() : 0;
    ptx::store_shared_int4(walks + 16 * lane, make_int4(all - lead, lead, 0, 0));
  }
  return all;
}

}  // namespace blockflash

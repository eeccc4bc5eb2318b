// Two block rows of a head in one CTA, each with a list of key tiles of its own. They are
// neighbours in the order of lengths, and where lists are equally long in the tensor as well.
//
// A step of the pipeline has two key tiles, for one of the rows or for both. Steps for the first
// and for the second row take turns, then come those that both rows visit, and the last one of the
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
                       kBytes = 4 * kSteps + kTiles / 4 + 16;
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

// The lowest n of 64 bits; none below 0, all from 64 on.
__device__ __forceinline__ uint64_t lowest(int n) {
  return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// Marks the key tiles of a list in the ring's bits of a row; a whole warp works here.
__device__ __forceinline__ void mark_tiles(const TileList& list, uint32_t bits) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int i = lane; i < list.count; i += 32) {
    int key_tile = list.cols[i] * list.tiles_per_col;
    for (int left = list.tiles_per_col; left > 0; --left, ++key_tile)
      if (key_tile >= 0 && key_tile < StepRing::kTiles)
        ptx::or_shared(bits + key_tile / 32 * 4, 1u << key_tile % 32);
  }
}

// Of `span` key tiles from `first` on, at most 64: those that a row visits, and those that need no
// mask.
struct VisitedTiles {
  uint64_t visited, unmasked;

  static __device__ __forceinline__ VisitedTiles of(const blockflash_attention_fwd_params& p,
                                                    const KeyLimits& limits, uint32_t bits,
                                                    int first, int span) {
    uint64_t visited = ~uint64_t{0};
    if (p.block_mask.row_ptr != nullptr) {
      const uint32_t at = bits + first / 32 * 4, middle = ptx::load_shared(at + 4);
      visited = static_cast<uint64_t>(__funnelshift_r(middle, ptx::load_shared(at + 8),
                                                      static_cast<unsigned>(first % 32)))
                    << 32 |
                __funnelshift_r(ptx::load_shared(at), middle, static_cast<unsigned>(first % 32));
    }
    return {visited & lowest(min(limits.end - first, span)) & ~lowest(limits.begin - first),
            lowest(limits.unmasked_end - first) & ~lowest(limits.unmasked_begin - first)};
  }
};

// Writes the steps of a query tile into the ring, below `end`, and the walks of both rows; returns
// the number of steps. An even lane has the first row of the tile, an odd one the second.
__device__ __forceinline__ int write_steps(const blockflash_attention_fwd_params& p,
                                           const QueryTile& tile, const StepRing& ring, int end,
                                           uint32_t walks) {
  const int lane = threadIdx.x % 32;
  const auto limits_of = [&](int row) {
    QueryTile its = tile;
    its.q_begin = __shfl_sync(~0u, tile.q_begin, row);
    return KeyLimits::of<64>(p, its, 0, 64);
  };
  const KeyLimits limits[2] = {limits_of(0), limits_of(1)};
  const auto list_of = [&](int row) {
    const int q_begin = __shfl_sync(~0u, tile.q_begin, row);
    return limits[row].begin < limits[row].end
               ? TileList::of(p.block_mask, 64, tile.batch, tile.head, q_begin)
               : TileList{nullptr, 0, 1};
  };
  const TileList lists[2] = {list_of(0), list_of(1)};
  ptx::store_shared_int4(ring.bits(0) + lane * 16, make_int4(0, 0, 0, 0));
  __syncwarp();
  mark_tiles(lists[0], ring.bits(0)), mark_tiles(lists[1], ring.bits(1));
  __syncwarp();
  // Each lane has neighbouring key tiles.
  const int span = min((max(limits[0].end, limits[1].end) + 31) / 32, 64),
            lowest_tile = lane * span;
  const VisitedTiles a = VisitedTiles::of(p, limits[0], ring.bits(0), lowest_tile, span),
                     b = VisitedTiles::of(p, limits[1], ring.bits(1), lowest_tile, span);
  // Key tiles of row 0 only, of row 1 only, and of both.
  uint64_t tiles[3] = {a.visited & ~b.visited, b.visited & ~a.visited, a.visited & b.visited};
  const auto total = [&](int kind) {
    return static_cast<int>(__reduce_add_sync(~0u, __popcll(tiles[kind])));
  };
  int count[3] = {total(0), total(1), total(2)};
  // Where an odd number would leave several steps with one key tile, one that both rows visit is
  // loaded for each of them.
  if (count[2] % 2 != 0 && (count[0] % 2 != 0 || count[1] % 2 != 0)) {
    const unsigned holders = __ballot_sync(~0u, tiles[2] != 0);
    if (lane == 31 - __clz(holders)) {
      const uint64_t last = uint64_t{1} << (63 - __clzll(tiles[2]));
      tiles[0] |= last, tiles[1] |= last, tiles[2] &= ~last;
    }
    ++count[0], ++count[1], --count[2];
  }
  const int steps[3] = {(count[0] + 1) / 2, (count[1] + 1) / 2, (count[2] + 1) / 2};
  const int rounds = min(steps[0], steps[1]), more = max(steps[0], steps[1]) - rounds,
            all = steps[2] + 2 * rounds + more;
#pragma unroll 1
  for (int kind = 0; kind < 3; ++kind) {
    uint64_t rest = kind == 0 ? tiles[0] : kind == 1 ? tiles[1] : tiles[2];
    const int last = (kind == 0   ? count[0]
                      : kind == 1 ? count[1]
                                  : count[2]) -
                     1,
              rows = kind == 2 ? 3 : 1 << kind;
    const int own = __popcll(rest);
    int rank = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, rank, distance);
      if (lane >= distance) rank += before;
    }
    rank -= own;
    for (; rest != 0; rest &= rest - 1, ++rank) {
      const int bit = __ffsll(static_cast<long long>(rest)) - 1, step = rank / 2;
      const int place = kind == 2        ? step + (rounds > 0)
                        : step >= rounds ? steps[2] + rounds + step
                        : kind == 0      ? steps[2] + 2 * step + 1
                        : step > 0       ? steps[2] + 2 * step
                                         : 0;
      const uint32_t masked = static_cast<uint32_t>(~a.unmasked >> bit & 1) |
                              static_cast<uint32_t>(~b.unmasked >> bit & 1) << 1;
      const uint32_t half =
          (lowest_tile + bit) | masked << KeyStep::kMaskedBit | rows << KeyStep::kRowsBit;
      const uint32_t at = ring.at(end - all + place) + rank % 2 * 2;
      ptx::store_shared_u16(at, half);
      if (rank == last && rank % 2 == 0)
        ptx::store_shared_u16(at + 2, (lowest_tile + bit) | 3u << KeyStep::kMaskedBit);
    }
  }
  if (lane < 2) {
    const bool waits = (lane == 0 ? steps[0] : steps[1]) == rounds;
    const int lead = waits ? more : 0;
    ptx::store_shared_int4(walks + 16 * lane, make_int4(all - lead, lead, 0, 0));
  }
  return all;
}

}  // namespace blockflash

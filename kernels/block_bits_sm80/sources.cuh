// The pairs that sources show: 32 keys of a query at a time, and what is known of the blocks of a
// row before any pair is computed.
#pragma once

#include "blockflash/config/block_bits.cuh"
#include "blockflash/params/block_bits.h"

namespace blockflash {
namespace {

using Params = blockflash_block_bits_params;
constexpr int kSide = 64;    // queries and keys of a tile
constexpr int kSpan = 1024;  // nodes of a tree that are jumped over at once
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Bits [0, count), none below 0 and all from 32 on.
__device__ __forceinline__ uint32_t lowest_bits(int count) {
  return count <= 0 ? 0 : count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
}

// Keys [begin, end), without any where end <= begin.
struct Keys {
  int begin, end;

  // Those of 32 keys from `key` on. Ends are from 0 to the number of keys.
  __device__ __forceinline__ uint32_t from(int key) const {
    return lowest_bits(end - key) & ~lowest_bits(begin - key);
  }
};

__device__ __forceinline__ bool is_bounded(const Params& p) {
  return p.within.left != BLOCKFLASH_WINDOW_UNBOUNDED ||
         p.within.right != BLOCKFLASH_WINDOW_UNBOUNDED;
}

// The keys of a query in the window. Lengths and sides are at most 2^30.
__device__ __forceinline__ Keys window_of(const Params& p, int query) {
  Keys keys{0, p.seqlen_kv};
  if (!is_bounded(p)) return keys;
  const int at = query + (p.within.align_bottom_right ? p.seqlen_kv - p.seqlen_q : 0);
  if (p.within.left != BLOCKFLASH_WINDOW_UNBOUNDED)
    keys.begin = min(max(at - p.within.left, 0), p.seqlen_kv);
  if (p.within.right != BLOCKFLASH_WINDOW_UNBOUNDED)
    keys.end = min(max(at + p.within.right + 1, 0), p.seqlen_kv);
  return keys;
}

__device__ __forceinline__ Keys range_of(const Params& p, int group, int query, int range) {
  const int32_t* const ends = static_cast<const int32_t*>(p.source) +
                              ((int64_t{group} * p.seqlen_q + query) * p.ranges + range) * 2;
  // Ends are cut to the keys before anything is subtracted from them.
  return {max(__ldg(ends), 0), max(min(__ldg(ends + 1), p.seqlen_kv), 0)};
}

// The positions along an axis that one of its positions sees: `count` of them, `step` apart.
struct Near {
  int first, count, step;

  __device__ __forceinline__ Near(const Params& p, int axis, int at) {
    count = p.window[axis], step = p.dilation[axis];
    const int size = p.grid[axis];
    if (step == 1) {
      first = min(max(at - count / 2, 0), size - count);
      return;
    }
    const int start = at % step, own = at / step;
    const int all = (size - start + step - 1) / step;
    first = start + min(max(own - count / 2, 0), all - count) * step;
  }

  __device__ __forceinline__ bool contains(int at) const {
    const int distance = at - first;
    return distance >= 0 && distance < count * step && (step == 1 || distance % step == 0);
  }

  // Bits of the positions, where position 0 is that many bits from the lowest one.
  __device__ __forceinline__ uint32_t bits(int from) const {
    const int begin = from + first;
    if (step == 1) return lowest_bits(begin + count) & ~lowest_bits(begin);
    uint32_t bits = 0;
    int i = begin >= 0 ? 0 : (step - 1 - begin) / step;
    for (int at = begin + i * step; i < count && at < 32; ++i, at += step) bits |= 1u << at;
    return bits;
  }
};

// Keys per position of the first axis of a grid.
__device__ __forceinline__ int first_stride(const Params& p) {
  return static_cast<int>(static_cast<unsigned>(p.seqlen_kv) / static_cast<unsigned>(p.grid[0]));
}

// Four bytes, as 128 where a byte is not 0, and else 0.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t bytes) {
  return ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | bytes) & 0x80808080u;
}

// Sixteen bytes as bits, which are set where a byte is not 0.
__device__ __forceinline__ uint32_t bits_of_bytes(const uint4& bytes) {
  const auto eight = [](uint32_t low, uint32_t high) {
    return __dp4a(nonzero_bytes(high), 0x80402010u, __dp4a(nonzero_bytes(low), 0x08040201u, 0u));
  };
  return eight(bytes.x, bytes.y) >> 7 | eight(bytes.z, bytes.w) << 1;
}

__device__ __forceinline__ const uint8_t* pairs_of(const Params& p, int group, int query) {
  return static_cast<const uint8_t*>(p.source) +
         (int64_t{group} * p.seqlen_q + query) * p.seqlen_kv;
}

__device__ __forceinline__ uint32_t visible_bool(const Params& p, int group, int query, int key) {
  const uint8_t* const pairs = pairs_of(p, group, query) + key;
  const int count = min(32, p.seqlen_kv - key);
  uint32_t bits = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) bits |= static_cast<uint32_t>(pairs[i] != 0) << i;
  return bits;
}

__device__ __forceinline__ uint32_t visible_ranges(const Params& p, int group, int query, int key) {
  uint32_t bits = 0;
  for (int i = 0; i < p.ranges; ++i) bits |= range_of(p, group, query, i).from(key);
  return bits;
}

__device__ __forceinline__ uint32_t visible_document(const Params& p, int batch, int query,
                                                     int key) {
  const int id = __ldg(static_cast<const int32_t*>(p.source) + int64_t{batch} * p.seqlen_q + query);
  if (id < 0) return 0;
  const int32_t* const ids = p.ids_kv + int64_t{batch} * p.seqlen_kv + key;
  uint32_t bits = 0;
  if (key + 32 <= p.seqlen_kv && reinterpret_cast<uintptr_t>(ids) % 16 == 0) {
#pragma unroll 4
    for (int i = 0; i < 8; ++i) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(ids) + i);
      bits |= (four.x == id ? 1u : 0u) << 4 * i | (four.y == id ? 2u : 0u) << 4 * i |
              (four.z == id ? 4u : 0u) << 4 * i | (four.w == id ? 8u : 0u) << 4 * i;
    }
    return bits;
  }
  const int count = min(32, p.seqlen_kv - key);
  for (int i = 0; i < count; ++i) bits |= (__ldg(ids + i) == id ? 1u : 0u) << i;
  return bits;
}

// The keys before those of the nodes, and of these the node and its ancestors. A jump from a node
// leads to a lower one, so the loop ends whatever the parents were.
__device__ __forceinline__ uint32_t visible_tree(const Params& p, int batch, int query, int key) {
  const int before = p.seqlen_kv - p.seqlen_q;
  uint32_t bits = lowest_bits(before - key);
  const int begin = key - before, end = begin + 32;  // nodes, perhaps below 0
  const int4* const jumps = reinterpret_cast<const int4*>(p.jumps) + int64_t{batch} * p.seqlen_q;
  for (int node = query; node >= max(begin, 0);) {
    const int4 jump = jumps[node];
    const int block = node - node % kSide;
    if (block < end) {
      const uint64_t seen = static_cast<uint64_t>(static_cast<uint32_t>(jump.y)) << 32 |
                            static_cast<uint32_t>(jump.x);
      const int from = block - begin;  // more than -64
      bits |= static_cast<uint32_t>(from >= 0 ? seen << from : seen >> -from);
    }
    node = node - node % kSpan >= end ? jump.w : jump.z;
  }
  return bits;
}

__device__ __forceinline__ uint32_t visible_strided(const Params& p, int query, int key) {
  // The first key from `key` on that is a multiple of the stride away.
  const int away = (query + p.diagonal - key) % p.stride;
  uint32_t bits = 0;
  for (int at = away < 0 ? away + p.stride : away; at < 32; at += p.stride) bits |= 1u << at;
  return bits;
}

__device__ __forceinline__ uint32_t visible_neighborhood(const Params& p, int query, int key) {
  const int last = p.axes - 1;
  const unsigned size = p.grid[last];
  const unsigned line = static_cast<unsigned>(query) / size;
  const Near near(p, last, static_cast<int>(query - line * size));
  unsigned other = static_cast<unsigned>(key) / size;
  uint32_t bits = 0;
  // Lines of the grid along its last axis that begin before key 32.
  for (int from = static_cast<int>(other * size) - key; from < 32; from += size, ++other) {
    bool shown = true;
    unsigned own = line, rest = other;
    for (int axis = last - 1; axis >= 0; --axis) {
      const unsigned length = p.grid[axis];
      shown &= Near(p, axis, own % length).contains(rest % length);
      own /= length, rest /= length;
    }
    if (shown) bits |= near.bits(from);
  }
  return bits;
}

// Which of 32 keys from `key` on a query sees in the window. The query exists, and at least one of
// the keys; bits of others mean nothing.
__device__ __forceinline__ uint32_t visible(const Params& p, int group, int query, int key) {
  const uint32_t within = window_of(p, query).from(key);
  if (within == 0) return 0;
  const int batch = group / p.heads;
  switch (p.source_kind) {
    case BLOCKFLASH_PAIRS_BOOL:
      return within & visible_bool(p, group, query, key);
    case BLOCKFLASH_PAIRS_RANGES:
      return within & visible_ranges(p, group, query, key);
    case BLOCKFLASH_PAIRS_DOCUMENTS:
      return within & visible_document(p, batch, query, key);
    case BLOCKFLASH_PAIRS_TREE:
      return within & visible_tree(p, batch, query, key);
    case BLOCKFLASH_PAIRS_STRIDED:
      return within & visible_strided(p, query, key);
    default:
      return within & visible_neighborhood(p, query, key);
  }
}

// What is known of a block.
enum class Sight { kNone, kAll, kSome };

// The number of ranges that hold all keys that a query sees.
__device__ __forceinline__ int hulls(const Params& p) {
  return p.source_kind == BLOCKFLASH_PAIRS_RANGES ? p.ranges
         : p.source_kind == BLOCKFLASH_PAIRS_TREE ? 2
                                                  : 1;
}

// Whether a query sees all keys of such a range.
__device__ __forceinline__ bool is_solid(const Params& p, int hull) {
  switch (p.source_kind) {
    case BLOCKFLASH_PAIRS_RANGES:
      return true;
    case BLOCKFLASH_PAIRS_TREE:
      return hull == 0;
    case BLOCKFLASH_PAIRS_STRIDED:
      return p.stride == 1;
    case BLOCKFLASH_PAIRS_NEIGHBORHOOD:
      return p.axes == 1 && p.dilation[0] == 1;
    default:
      return false;
  }
}

__device__ __forceinline__ Keys hull_of(const Params& p, int group, int query, int hull) {
  const Keys window = window_of(p, query);
  Keys keys = window;
  if (p.source_kind == BLOCKFLASH_PAIRS_RANGES) {
    keys = range_of(p, group, query, hull);
  } else if (p.source_kind == BLOCKFLASH_PAIRS_TREE) {
    const int before = p.seqlen_kv - p.seqlen_q;
    keys = hull == 0 ? Keys{0, before} : Keys{before, before + query + 1};
  } else if (p.source_kind == BLOCKFLASH_PAIRS_NEIGHBORHOOD) {
    const int stride = first_stride(p);
    const Near near(p, 0, query / stride);
    keys = {near.first * stride, (near.first + (near.count - 1) * near.step + 1) * stride};
  }
  return {max(keys.begin, window.begin), min(keys.end, window.end)};
}

// The ids of some tokens: the lowest and the highest that is not negative, and whether one is.
struct Ids {
  unsigned low;
  int high;
  bool padded;

  __device__ __forceinline__ Ids(const int32_t* ids, int count) {
    unsigned low_of_lane = 0xFFFFFFFFu;
    int high_of_lane = -1;
    bool any = false;
    for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < count; i += kWarpSize) {
      const int id = __ldg(ids + i);
      low_of_lane = min(low_of_lane, static_cast<unsigned>(id));
      high_of_lane = max(high_of_lane, id);
      any |= id < 0;
    }
    low = __reduce_min_sync(kAllLanes, low_of_lane);
    high = __reduce_max_sync(kAllLanes, high_of_lane);
    padded = __any_sync(kAllLanes, any) != 0;
  }

  __device__ __forceinline__ Sight seen_by(const Ids& queries, bool covered) const {
    if (high < 0 || queries.high < 0) return Sight::kNone;
    if (static_cast<unsigned>(high) < queries.low || static_cast<unsigned>(queries.high) < low)
      return Sight::kNone;
    const bool alike = low == static_cast<unsigned>(high) && queries.low == low &&
                       queries.high == high && !padded && !queries.padded;
    return alike && covered ? Sight::kAll : Sight::kSome;
  }
};

// What is known of a block of the row: each lane has another column. All lanes of a warp call this.
__device__ __forceinline__ Sight glance(const Params& p, int group, int row, int col) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first = row * p.block_q, last = min(p.seqlen_q - first, p.block_q) + first;
  col = min(col, p.cols - 1);
  const int begin = col * p.block_kv, end = min(p.seqlen_kv - begin, p.block_kv) + begin;
  bool none = true, all = false, covered = false;
  for (int hull = 0; hull < hulls(p); ++hull) {
    Keys outer{p.seqlen_kv, 0}, inner{0, p.seqlen_kv};
    for (int query = first + lane; query < last; query += kWarpSize) {
      const Keys keys = hull_of(p, group, query, hull);
      if (keys.begin < keys.end) outer = {min(outer.begin, keys.begin), max(outer.end, keys.end)};
      inner = {max(inner.begin, keys.begin), min(inner.end, keys.end)};
    }
    outer = {__reduce_min_sync(kAllLanes, outer.begin), __reduce_max_sync(kAllLanes, outer.end)};
    inner = {__reduce_max_sync(kAllLanes, inner.begin), __reduce_min_sync(kAllLanes, inner.end)};
    none &= outer.end <= begin || end <= outer.begin;
    covered = inner.begin <= begin && end <= inner.end;
    all |= covered && is_solid(p, hull);
  }
  Sight sight = none ? Sight::kNone : all ? Sight::kAll : Sight::kSome;
  if (p.source_kind != BLOCKFLASH_PAIRS_DOCUMENTS) return sight;
  const int batch = group / p.heads;
  const Ids queries(static_cast<const int32_t*>(p.source) + int64_t{batch} * p.seqlen_q + first,
                    last - first);
  uint32_t left = __ballot_sync(kAllLanes, sight == Sight::kSome);
  for (; left != 0; left &= left - 1) {
    const int turn = __ffs(static_cast<int>(left)) - 1;
    const int key = __shfl_sync(kAllLanes, begin, turn),
              count = __shfl_sync(kAllLanes, end, turn) - key;
    const Ids keys(p.ids_kv + int64_t{batch} * p.seqlen_kv + key, count);
    if (lane == turn) sight = keys.seen_by(queries, covered);
  }
  return sight;
}

}  // namespace
}  // namespace blockflash

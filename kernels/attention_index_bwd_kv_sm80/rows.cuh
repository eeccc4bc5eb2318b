// The rows that visit a tile of keys: pairs of a visit and of a head of its unit, and their tables
// and copies in shared memory.
#pragma once

#include "blockflash/attention/gradient.cuh"
#include "blockflash/attention/index_visits.cuh"
#include "blockflash/config/attention_index_bwd.cuh"
#include "blockflash/mma/tile_copy.cuh"
#include "blockflash/ptx/shared.cuh"
#include "blockflash/quotient.cuh"

namespace blockflash {
namespace {

using Params = blockflash_attention_index_bwd_params;
using Config = AttentionBwdKvConfig;
using Element = Config::Element;

constexpr int kRows = Config::block_q;  // of a step of the main loop
constexpr int kChunks = Config::head_dim / 8;
constexpr int kTableBytes = kRows * 8;
constexpr int kStatisticsBytes = kRows * 4;
constexpr int kTableWarps = (kRows + kWarpSize - 1) / kWarpSize;

// What a CTA computes: an item for one tile of the keys of its bin and one key head. One thread
// reads what is on the device for all, since others might read something else.
struct Work {
  int head_kv, set;
  int bin, part;        // of the item
  int rows;             // of all its visits
  int tile;             // of the bin
  int64_t first_visit;  // among those of all sets
  int64_t first_row;    // among the rows of the key head
  int first_key;        // of the tile, in its sequence
  int first_key_of_bin;
  IndexedSequence sequence;

  Work() = default;
  __device__ __forceinline__ explicit Work(const Params& p) {
    const int tiles = (1 << bin_width_log2(p)) / Config::block_kv;
    int rest = blockIdx.x;
    tile = rest % tiles, rest /= tiles;
    const int index = rest % p.max_items;
    head_kv = rest / p.max_items;
    set = set_of_head(p, head_kv);
    const int4 item =
        *reinterpret_cast<const int4*>(p.items + static_cast<int64_t>(set) * p.max_items + index);
    bin = item.x, part = item.w;
    if (bin < 0) return;
    const int64_t entries = entries_of_set(p);
    first_visit = set * entries + item.y;
    first_row = static_cast<int64_t>(item.y) * p.group;
    rows = item.z * p.group;
    sequence = IndexedSequence::of_bin(p, bin);
    first_key_of_bin = (bin - sequence.first_bin) << bin_width_log2(p);
    first_key = first_key_of_bin + tile * Config::block_kv;
  }

  static __device__ __forceinline__ Work& shared() {
    __shared__ __align__(16) unsigned char bytes[sizeof(Work)];
    return reinterpret_cast<Work&>(bytes);
  }
  static __device__ __forceinline__ const Work& agreed(const Params& p) {
    if (threadIdx.x == 0) shared() = Work(p);
    __syncthreads();
    return shared();
  }
};

// A row of a tile, in 8 bytes of shared memory: its query in its sequence, -1 if there is none; the
// keys of the tile that it sees, [begin, end) in a byte each, and its head among those of the key
// head above them.
struct Row {
  int query;
  uint32_t head_and_keys;
};

// Word of the visit that row `r` of the item belongs to.
__device__ __forceinline__ uint32_t load_visit(const Params& p, const Work& work, int r) {
  return r < work.rows ? p.visits[work.first_visit + small_quotient(r, p.group)] : 0;
}

__device__ __forceinline__ Row row_of(const Params& p, const Work& work, int r, uint32_t word) {
  const int bits = run_bits(p), v = word >> bits;
  const int list = p.set_lists == 1 ? 0 : small_quotient(v, p.queries);
  const int row = p.first_query + v - list * p.queries - work.sequence.queries.begin;
  // Words that lists left which changed meanwhile may hold anything.
  if (r >= work.rows || list < 0 || list >= p.set_lists || row < 0 ||
      row >= work.sequence.queries.length)
    return {-1, 0};
  const KeyRange seen = work.sequence.mask(p).keys_of(row);
  const int run = word & ((1 << bits) - 1), log2 = p.lists.granularity_log2;
  const int begin = work.first_key_of_bin + (run << log2), end = begin + (1 << log2);
  const auto in_tile = [&](int key) {
    return static_cast<uint32_t>(min(max(key - work.first_key, 0), Config::block_kv));
  };
  const int head = list * p.group + r % p.group;
  return {row, static_cast<uint32_t>(head) << 16 | in_tile(min(seen.end, end)) << 8 |
                   in_tile(max(seen.begin, begin))};
}

__device__ __forceinline__ bool sees_all(const Row& row) {
  return (row.head_and_keys & 0xFFFF) == Config::block_kv << 8;
}

// Copies tiles of rows that a table names.
struct RowCopy : TileCopy<kRows, kChunks, Config::threads> {
  using Tile = TileCopy<kRows, kChunks, Config::threads>;
  using Tile::Tile;
  explicit __device__ __forceinline__ RowCopy(const Tile& tile) : Tile(tile) {}

  // The rows of a tensor from the first query and head of a key head on. What does not exist
  // becomes zeros.
  __device__ __forceinline__ void start(uint32_t dst_smem, uint32_t table, const Element* tensor,
                                        int64_t seq_stride, int64_t head_stride,
                                        int valid_columns) const {
#pragma unroll
    for (int r = 0; r < kRows; r += row_step) {
      const uint32_t at = table + (row + r) * 8;
      const int query = static_cast<int>(ptx::load_shared(at));
      const int head = static_cast<int>(ptx::load_shared(at + 4) >> 16);
      const Element* const from =
          tensor + max(query, 0) * seq_stride + head * head_stride + chunk * 8;
#pragma unroll
      for (int c = 0; c < kChunks; c += columns)
        ptx::cp_async_cg_16(dst_smem + offset(r, c), from + c * 8,
                            query >= 0 && (chunk + c) * 8 < valid_columns ? 16 : 0);
    }
  }
};

}  // namespace
}  // namespace blockflash

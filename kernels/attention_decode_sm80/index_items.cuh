// Items of attention to the keys that lists name: a run of splits of a list, for one row tile of
// one unit of one query. Positions count the keys of a list, so how it is divided does not depend
// on what the device alone knows.
#pragma once

#include <type_traits>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/config/cache_codes.cuh"
#include "blockflash/config/index_lists.cuh"
#include "blockflash/config/kv_cache.cuh"
#include "blockflash/decode/combine.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/tokens.cuh"
#include "blockflash/params/attention_index.h"
#include "blockflash/params/kv_cache_scaled.h"

namespace blockflash {
namespace {

using Config = AttentionDecodeConfig;

// blockflash_attention_decode_scaled_params as what other kernels take and more, so that one text
// serves all of them.
struct ScaledParams : blockflash_attention_decode_params {
  blockflash_cache_scales scales;
  int32_t q_dtype;
};
static_assert(sizeof(ScaledParams) == sizeof(blockflash_attention_decode_scaled_params),
              "the base comes first, and the others follow in the same order");

// The parameters of kernels for codes.
__device__ __forceinline__ const ScaledParams& with_scales(
    const blockflash_attention_decode_params& p) {
  return static_cast<const ScaledParams&>(p);
}

// blockflash_attention_index_params likewise.
struct IndexParams : ScaledParams {
  blockflash_index_lists lists;
  const int32_t* cu_seqlens_kv;
  int32_t units;
  int32_t chunk;
};
static_assert(sizeof(IndexParams) == sizeof(blockflash_attention_index_params),
              "the base comes first, and the others follow in the same order");

// The parameters of kernels with lists.
__device__ __forceinline__ const IndexParams& with_lists(
    const blockflash_attention_decode_params& p) {
  return static_cast<const IndexParams&>(p);
}

// Of one query: all its rows attend to the same keys. `head_kv` is its unit.
struct IndexItem : DecodeItem {
  const int32_t* list;
  int head_of_keys;
  int first_row;  // of the keys of a packed sequence
};
using Item = std::conditional_t<kHasIndex, IndexItem, DecodeItem>;

__device__ __forceinline__ const IndexItem& with_list(const DecodeItem& item) {
  return static_cast<const IndexItem&>(item);
}

// The key head of an item.
__device__ __forceinline__ int head_of_keys(const DecodeItem& item) {
  if constexpr (kHasIndex) return with_list(item).head_of_keys;
  return item.head_kv;
}

// Whether items do not depend on what predecessors of the launch write. The lists are read later.
__device__ __forceinline__ bool are_items_fixed(const blockflash_attention_decode_params& p) {
  return are_sequences_equal(p) && (!kHasIndex || with_lists(p).cu_seqlens_kv == nullptr);
}

// How the list of each query is divided.
struct IndexDivision {
  int positions, splits;
  int of_split;  // row tiles of all units

  __device__ __forceinline__ explicit IndexDivision(const IndexParams& p)
      : positions(p.lists.capacity << p.lists.granularity_log2),
        splits(max(small_quotient(positions + p.chunk - 1, p.chunk), 1)),
        of_split(ceil_div(p.group, Config::rows) * p.units) {}

  // Describes up to 2^run_log2 splits from `split` on for row tile and unit `in_split` of a query.
  __device__ __forceinline__ void describe(const IndexParams& p, int query, int in_split, int split,
                                           int run_log2, IndexItem& item) const {
    const Token token = Token::of(p.cu_seqlens_q, query, p.batch, p.seqlen_q, p.total_q);
    const PackedRows keys =
        p.cu_seqlens_kv == nullptr
            ? PackedRows{0, keys_of_sequence(p.cache, token.sequence)}
            : PackedRows::of(p.cu_seqlens_kv, token.sequence, p.cache.page_size, p.cache.capacity);
    const AttentionMask mask = AttentionMask::of(p.scores.window, token.count, keys.length);
    const int runs = ((splits - 1) >> run_log2) + 1;
    item.sequence = token.sequence, item.run_log2 = run_log2;
    item.row_tile = small_quotient(in_split, p.units);
    item.head_kv = in_split - item.row_tile * p.units;
    item.split = split;
    item.count = min(splits - split, 1 << run_log2);
    item.splits = splits;
    item.slot = ((query * runs * of_split) << run_log2) + in_split, item.slot_step = of_split;
    item.q_begin = token.row, item.q_length = 1;
    item.kv_length = keys.length;
    item.first_row = keys.begin;
    item.any = item.all = token.exists() ? mask.keys_of(token.index) : KeyRange{0, 0};
    item.head_of_keys = small_quotient(item.head_kv * p.num_heads_kv, p.units);
    item.list = p.lists.entries + query * p.lists.stride_query +
                small_quotient(item.head_kv * p.lists.groups, p.units) * p.lists.stride_group;
    const int begin = split * p.chunk;
    item.first_end = begin + p.chunk, item.chunk = p.chunk;
    item.positions = {begin, min(begin + item.count * p.chunk, positions)};
    if (item.any.begin >= item.any.end) item.positions.end = begin;
  }
};

// Finds items by number, as ItemWalk does.
struct IndexWalk {
  int unused = 0;

  __device__ __forceinline__ bool find(const blockflash_attention_decode_params& base, int number,
                                       DecodeItem& item, int lane) const {
    const IndexParams& p = with_lists(base);
    const IndexDivision division(p);
    const int of_query = (((division.splits - 1) >> p.run_log2) + 1) * division.of_split;
    const int query = number / of_query, within = number - query * of_query;
    if (query >= p.lists.queries) return false;
    if (lane != 0) return true;
    const int run = small_quotient(within, division.of_split);
    division.describe(p, query, within - run * division.of_split, run << p.run_log2, p.run_log2,
                      static_cast<IndexItem&>(item));
    return true;
  }

  // The split of this CTA of a cluster, which has a group of splits; the last CTAs may have none.
  static __device__ __forceinline__ bool find_in_cluster(
      const blockflash_attention_decode_params& base, int cluster_size, int rank, DecodeItem& item,
      int lane) {
    const IndexParams& p = with_lists(base);
    const IndexDivision division(p);
    const int number = small_quotient(blockIdx.x, cluster_size);
    const int of_query = ceil_div(division.splits, kGroup) * division.of_split;
    const int query = number / of_query, within = number - query * of_query;
    if (query >= p.lists.queries) return false;
    if (lane != 0) return true;
    const int group = small_quotient(within, division.of_split);
    division.describe(p, query, within - group * division.of_split, group * kGroup + rank, 0,
                      static_cast<IndexItem&>(item));
    return true;
  }
};
using Walk = std::conditional_t<kHasIndex, IndexWalk, ItemWalk<Config::rows>>;

}  // namespace
}  // namespace blockflash

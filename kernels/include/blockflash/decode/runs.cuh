// How the work is divided into items: runs of splits, for one row tile of one key head. The splits
// of a sequence depend on the sequence alone; how many of them make a run is up to the launch.
#pragma once

#include <math_constants.h>

#include "blockflash/config/cache_runs.cuh"
#include "blockflash/decode/items.cuh"
#include "blockflash/decode/tail_mask.cuh"
#include "blockflash/params/kv_cache_runs.h"

namespace blockflash {
namespace {

using Config = CacheRunsConfig;
using Element = Config::Element;
using Params = blockflash_attention_decode_runs_params;

constexpr int kTileKeys = 4 * kStepKeys;  // a step for each warp
constexpr int kInner = 4;                 // splits that are combined one after another
constexpr int kGroup = kInner * kInner;   // single splits that are combined at once

struct DecodeRun {
  int sequence, head_kv, row_tile;
  int run, runs;
  int slot, slot_step;      // of the first run, and what the next one adds
  int q_begin, q_length;    // queries of the sequence
  int kv_length;            // keys of the sequence
  int begin, chunk, count;  // the first key of the run, and its splits of `chunk` keys
  KeyRange keys;            // that the row tile visits, from a multiple of a tile after `begin` on
  KeyRange any, all;        // keys that some query of the row tile may attend to, and every query
};

// With params.even_ctas: the fewest keys of a split, so that the items of all sequences occupy that
// many CTAs evenly. Of some parts and multiples of an equal share, the one with which the last CTA
// is likely to end first: all items side by side, or in turns with half of an item too many. With
// the shortest splits there are 3 items for each CTA, and one for each row tile: the workspace has
// room for these.
__device__ __forceinline__ int even_chunk(const Params& params, int lane) {
  constexpr int kShares = 8;
  constexpr float kOfShare[kShares] = {2.f, 1.5f, 1.25f, 1.125f, 1.f, .7f, .5f, .34f};
  // What the end of an item costs, in keys that a CTA could multiply meanwhile.
  constexpr float kEnd = Config::end_keys;
  const blockflash_attention_decode_params& p = params.base;
  const float ctas = static_cast<float>(params.even_ctas);
  const float row_tiles =
      static_cast<float>(ceil_div(p.seqlen_q * p.group, Config::rows) * p.num_heads_kv);
  float total = 0.f;
  int longest = 0;
#pragma unroll 4
  for (int sequence = lane; sequence < p.batch; sequence += 32) {
    const int keys = DecodeSequence::of<Config::rows>(p, sequence).keys;
    total += static_cast<float>(keys), longest = max(longest, keys);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(~0u, total, distance);
    longest = max(longest, __shfl_xor_sync(~0u, longest, distance));
  }
  const float share = total * row_tiles / ctas;
  [[maybe_unused]] const float most = static_cast<float>(longest);
  int chunks[kShares];
  float splits[kShares];
#pragma unroll
  for (int i = 0; i < kShares; ++i) {
    float keys = fminf(ceilf(share * kOfShare[i]), static_cast<float>(1 << 30));
    if constexpr (Config::splits_longest)
      if (i == 2) keys = ceilf(most / fmaxf(floorf(most / share), 1.f));
    chunks[i] = (max(min(static_cast<int>(keys), longest), p.chunk_min) + 63) & ~63;
    splits[i] = 0.f;
  }
#pragma unroll 2
  for (int sequence = lane; sequence < p.batch; sequence += 32) {
    const int keys = DecodeSequence::of<Config::rows>(p, sequence).keys;
#pragma unroll
    for (int i = 0; i < kShares; ++i)
      splits[i] += static_cast<float>(max(small_quotient(keys + chunks[i] - 1, chunks[i]), 1));
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
#pragma unroll
    for (int i = 0; i < kShares; ++i) splits[i] += __shfl_xor_sync(~0u, splits[i], distance);
  int best = chunks[0];
  float least = CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < kShares; ++i) {
    const float items = splits[i] * row_tiles;
    const float item = static_cast<float>(min(chunks[i], longest)) + kEnd;
    const float keys = items <= ctas ? item : share + items / ctas * kEnd + .5f * item;
    if (keys < least) least = keys, best = chunks[i];
  }
  return best;
}

// Finds items by number, in ascending order, with the lanes of a warp.
struct RunWalk {
  int first_sequence = 0;  // of the 32 that the lanes look at
  int before = 0;          // items of the sequences before it
  int fewest_keys = -1;    // of a split; -1: not chosen yet

  // Before the first item.
  __device__ __forceinline__ void choose(const Params& params, int lane) {
    fewest_keys = params.even_ctas > 0 ? even_chunk(params, lane) : 0;
  }

  // Writes item `number` to `item` and returns true, or returns false behind the last one. With
  // `has_chosen` somebody has called `choose`, which takes registers.
  template <bool has_chosen = false>
  __device__ __forceinline__ bool find(const Params& params, int number, DecodeRun& item,
                                       int lane) {
    const blockflash_attention_decode_params& p = params.base;
    if (!has_chosen && fewest_keys < 0) choose(params, lane);
    DecodeSequence s;
    int sequence, first, slot_step, runs, owner;
    while (true) {
      if (first_sequence >= p.batch) return false;
      sequence = first_sequence + lane;
      s = DecodeSequence::of<Config::rows>(p, min(sequence, p.batch - 1));
      if (fewest_keys > s.chunk) {
        s.chunk = fewest_keys;
        s.splits = max(small_quotient(s.keys + s.chunk - 1, s.chunk), 1);
      }
      slot_step = s.row_tiles * p.num_heads_kv;
      runs = small_quotient(s.splits + params.run - 1, params.run);
      if (are_sequences_equal(p)) {
        sequence = small_quotient(number, runs * slot_step);
        first = sequence * runs * slot_step;
        owner = 0;
        if (sequence >= p.batch) return false;
        break;
      }
      const int items = sequence < p.batch ? runs * slot_step : 0;
      int end = items;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int others = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += others;
      }
      end += before;
      first = end - items;
      const unsigned later = __ballot_sync(~0u, number < end);
      if (later != 0) {
        owner = __ffs(static_cast<int>(later)) - 1;
        // The workspace has room for p.items.
        if (__shfl_sync(~0u, end, owner) > p.items) return false;
        break;
      }
      before = __shfl_sync(~0u, end, 31);
      first_sequence += 32;
    }
    if (lane != owner) return true;
    const int within = number - first;
    item.sequence = sequence;
    item.run = small_quotient(within, slot_step);
    const int of_run = within - item.run * slot_step;
    item.row_tile = small_quotient(of_run, p.num_heads_kv);
    item.head_kv = of_run - item.row_tile * p.num_heads_kv;
    item.runs = runs;
    item.slot = first + of_run, item.slot_step = slot_step;
    item.q_begin = s.queries.begin, item.q_length = s.queries.length;
    item.kv_length = s.kv_length;
    const int first_query = small_quotient(item.row_tile * Config::rows, p.group);
    const int last_query =
        min(small_quotient((item.row_tile + 1) * Config::rows - 1, p.group), item.q_length - 1);
    const AttentionMask mask = DecodeSequence::mask(p, item.q_length, item.kv_length);
    item.any = mask.keys_of_any(first_query, last_query);
    item.all = mask.keys_of_all(first_query, last_query);
    item.all.end = end_before_tail(params.tail_mask, item, item.all.end);
    const int first_split = item.run * params.run;
    item.begin = s.first + first_split * s.chunk, item.chunk = s.chunk;
    item.count = min(s.splits - first_split, params.run);
    // Splits are whole tiles, so a tile is in one of them.
    const int unseen = max(item.any.begin - item.begin, 0);
    item.keys.begin = item.begin + (unseen & ~(kTileKeys - 1));
    item.keys.end = min(min(item.begin + item.count * s.chunk, s.first + s.keys), item.any.end);
    return true;
  }
};

}  // namespace
}  // namespace blockflash

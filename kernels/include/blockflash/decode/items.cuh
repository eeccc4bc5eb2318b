// How attention over a cache is divided into items: a run of splits of the keys, for one row tile
// of one key head. The splits of a sequence depend on the sequence alone, so that its result does
// not depend on the rest of the batch. How many of them are an item does not change any result.
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/quotient.cuh"

namespace blockflash {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Keys that a warp takes at once.
constexpr int kStepKeys = 16;

// Neighbouring splits of one row tile. Positions count keys, or the slots of listed pages where
// pages are chosen.
struct DecodeItem {
  int sequence, head_kv, row_tile;
  int split, count, splits;  // the first split, how many there are, and those of the sequence
  int slot, slot_step;       // place of split 0 in the workspace, and what the next one adds
  int q_begin, q_length;     // queries of the sequence
  int kv_length;             // keys of the sequence
  int run_log2;              // splits of an item, unless it is the last one of its sequence
  int unused;                // of an odd size, since one kernel for head_dim 256 spills otherwise
  int first_end, chunk;      // position where the first split ends, and how many a split has
  KeyRange positions;        // that the row tile visits; they begin at a multiple of 16
  KeyRange any, all;         // keys that some query of the row tile attends to, and every query

  // The place of a split's result in the workspace.
  __device__ __forceinline__ int slot_of(int of_split) const { return slot + of_split * slot_step; }
};

// How a sequence is divided.
struct DecodeSequence {
  PackedRows queries;
  int kv_length;
  int first, keys;  // positions that some query attends to, from a multiple of 16 on
  int chunk, splits, row_tiles;

  template <int rows>
  static __device__ __forceinline__ DecodeSequence of(const blockflash_attention_decode_params& p,
                                                      int sequence) {
    DecodeSequence s;
    s.queries = p.cu_seqlens_q == nullptr
                    ? PackedRows{0, p.seqlen_q}
                    : PackedRows::of(p.cu_seqlens_q, sequence, p.total_q, p.seqlen_q);
    if (s.queries.length > p.most_queries) s.queries.length = 0;
    s.kv_length = keys_of_sequence(p.cache, sequence);
    if (p.page_list == nullptr) {
      const KeyRange any =
          mask(p, s.queries.length, s.kv_length).keys_of_any(0, s.queries.length - 1);
      s.first = any.begin & ~(kStepKeys - 1);
      s.keys = max(any.end - s.first, 0);
    } else {
      s.first = 0;
      s.keys = min(max(p.page_count[sequence], 0), p.page_list_capacity) * p.cache.page_size;
    }
    const int medium = small_quotient(s.keys + p.splits - 1, p.splits);
    const int clamped = min(max(medium, p.chunk_min), p.chunk_max);
    s.chunk = (max(clamped, ceil_div(s.keys, 256)) + 63) & ~63;
    s.splits = max(small_quotient(s.keys + s.chunk - 1, s.chunk), 1);
    s.row_tiles = ceil_div(s.queries.length * p.group, rows);
    return s;
  }

  static __device__ __forceinline__ AttentionMask mask(const blockflash_attention_decode_params& p,
                                                       int q_length, int kv_length) {
    return AttentionMask::of(p.scores.window, q_length, kv_length);
  }
};

// Whether all sequences are divided alike, whatever device memory holds.
__device__ __forceinline__ bool are_sequences_equal(const blockflash_attention_decode_params& p) {
  return p.cu_seqlens_q == nullptr && p.cache.seqused == nullptr && p.page_count == nullptr;
}

// Writes the item of up to 2^run_log2 splits from `split` on, for row tile and head `in_run` of the
// sequence whose first slot in the workspace is `first_slot`.
template <int rows>
__device__ __forceinline__ void describe(const blockflash_attention_decode_params& p,
                                         const DecodeSequence& s, int sequence, int first_slot,
                                         int in_run, int split, int run_log2, DecodeItem& item) {
  item.sequence = sequence, item.run_log2 = run_log2;
  item.row_tile = small_quotient(in_run, p.num_heads_kv);
  item.head_kv = in_run - item.row_tile * p.num_heads_kv;
  item.split = split;
  item.count = min(s.splits - split, 1 << run_log2);
  item.splits = s.splits;
  item.slot = first_slot + in_run, item.slot_step = s.row_tiles * p.num_heads_kv;
  item.q_begin = s.queries.begin, item.q_length = s.queries.length;
  item.kv_length = s.kv_length;
  const int first_query = small_quotient(item.row_tile * rows, p.group);
  const int last_query =
      min(small_quotient((item.row_tile + 1) * rows - 1, p.group), item.q_length - 1);
  const AttentionMask mask = DecodeSequence::mask(p, item.q_length, item.kv_length);
  item.any = mask.keys_of_any(first_query, last_query);
  item.all = mask.keys_of_all(first_query, last_query);
  const int begin = s.first + split * s.chunk;
  item.first_end = begin + s.chunk, item.chunk = s.chunk;
  item.positions = {begin, min(begin + item.count * s.chunk, s.first + s.keys)};
  if (p.page_list == nullptr) {
    // Whole rounds of steps are skipped, so that each warp has the same keys in any run.
    item.positions.begin = max(begin, s.first + ((item.any.begin - s.first) & ~63));
    item.positions.end = min(item.positions.end, item.any.end);
  }
}

// Most rows of a tile with which a CTA combines the splits of a run in registers, so that runs pay.
constexpr int kMostRowsOfRuns = 8;

// Log2 of the splits of an item. Where only the device knows the lengths, a warp counts all splits:
// items are as long as they can be with (almost) full rounds of CTAs, as the host has it for equal
// lengths. Runs of two would leave as many results as single splits. Lengths that change meanwhile
// may make CTAs disagree, which changes results, but no place in the workspace: that counts splits.
template <int rows>
__device__ __forceinline__ int choose_run_log2(const blockflash_attention_decode_params& p,
                                               int lane) {
  constexpr int kShortest = 2, kLongest = 4;
  const bool one_each = gridDim.x >= static_cast<unsigned>(p.items);
  if (rows > kMostRowsOfRuns || one_each || are_sequences_equal(p)) return p.run_log2;
  float splits = 0.f;
  for (int sequence = lane; sequence < p.batch; sequence += 32) {
    const DecodeSequence s = DecodeSequence::of<rows>(p, sequence);
    splits += static_cast<float>(s.splits * s.row_tiles * p.num_heads_kv);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    splits += __shfl_xor_sync(~0u, splits, distance);
  const float ctas = static_cast<float>(gridDim.x);
#pragma unroll
  for (int log2 = kLongest; log2 >= kShortest; --log2) {
    const float rounds = splits / static_cast<float>(1 << log2) / ctas;
    if (rounds >= 0.95f * ceilf(rounds)) return log2;
  }
  return 0;
}

// Finds items by number, in ascending order, with the lanes of a warp.
template <int rows>
struct ItemWalk {
  int first_sequence = 0;  // of the 32 that the lanes look at
  int before = 0;          // items of the sequences before it,
  int slots_before = 0;    // and their places in the workspace
  int run_log2 = -1;       // not chosen yet

  // Writes item `number` to `item` and returns true, or returns false behind the last one.
  __device__ __forceinline__ bool find(const blockflash_attention_decode_params& p, int number,
                                       DecodeItem& item, int lane) {
    if (run_log2 < 0) run_log2 = choose_run_log2<rows>(p, lane);
    DecodeSequence s;
    int sequence, first, first_slot, runs, of_run, owner;
    while (true) {
      if (first_sequence >= p.batch) return false;
      sequence = first_sequence + lane;
      s = DecodeSequence::of<rows>(p, min(sequence, p.batch - 1));
      of_run = s.row_tiles * p.num_heads_kv;
      runs = ((s.splits - 1) >> run_log2) + 1;
      if (are_sequences_equal(p)) {
        sequence = small_quotient(number, runs * of_run);
        first = sequence * runs * of_run;
        first_slot = first << run_log2;
        owner = 0;
        if (sequence >= p.batch) return false;
        break;
      }
      const bool exists = sequence < p.batch;
      const int items = exists ? runs * of_run : 0, slots = exists ? s.splits * of_run : 0;
      int end = items, slots_end = slots;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int others = __shfl_up_sync(~0u, end, distance);
        const int other_slots = __shfl_up_sync(~0u, slots_end, distance);
        if (lane >= distance) end += others, slots_end += other_slots;
      }
      end += before, slots_end += slots_before;
      first = end - items, first_slot = slots_end - slots;
      const unsigned later = __ballot_sync(~0u, number < end);
      if (later != 0) {
        owner = __ffs(static_cast<int>(later)) - 1;
        // The workspace has room for p.items.
        if (__shfl_sync(~0u, slots_end, owner) > p.items) return false;
        break;
      }
      before = __shfl_sync(~0u, end, 31);
      slots_before = __shfl_sync(~0u, slots_end, 31);
      first_sequence += 32;
    }
    if (lane != owner) return true;
    const int within = number - first;
    const int run = small_quotient(within, of_run);
    describe<rows>(p, s, sequence, first_slot, within - run * of_run, run << run_log2, run_log2,
                   item);
    return true;
  }
};

}  // namespace blockflash

// The queries of a batch and the keys that each of them sees (params/index_choice.h).
#pragma once

#include <stdint.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/decode/tokens.cuh"
#include "blockflash/params/index_choice.h"

namespace blockflash {

// A sequence. Whoever needs several of its numbers takes them from one of these: the data that they
// come from may be overwritten meanwhile.
struct IndexSequence {
  PackedRows queries;  // among all rows
  int keys;
  int slot;  // of the first key, of packed keys

  static __device__ __forceinline__ IndexSequence of(const blockflash_index_rows& rows,
                                                     int sequence) {
    const PackedRows queries =
        rows.cu_seqlens_q == nullptr
            ? PackedRows{sequence * rows.seqlen_q, rows.seqlen_q}
            : PackedRows::of(rows.cu_seqlens_q, sequence, rows.rows, rows.seqlen_q);
    if (rows.cu_seqlens_kv == nullptr) return {queries, keys_of_sequence(rows.cache, sequence), 0};
    const PackedRows keys =
        PackedRows::of(rows.cu_seqlens_kv, sequence, rows.cache.page_size, rows.cache.capacity);
    return {queries, keys.length, keys.begin};
  }

  __device__ __forceinline__ AttentionMask mask(const blockflash_index_rows& rows) const {
    return AttentionMask::of(rows.window, queries.length, keys);
  }
};

// A row: its sequence and its query there. Rows that are in no sequence see nothing.
struct IndexRow {
  IndexSequence sequence;
  int query;
  bool exists;

  static __device__ __forceinline__ IndexRow of(const blockflash_index_rows& rows, int row) {
    const Token token = Token::of(rows.cu_seqlens_q, row, rows.batch, rows.seqlen_q, rows.rows);
    const IndexSequence sequence = IndexSequence::of(rows, token.sequence);
    const int query = row - sequence.queries.begin;
    return {sequence, query, query >= 0 && query < sequence.queries.length};
  }
  __device__ __forceinline__ KeyRange keys(const blockflash_index_rows& rows) const {
    return exists ? sequence.mask(rows).keys_of(query) : KeyRange{0, 0};
  }
};

}  // namespace blockflash

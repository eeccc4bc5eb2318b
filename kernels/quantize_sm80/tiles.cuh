// Which rows a CTA and its threads have.
#pragma once

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/config/quantize.cuh"
#include "blockflash/params/quantize.h"
#include "codes.cuh"

namespace blockflash {
namespace {

using Config = QuantizeConfig;
using Params = blockflash_quantize_params;

// Classes of tokens that a CTA adds up apart.
constexpr int kClasses = 16;
static_assert(Config::threads / (256 / kOwn) >= kClasses, "a CTA has a head, however wide it is");

// What a thread has of a tile: pieces of the rows of one head, of each `tokens`-th token. Some
// neighbouring lanes, a power of two, have a row: each of them a piece, and then each a second one.
struct Place {
  int lanes, lane, heads, tokens;  // heads and tokens that a CTA has at once
  int first_head, head, token;
  bool has_row;          // whether the head exists
  bool exists[kPieces];  // and the columns as well

  // As many heads as fit, of which all CTAs have equally many.
  static __device__ __forceinline__ int heads_of_rows(int num_heads, int rows) {
    const int blocks = (num_heads + rows - 1) / rows;
    return (num_heads + blocks - 1) / blocks;
  }
  // Leaves the number of the tile.
  static __device__ __forceinline__ Place of(const Params& p, int& block) {
    Place at;
    const int owners = (p.head_dim - 1) / kOwn;
    at.lanes = owners == 0 ? 1 : 1 << (32 - __clz(owners));
    at.lane = threadIdx.x % at.lanes;
    const int rows = Config::threads / at.lanes;
    at.heads = p.step == BLOCKFLASH_QUANTIZE_SUMS    ? rows / kClasses
               : p.step == BLOCKFLASH_QUANTIZE_MEANS ? 1
                                                     : heads_of_rows(p.num_heads, rows);
    at.tokens = rows / at.heads;
    // CTAs of all heads are neighbours, as these rows are in most tensors.
    const int head_blocks = (p.num_heads + at.heads - 1) / at.heads;
    const int before = block / head_blocks, row = threadIdx.x / at.lanes;
    at.first_head = (block - before * head_blocks) * at.heads;
    block = before;
    at.token = row / at.heads;
    at.head = at.first_head + (row - at.token * at.heads);
    at.has_row = at.token < at.tokens && at.head < p.num_heads;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) at.exists[i] = at.has_row && at.column(i) < p.head_dim;
    return at;
  }
  __device__ __forceinline__ int column(int piece) const { return (lane + piece * lanes) * kPiece; }
};

// Tokens of a sequence: `count` of them from row `first` of its tensor on.
struct Tile {
  int sequence, chunk, chunks;
  int64_t first;
  int count;  // negative: there is no such tile

  // Tile number `slot` of all sequences, of so many tokens. The last one has what remains: fewer
  // tokens, or more of them if the rest is joined. A sequence without tokens has a tile, too.
  //
  // In a packed batch sequence s begins at slot begin / tokens + s: behind the tiles of the one
  // before it, and with less than one slot in between. Whatever the offsets hold, rows are inside
  // of the tensor.
  static __device__ Tile of(const Params& p, int slot, int tokens, bool joined) {
    const auto chunks_of = [=](int length) {
      return max(joined ? length / tokens : (length - 1) / tokens + 1, 1);
    };
    Tile tile;
    PackedRows rows = {0, p.seqlen};
    if (p.cu_seqlens == nullptr) {
      tile.chunks = chunks_of(p.seqlen);
      tile.sequence = slot / tile.chunks;
      tile.chunk = slot - tile.sequence * tile.chunks;
    } else {
      const auto slot_of = [&](int sequence, int begin) {
        return min(max(begin, 0), p.total) / tokens + sequence;
      };
      int first = 0, last = p.batch - 1;
      while (first < last) {
        const int middle = last - (last - first) / 2;
        if (slot_of(middle, p.cu_seqlens[middle]) <= slot)
          first = middle;
        else
          last = middle - 1;
      }
      rows = PackedRows::of(p.cu_seqlens, first, p.total, p.seqlen);
      tile.sequence = first;
      tile.chunks = chunks_of(rows.length);
      tile.chunk = slot - slot_of(first, rows.begin);
    }
    tile.place(rows, tokens, joined, p.batch);
    return tile;
  }
  // All of a sequence, whose chunks have so many tokens.
  static __device__ Tile whole(const Params& p, int sequence) {
    PackedRows rows = {0, p.seqlen};
    if (p.cu_seqlens != nullptr && sequence < p.batch)
      rows = PackedRows::of(p.cu_seqlens, sequence, p.total, p.seqlen);
    Tile tile;
    tile.sequence = sequence, tile.chunk = 0;
    tile.chunks = max(rows.length / BLOCKFLASH_QUANTIZE_CHUNK, 1);
    tile.first = rows.begin;
    tile.count = sequence < p.batch ? rows.length : -1;
    return tile;
  }

 private:
  __device__ void place(const PackedRows& rows, int tokens, bool joined, int batch) {
    const bool exists = sequence < batch && chunk >= 0 && chunk < chunks;
    const int before = exists ? chunk * tokens : 0;
    first = rows.begin + before;
    const int rest = rows.length - before;
    count = !exists ? -1 : joined && chunk == chunks - 1 ? rest : min(rest, tokens);
  }
};

// What one thread has found: offsets may change meanwhile, and all threads must go the same way.
__device__ __forceinline__ Tile shared_tile(const Params& p, int slot, int tokens, int step) {
  __shared__ Tile shared;
  if (threadIdx.x == 0)
    shared = step == BLOCKFLASH_QUANTIZE_MEANS
                 ? Tile::whole(p, slot)
                 : Tile::of(p, slot, tokens, step == BLOCKFLASH_QUANTIZE_SUMS);
  __syncthreads();
  return shared;
}

// The scale that a sequence and head have, or all.
__device__ __forceinline__ float* scale_of_head(const Params& p, int sequence, int head) {
  return p.scale + sequence * p.scale_stride_batch + head * p.scale_stride_head;
}
__device__ __forceinline__ uint8_t* codes_of_token(const Params& p, int sequence, int64_t token,
                                                   int head) {
  return static_cast<uint8_t*>(p.codes) + sequence * p.codes_stride_batch +
         token * p.codes_stride_seq + head * p.codes_stride_head;
}
__device__ __forceinline__ float* mean_of_head(const Params& p, int sequence, int head) {
  return p.mean + sequence * p.mean_stride_batch + head * p.mean_stride_head;
}

}  // namespace
}  // namespace blockflash

// Tiles of 64 rows in shared memory, as WGMMA reads them: panels of 64 columns, rows of 128 bytes,
// and the 128-byte swizzle.
#pragma once

#include <stdint.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/config/attention_small.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/ptx/cp_async.cuh"

namespace blockflash {
namespace {

using Config = AttentionSmallConfig;
using Element = Config::Element;
using Traits = ElementTraits<Element>;

constexpr int kRows = 64;  // queries, and keys, of a tile
static_assert(Config::block_q == kRows && Config::block_kv == kRows, "one box of WGMMA each");
constexpr int kD = Config::head_dim;
static_assert(kD % 64 == 0, "panels are as wide as the swizzle");
constexpr int kPanels = kD / 64;
constexpr int kPanelBytes = kRows * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kWarpgroups = Config::warpgroups, kStages = Config::stages;
constexpr int kRingBytes = 2 * kStages * kTileBytes;  // of a warpgroup: K stages, then V stages
static_assert(Config::smem_bytes == kTileBytes + kWarpgroups * kRingBytes,
              "manifest and kernel disagree on smem");

// The work of a CTA: 64 queries of one head, and the key tiles that they visit, from `last`
// downwards. It is in shared memory, where the steps and the epilogue read it: registers have no
// room for it.
struct Work {
  int batch, head, q_begin, last, tiles;
  KeyRange all;  // keys that all of these queries see

  static __device__ __forceinline__ AttentionMask mask(const blockflash_attention_fwd_params& p) {
    return AttentionMask::of(p.scores.window, p.seqlen_q, p.seqlen_kv);
  }

  static __device__ __forceinline__ Work of(const blockflash_attention_fwd_params& p) {
    Work work;
    // Tiles with the most keys first.
    const int q_tiles = (p.seqlen_q + kRows - 1) / kRows;
    const int batch_head = blockIdx.x / q_tiles;
    work.batch = batch_head / p.num_heads_q, work.head = batch_head - work.batch * p.num_heads_q;
    work.q_begin = (q_tiles - 1 - (blockIdx.x - batch_head * q_tiles)) * kRows;
    const int q_last = min(work.q_begin + kRows, p.seqlen_q) - 1;
    const KeyRange any = mask(p).keys_of_any(work.q_begin, q_last);
    work.all = mask(p).keys_of_all(work.q_begin, q_last);
    work.last = (any.end + kRows - 1) / kRows - 1;
    work.tiles = max(work.last + 1 - any.begin / kRows, 0);
    return work;
  }
};

// Byte offset of a chunk of eight columns inside a panel.
__device__ __forceinline__ uint32_t in_panel(int row, int chunk) {
  return row * 128 + (chunk ^ row % 8) * 16;
}

// Copies of a tile by `threads` threads, each of which owns the same chunks of all tiles. Eight
// neighbours read 128 bytes in a row.
template <int threads>
struct TileChunks {
  static constexpr int row_step = threads / 8;
  static_assert(row_step % 8 == 0 && kRows % row_step == 0, "the swizzle repeats every 8 rows");
  int row, chunk;
  uint32_t offset;

  __device__ __forceinline__ explicit TileChunks(int thread)
      : row(thread / 8), chunk(thread % 8), offset(in_panel(row, chunk)) {}

  // Starts the copy of rows [0, valid_rows) and columns [0, valid_columns) of a tile, and fills the
  // rest of it with zeros. `src` is the first column of row `row` of the tile.
  __device__ __forceinline__ void start(uint32_t tile_smem, const Element* src, int64_t row_stride,
                                        int valid_rows, int valid_columns) const {
    if (valid_rows >= kRows && valid_columns == kD) {
      const Element* from = src + chunk * 8;
#pragma unroll
      for (int r = 0; r < kRows; r += row_step, from += row_step * row_stride)
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
          ptx::cp_async_cg_16(tile_smem + panel * kPanelBytes + r * 128 + offset, from + panel * 64,
                              16);
      return;
    }
#pragma unroll 1
    for (int r = 0; r < kRows; r += row_step, src += row_step * row_stride)
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = panel * 64 + chunk * 8;
        const bool valid = row + r < valid_rows && column < valid_columns;
        // An invalid chunk reads nothing, but its address must stay inside the tensor.
        const Element* const inside = src - (row + r < valid_rows ? 0 : (row + r) * row_stride);
        ptx::cp_async_cg_16(tile_smem + panel * kPanelBytes + r * 128 + offset,
                            inside + (valid ? column : 0), valid ? 16 : 0);
      }
  }

  // Whether one of this thread's own chunks, which have arrived, holds a NaN or an infinity.
  __device__ __forceinline__ bool has_nonfinite(const unsigned char* tile) const {
    uint32_t sums = 0;
#pragma unroll
    for (int r = 0; r < kRows; r += row_step)
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const uint4 x =
            *reinterpret_cast<const uint4*>(tile + panel * kPanelBytes + r * 128 + offset);
        for (uint32_t word : {x.x, x.y, x.z, x.w}) sums = Traits::zero_times_plus(word, sums);
      }
    return sums != 0;
  }

  // Replaces NaN and infinity in this thread's own chunks by zero.
  __device__ __forceinline__ void clear_nonfinite(unsigned char* tile) const {
#pragma unroll 1
    for (int r = 0; r < kRows; r += row_step)
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        uint16_t* x = reinterpret_cast<uint16_t*>(tile + panel * kPanelBytes + r * 128 + offset);
        for (int i = 0; i < 8; ++i)
          if (is_nonfinite<Element>(x[i])) x[i] = 0;
      }
  }
};

}  // namespace
}  // namespace blockflash

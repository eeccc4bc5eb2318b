// Tiles of 64 rows in shared memory, as WGMMA reads them: panels of 64 columns, rows of 128 bytes,
// and the 128-byte swizzle.
#pragma once

#include <stdint.h>

#include "blockflash/attention/visit.cuh"
#include "blockflash/config/attention_small.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/cp_async.cuh"

namespace blockflash {
namespace {

using Config = AttentionSmallConfig;
using Element = Config::Element;
using Traits = ElementTraits<Element>;
using QueryWork = Work<Config::block_q>;
using KeyVisit = Visit<Config::block_q, Config::block_kv>;

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

  // Starts the copy of rows [0, valid_rows) and columns [0, valid_columns) of `src`, and fills the
  // rest of the tile with zeros.
  __device__ __forceinline__ void start(uint32_t tile_smem, const Element* src, int64_t row_stride,
                                        int valid_rows, int valid_columns) const {
    const Element* from = src + row * row_stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < kRows; r += row_step, from += row_step * row_stride)
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const bool valid = row + r < valid_rows && panel * 64 + chunk * 8 < valid_columns;
        // An invalid chunk reads nothing, but its address must stay inside the tensor.
        ptx::cp_async_cg_16(tile_smem + panel * kPanelBytes + r * 128 + offset,
                            valid ? from + panel * 64 : src, valid ? 16 : 0);
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

// Layout of 16-bit operand tiles in shared memory that is the same for both layouts of the operand
// in global memory. A tile consists of core matrices, 8 × 8 elements in 128 bytes, whose rows are
// eight neighbours of global memory, along K or across. Only the instruction that loads fragments
// differs, ldmatrix with or without transposition, so the layout can be a run-time argument.
#pragma once

#include <stdint.h>

#include "blockflash/ptx/cp_async.cuh"

namespace blockflash {

constexpr int kCoreBytes = 128;

// A tile of lines (rows of A, columns of B) times `depth` along K.
template <int depth>
struct CoreMatrices {
  static constexpr int chunks = depth / 8;
  static_assert(chunks == 8, "the permutation below is for 8 core matrices along K");

  // Byte offset of row r of the core matrix at lines 8·i and K 8·j. Rows are permuted by both, so
  // that eight threads that copy neighbours of a line, along K or across, write to different banks.
  static __device__ __forceinline__ uint32_t offset(int i, int j, int r) {
    return (i * chunks + j) * kCoreBytes + ((r ^ i ^ j) & 7) * 16;
  }
};

// The addresses that one lane passes to ldmatrix for the 16 × 16 sub-tiles of its warp's lines.
// They repeat, up to constants, every four sub-tiles along K or across.
template <int depth>
struct CoreAddress {
  uint32_t step[4];

  // `first`: first of the warp's lines, a multiple of their number, which is a power of two. The
  // lane supplies row `lane % 8` of core matrix (i, j) of the sub-tile.
  __device__ __forceinline__ CoreAddress(uint32_t tile_smem, int first, int i, int j, int lane) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      step[x] = tile_smem + CoreMatrices<depth>::offset(first / 8 + i, j, lane % 8 ^ 2 * x);
  }

  // Sub-tile `line16` of the warp, and `k16` along K.
  __device__ __forceinline__ uint32_t at(int line16, int k16) const {
    return step[(line16 ^ k16) % 4] +
           (line16 * CoreMatrices<depth>::chunks + k16) * (2 * kCoreBytes);
  }
};

// A dense operand in global memory in either layout: element (line, k) is at line·ld + k or at k·ld
// + line.
template <class Element>
struct DenseOperand {
  const Element* data;
  int64_t ld;
  int lines, depth;
  bool k_contiguous;
  bool vectorized;  // data and ld allow 16-byte loads

  // Copies the first `count` of eight neighbours to 16 bytes of shared memory and zeros the others.
  // Copies of single elements become visible to other threads at the next barrier.
  template <bool vector>
  __device__ __forceinline__ void copy(unsigned char* to, const Element* from, int count) const {
    if constexpr (vector) {
      // Nothing is read when count is 0, but the address must stay inside the operand.
      ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(to)),
                          count > 0 ? from : data, 2 * max(count, 0));
    } else {
      uint16_t* const elements = reinterpret_cast<uint16_t*>(to);
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        elements[i] = i < count ? reinterpret_cast<const uint16_t*>(from)[i] : 0;
    }
  }
};

// The copies of a tile by all threads of a CTA: `segments` runs of neighbouring lines, side by
// side.
template <int tile_lines, int segments, int tile_depth, int threads, class Element>
struct DenseCopy {
  using Layout = CoreMatrices<tile_depth>;
  static constexpr int kSegment = tile_lines / segments;
  // Threads along a line, and lines (or positions along K) between two copies of a thread.
  static constexpr int kAlong = tile_depth / 8, kAlongStep = threads / kAlong;
  static constexpr int kAcross = tile_lines / 8, kAcrossStep = threads / kAcross;
  static_assert(threads % kAlong == 0 && kSegment % kAlongStep == 0,
                "a round along K is in one segment");
  static_assert(threads % kAcross == 0 && tile_depth % kAcrossStep == 0,
                "a round across is whole lines of chunks");

  DenseOperand<Element> operand;
  int first;  // lane s of each warp: first line of segment s; negative: segments from s on are
              // missing

  // Starts the copies of the tile from k0 on. Elements beyond the operand become zero; missing
  // segments are left as they are.
  __device__ __forceinline__ void start(unsigned char* tile, int k0) const {
    if (operand.k_contiguous)
      operand.vectorized ? along<true>(tile, k0) : along<false>(tile, k0);
    else
      operand.vectorized ? across<true>(tile, k0) : across<false>(tile, k0);
  }

  template <bool vector>
  __device__ __forceinline__ void along(unsigned char* tile, int k0) const {
    const int chunk = threadIdx.x % kAlong, line0 = threadIdx.x / kAlong, k = k0 + chunk * 8,
              count = min(operand.depth - k, 8);
#pragma unroll(vector ? tile_lines / kAlongStep : 1)
    for (int round = 0; round < tile_lines; round += kAlongStep) {
      const int begin = __shfl_sync(~0u, first, round / kSegment);
      if (begin < 0) break;
      const int at = round + line0, line = begin + round % kSegment + line0;
      operand.template copy<vector>(tile + Layout::offset(at / 8, chunk, at),
                                    operand.data + line * operand.ld + k,
                                    line < operand.lines ? count : 0);
    }
  }

  template <bool vector>
  __device__ __forceinline__ void across(unsigned char* tile, int k0) const {
    const int chunk = threadIdx.x % kAcross, k_first = threadIdx.x / kAcross;
    const int begin = __shfl_sync(~0u, first, chunk * 8 / kSegment),
              line = begin + chunk * 8 % kSegment;
    if (begin < 0) return;
    const int count = min(operand.lines - line, 8);
    const Element* from = operand.data + (k0 + k_first) * operand.ld + line;
#pragma unroll(vector ? tile_depth / kAcrossStep : 1)
    for (int round = 0; round < tile_depth;
         round += kAcrossStep, from += kAcrossStep * operand.ld) {
      const int at = round + k_first;
      operand.template copy<vector>(tile + Layout::offset(chunk, at / 8, at), from,
                                    k0 + at < operand.depth ? count : 0);
    }
  }
};

}  // namespace blockflash

// The keys of a warp as operands of products.
#pragma once

#include "blockflash/mma/products.cuh"
#include "tile.cuh"

namespace blockflash {
namespace {

// Of the keys of a warp with 16 columns.
using Products = float[kMTiles][kNTiles][4];

// 16 columns in the ring: from a row of a stage on, whose offset is in bytes.
struct Columns {
  const LaneAddress<kChunks>& ring;
  int row;
  uint32_t offset;
};

// The keys of a warp as operands.
struct Keys {
  uint32_t a[kMTiles][kSteps][4];

  __device__ __forceinline__ void load(uint32_t warp_smem, int lane) {
    const LaneCoords at = lane_row_major(lane);
    const LaneAddress<kChunks> address(warp_smem, at.row, at.chunk);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4(a[m][k], address.at(m * 16, k));
  }

  // Adds the products with 16 columns.
  __device__ __forceinline__ void multiply(Products& acc, const Columns& columns) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, columns.ring.at(columns.row, k) + columns.offset);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][0], a[m][k], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[m][1], a[m][k], b[2], b[3]);
      }
    }
  }
};

}  // namespace
}  // namespace blockflash

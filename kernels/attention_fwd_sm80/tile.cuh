// What a warp of attention forward holds of a tile, and its two products.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/mma/products.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/mma/tile_copy.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"

namespace blockflash {
namespace {

using Config = AttentionPortableConfig;
using Element = Config::Element;

constexpr int kChunks = Config::head_dim / 8;  // 16-byte chunks of a row of Q, K or V
// Warps that share query rows: each has the scores of a part of the keys of a tile, and the output
// in a part of the head dimension.
constexpr int kSplit = Config::split;
constexpr int kRowsPerWarp = Config::block_q * kSplit / Config::warps;
constexpr int kKvPerWarp = Config::block_kv / kSplit;
constexpr int kMTiles = kRowsPerWarp / 16;              // MMA tiles of a warp along queries,
constexpr int kKvTiles = kKvPerWarp / 8;                // along keys,
constexpr int kDTiles = Config::head_dim / kSplit / 8;  // and along the head dimension
constexpr int kDSteps = Config::head_dim / 16;          // MMA steps of Q·Kᵀ
constexpr int kKvSteps = kKvPerWarp / 16;               // MMA steps of P·V with own probabilities
constexpr int kQTileBytes = Config::block_q * Config::head_dim * 2;
constexpr int kKvTileBytes = Config::block_kv * Config::head_dim * 2;
// Q stays in registers where it fits beside the accumulators; otherwise every key tile reads it
// from shared memory again.
constexpr bool kQInRegisters = kMTiles * (kDSteps * 4 + kDTiles * 4 + kKvTiles * 4) <= 168;
// Wide tiles fill the registers and take many copies: what a CTA agrees on stays in shared memory,
// and whole key tiles are copied from one address per thread. V tile 0 is started before the loop,
// which in narrow tiles costs more in each step, for the branch around the later ones.
constexpr bool kWide = Config::head_dim >= 96;

static_assert(kRowsPerWarp % 16 == 0, "a warp computes whole MMA tiles");
static_assert(kDTiles % 4 == 0, "the epilogue stores four MMA tiles at a time");
// With two stages K and V tile i + 1 come during the whole of step i, which needs one barrier.
constexpr bool kTwoStages = Config::stages == 2;
constexpr int kStageBytes = 2 * kKvTileBytes;
static_assert(Config::stages == 1 || kTwoStages, "a K tile and a V tile in shared memory, or two");
// Probabilities of all rows and keys, on their way from a warp to the one that shares its rows.
constexpr int kSharedBytes = kSplit == 1 ? 0 : Config::block_q * Config::block_kv * 2;
static_assert(Config::smem_bytes == kQTileBytes + Config::stages * kStageBytes + kSharedBytes,
              "manifest and kernel disagree on smem");

using QCopy = TileCopy<Config::block_q, kChunks, Config::threads>;
using KvCopy = TileCopy<Config::block_kv, kChunks, Config::threads>;
using TileLayout = Swizzle<kChunks>;

using Scores = float[kMTiles][kKvTiles][4];
using Output = float[kMTiles][kDTiles][4];
using QFragments = uint32_t[kMTiles][kDSteps][4];

// The same lane in a tile that is `bytes` behind.
__device__ __forceinline__ LaneAddress<kChunks> moved(LaneAddress<kChunks> lane, uint32_t bytes) {
#pragma unroll
  for (uint32_t& step : lane.step) step += bytes;
  return lane;
}

// s = Q·Kᵀ for the rows of this warp.
__device__ __forceinline__ void compute_scores(Scores& s, const QFragments& q_rmem,
                                               const LaneAddress<kChunks>& q_lane,
                                               const LaneAddress<kChunks>& k_lane) {
  clear(s);
#pragma unroll
  for (int d = 0; d < kDSteps; ++d) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_rmem[m][d][i];
      } else {
        ptx::ldmatrix_x4(a[m], q_lane.at(m * 16, d));
      }
    }
#pragma unroll
    for (int n = 0; n < kKvTiles; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k_lane.at(n * 8, d));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(s[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The 16-byte chunk of a row of V and of O in which this warp's MMA tile d is, from the first one
// of the warp on. Warps that share rows alternate, four chunks each.
constexpr int chunk_of(int d) { return d / 4 * 4 * kSplit + d % 4; }

// Rounded to 16 bits, the score accumulators have the layout of an A operand.
using Probabilities = uint32_t[4];
__device__ __forceinline__ void pack(Probabilities& a, const Scores& p, int m, int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &p[m][2 * k + i / 2][i % 2 * 2];
    a[i] = ElementTraits<Element>::pack(pair[0], pair[1]);
  }
}

// o += P·V. `load` gives the probabilities of MMA tile m and step k.
template <class Load>
__device__ __forceinline__ void accumulate_output(Output& o, const LaneAddress<kChunks>& v_lane,
                                                  const Load& load) {
#pragma unroll
  for (int k = 0; k < kKvSteps; ++k) {
    Probabilities a[kMTiles];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) load(a[m], m, k);
#pragma unroll
    for (int d = 0; d < kDTiles; d += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, v_lane.at(k * 16, chunk_of(d) / 2));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(o[m][d], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(o[m][d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

__device__ __forceinline__ void apply_mask(Scores& s, const AttentionMask& mask, int first_row,
                                           int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = mask.keys_of(first_row + m * 16 + accumulator_row(lane, 2 * half));
#pragma unroll
      for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int key = first_key + n * 8 + accumulator_column(lane, i);
          if (key < keys.begin || key >= keys.end) s[m][n][i] = -CUDART_INF_F;
        }
    }
}

}  // namespace
}  // namespace blockflash

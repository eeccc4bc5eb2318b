// The warps that transpose V, since WGMMA of 8 bits takes its operands K-major: rows of V
// transposed have the keys of a tile.
//
// Of 16 keys the order is that in which a lane holds the scores of a row, 0 1 8 9 2 3 10 11 4 5 12
// 13 6 7 14 15, so that probabilities need no exchange. Of 16 columns the even ones are in rows 0
// to 7 and the odd ones in rows 8 to 15, so that a lane gets four neighbouring columns of the
// output.
//
// An MMA spreads a NaN in V to every row, also to rows from which a mask hides that key. Where a
// mask hides keys, NaN is therefore replaced by -0, and -0 by 0; consumers are told of it, and find
// out for which rows the key was visible.
#pragma once

#include "blockflash/mma/codes.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "blockflash/ptx/permute.cuh"
#include "blockflash/ptx/stmatrix.cuh"
#include "layout.cuh"

namespace blockflash {

constexpr uint32_t kNanMark = 0x80;  // the code of -0

// Four codes with marks in place of NaN.
__device__ __forceinline__ uint32_t with_marks(uint32_t x) {
  const uint32_t nan = nan_bits_e4m3(x);
  const uint32_t nonzero = (x & 0x7f7f7f7f) + 0x7f7f7f7f;  // in the upper bit of each
  const uint32_t minus_zero = x & ~nonzero & 0x80808080;
  return (x & ~((nan >> 7) * 0xff) & ~minus_zero) | nan;
}

// Transposes the share of one warp of a tile and returns whether it has NaN, if that is asked for.
template <bool marks>
__device__ __forceinline__ bool turn_tile(uint32_t from, uint32_t to, int turner) {
  constexpr int kPairs = kD / 32, kAtOnce = marks || kPairs < 4 ? 2 : 4;  // of 16 columns
  constexpr int kChunks = kRowBytes / 16;                                 // of a row of a panel
  // Opaque, since what follows from it takes registers if it is hoisted out of the loop around.
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
  // The swizzle of a lane is the same for all keys and panels. Chunks that are powers of two apart
  // differ in bits of the address, so the address of another one takes one instruction.
  uint32_t source = from + turner * (16 * kRowBytes) + swizzled<kRowBytes>(lane % 16, lane / 16);
  const uint32_t target = to + swizzled<kBlockKv>(lane, 0);
  uint32_t nan = 0;
#pragma unroll 1
  for (int keys = turner; keys < kBlockKv / 16; keys += kTurners) {
    const uint32_t row = target ^ keys << 4;
#pragma unroll(marks ? 1 : kPairs)
    for (int first = 0; first < kPairs; first += kAtOnce) {
      uint32_t in[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        ptx::ldmatrix_x4_trans(in[i], (source ^ 2 * (first + i) % kChunks << 4) +
                                          2 * (first + i) / kChunks * (kBlockKv * kRowBytes));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint32_t out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (marks) {
            nan |= nan_bits_e4m3(in[i][j]);
            in[i][j] = with_marks(in[i][j]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          out[j] = ptx::permute_bytes(in[i][j], in[i][j + 1], 0x6420);
          out[j + 1] = ptx::permute_bytes(in[i][j], in[i][j + 1], 0x7531);
        }
        ptx::stmatrix_x4(row + (first + i) * (32 * kBlockKv), out);
      }
    }
    source += kTurners * 16 * kRowBytes;
  }
  return nan != 0;
}

// A warp transposes its share of every tile.
__device__ __forceinline__ void turn_values(uint32_t smem, const Barriers& barriers, int turner) {
  const int lane = threadIdx.x % 32;
  PhaseBits full = PhaseBits::consumer(), empty = PhaseBits::producer();
  int loaded = 0, turned = 0;
#pragma unroll 1
  for (uint32_t slot = slot_of(smem, 0);; slot = next_slot(smem, slot)) {
    const int q = Barriers::kQ + slot_parity(smem, slot) % Config::q_stages * kWarpgroups;
    full.wait(barriers.full, q);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, q));
    const QueryTile tile = QueryTile::load(slot);
    if (tile.key_tiles < 0) break;
    const UnmaskedTiles unmasked = UnmaskedTiles::of(slot);
#pragma unroll 1
    for (int key_tile = tile.first_key_tile + tile.key_tiles - 1; key_tile >= tile.first_key_tile;
         --key_tile) {
      full.wait(barriers.full, Barriers::kLoaded + loaded);
      empty.wait(barriers.empty, Barriers::kV + turned);
      const uint32_t from = smem + kLoadedOffset + loaded * kKvBytes,
                     to = smem + kVOffset + turned * kKvBytes;
      bool found = false;
      if (unmasked.has(key_tile))
        turn_tile<false>(from, to, turner);
      else
        found = __any_sync(~0u, turn_tile<true>(from, to, turner));
      if (lane == 0) ptx::store_shared(barriers.has_nan + 4 * (turned * kTurners + turner), found);
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(barrier_of(barriers.full, Barriers::kV + turned));
        ptx::mbarrier_arrive(barrier_of(barriers.empty, Barriers::kLoaded + loaded));
      }
      loaded = next_stage<kLoadedStages>(loaded), turned = next_stage<kTurnedStages>(turned);
    }
  }
}

}  // namespace blockflash

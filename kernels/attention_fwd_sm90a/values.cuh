// The constants stored beside V, and the treatment of NaN and infinity in V under a mask: a masked
// probability of 0 times either is NaN, so the tensor cores must not compute those products.
#pragma once

#include <limits.h>

#include "blockflash/mma/element.cuh"
#include "layout.cuh"
#include "score_terms.cuh"

namespace blockflash {

// Stores the ones behind each stage of V, and the page of zeros.
__device__ __forceinline__ void store_constants(uint32_t smem, int thread, int threads) {
  if constexpr (kOnes) {
    constexpr int kPieces = kBlockKv * 128 / 16, kCopies = kSharedOnes ? 1 : kStages,
                  kFirst = kSharedOnes ? kOnesOffset : kVOffset + kVBytes;
    const int ones = ElementTraits<Config::Element>::pack(1.f, 1.f);
    for (int i = thread; i < kCopies * kPieces; i += threads)
      ptx::store_shared_int4(smem + kFirst + i / kPieces * kVStageBytes + i % kPieces * 16,
                             make_int4(ones, ones, ones, ones));
  }
  if (thread < 64) ptx::store_shared_int4(smem + kZerosOffset + thread * 16, make_int4(0, 0, 0, 0));
}

// Zeros in the rows of all tiles of Q behind the first `rows`, which no copy writes.
__device__ __forceinline__ void clear_rows_from(int rows, uint32_t smem, int thread, int threads) {
  constexpr int kPanels = kWarpgroups * Config::q_stages * kQkPanels;
  const int pieces = (64 - rows) * 8;
  for (int i = thread; i < kPanels * pieces; i += threads) {
    const int panel = i / pieces;
    ptx::store_shared_int4(smem + panel * 8192 + rows * 128 + (i - panel * pieces) * 16,
                           make_int4(0, 0, 0, 0));
  }
}

// NaN-scanner warps search V for NaN and infinity where a mask hides keys from some of the queries,
// each in its own part. They follow the rings as consumers do and report to the consumers.
__device__ __forceinline__ void scan_values(uint32_t smem, const Barriers& barriers, int scanner,
                                            int scanners = kScanners) {
  using Traits = ElementTraits<Config::Element>;
  const int lane = threadIdx.x % 32;
  PhaseBits full = PhaseBits::consumer();
  int stage = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int q = Barriers::kQ + n % Config::q_stages * kWarpgroups;
    full.wait(barriers.full, q);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, q));
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    if (tile.key_tiles < 0) break;
    int unmasked_first = 0, unmasked_last = INT_MAX;  // intersection over all warpgroups
#pragma unroll 1
    for (int w = 0; w < kWarpgroups; ++w) {
      const KeyWalk walk = KeyWalk::load(slot + kWalkInSlot + 16 * w);
      if (walk.left > 0)
        unmasked_first = max(unmasked_first, walk.unmasked_first),
        unmasked_last = min(unmasked_last, walk.unmasked_last);
    }
#pragma unroll 1
    for (int key_tile = tile.first_key_tile + tile.key_tiles - 1; key_tile >= tile.first_key_tile;
         --key_tile) {
      KeyStep step = {0};
      if constexpr (kTwoBlockRows) {
        step = StepRing{smem + kStepOffset}.step(key_tile);
        stage = key_tile % kVStages;
      }
      const int its = step.rows() % 3 * kVStages + stage;
      full.wait(barriers.full, Barriers::kV + its);
      bool masked =
          kTwoBlockRows ? step.is_masked() : key_tile < unmasked_first || key_tile > unmasked_last;
      if constexpr (kHasBits) masked |= announced_bits(barriers.bits_of(Barriers::kV + stage)) >= 0;
      if (masked) {
        uint32_t sums = 0;
        const auto scan = [&](const int4& words) {
          for (int word : {words.x, words.y, words.z, words.w})
            sums = Traits::zero_times_plus(word, sums);
        };
        if constexpr (kAddsTerms) {
#pragma unroll
          for (int panel = 0; panel < kVPanels; ++panel) {
            const uint32_t at =
                v_at(smem, stage) + panel * v_panel(stage) + (scanner * 32 + lane) * 16;
#pragma unroll 4
            for (int piece = 0; piece < kPanelBytes / 512; piece += scanners)
              scan(ptx::load_shared_int4(at + piece * 512));
          }
        } else {
          constexpr int kPieces = kVBytes / (512 * kScanners);
          const uint32_t at = v_at(smem, stage) +
                              (kSharedOnes ? scanner * v_panel(stage) : scanner * (kPieces * 512)) +
                              lane * 16;
#pragma unroll 4
          for (int piece = 0; piece < kPieces; ++piece)
            scan(ptx::load_shared_int4(at + piece * 512));
        }
        const bool found = __any_sync(~0u, sums != 0);
        if (lane == 0)
          ptx::store_shared(barriers.has_nonfinite + 4 * (stage * kScanners + scanner), found);
        __syncwarp();
      }
      if (lane == 0) {
        ptx::mbarrier_arrive(barrier_of(barriers.scanned, its));
        ptx::mbarrier_arrive(barrier_of(barriers.empty, Barriers::kV + stage));
      }
      stage = next_stage<kStages>(stage);
    }
  }
}

// An MMA spreads a NaN or infinity in V to every row, also to rows whose probability for that key
// is 0. Under a mask the product with such a V is computed here instead, over the keys that a row
// attends to: o += P·V for the two rows of a lane, whose queries `query_of_row` knows, and the key
// tile from `first_key` on, of which `bits_of_row` says what bits show of one of the rows. This is
// rare, so the code is small rather than fast.
template <class QueryOfRow, class BitsOfRow>
__device__ __forceinline__ void add_visible_products(
    float (&o)[kOutColumns / 2], const uint32_t (&p)[kBlockKv / 4], const AttentionMask& mask,
    const QueryOfRow& query_of_row, int first_key, const BitsOfRow& bits_of_row, uint32_t v_smem,
    int panel_bytes, int from = 0, int to = kBlockKv) {
  using Traits = ElementTraits<Config::Element>;
  const int lane = threadIdx.x % 32;
  // One row after the other: scores and probabilities are live here and leave few registers.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const KeyRange keys = mask.keys_of<int>(query_of_row(half));
    const int begin = keys.begin - first_key, end = keys.end - first_key;
    const uint32_t shown = bits_of_row(half);
#pragma unroll 1
    for (int key = from; key < to; ++key) {
      float probability = 0.f;
#pragma unroll
      for (int i = half; i < kBlockKv / 4; i += 2)
        if (i / 2 == key / 8)
          probability = Traits::to_float(static_cast<uint16_t>(p[i] >> (key % 2 * 16)));
      probability = __shfl_sync(~0u, probability, lane / 4 * 4 + key % 8 / 2);
      bool visible = key >= begin && key < end;
      if constexpr (kHasBits) visible &= shows(shown, key);
      if (!visible) continue;
      const uint32_t v_row = v_smem + key * 128 + lane % 4 * 4;
#pragma unroll
      for (int d = 0; d < kOutColumns / 8; ++d) {
        const uint32_t pair =
            ptx::load_shared(v_row + d / 8 * panel_bytes + (d % 8 ^ key % 8) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          o[4 * d + 2 * half + i] +=
              probability * Traits::to_float(static_cast<uint16_t>(pair >> (i * 16)));
      }
    }
  }
}

}  // namespace blockflash

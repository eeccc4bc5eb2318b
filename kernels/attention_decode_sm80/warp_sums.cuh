// The products and the online softmax of one warp over its steps of 16 keys.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/scores.cuh"
#include "blockflash/decode/partials.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/kv_cache.h"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "blockflash/ptx/movmatrix.cuh"
#include "blockflash/ptx/opaque.cuh"
#include "loader.cuh"

namespace blockflash {
namespace {

constexpr int kRowTiles = Config::rows / 8;     // MMA tiles along rows,
constexpr int kDSteps = Config::head_dim / 16;  // and 16 columns of K or V each
constexpr int kQChunks = Config::head_dim / 8;  // 16-byte chunks of a row of Q
using QLayout = Swizzle<kQChunks>;

__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Where the queries stay: in registers where they fit beside the sums, else in shared memory.
constexpr bool kQInRegisters = kRowTiles * kDSteps <= 16 && kDSteps <= 8;
// Whether scores are sums of two chains of products, since one after another they take long.
constexpr bool kTwoChains = kHasIndex && kRowTiles * kDSteps <= 16;
constexpr int kQBytes = Config::rows * Config::head_dim * 2;

// Starts the copy of the queries of an item by all threads of the CTA, as a part of the group that
// is committed next. Rows and columns that do not exist become zeros. Predecessors have ended then:
// the wait is behind the addresses of the first copy, and behind `addresses` of the keys.
__device__ __forceinline__ void copy_queries(const blockflash_attention_decode_params& p,
                                             const DecodeItem& item, uint32_t q_smem,
                                             uint64_t addresses) {
  constexpr int kCopies = Config::rows * kQChunks;
  const Element* const q = static_cast<const Element*>(p.q);
  const Element* const of_sequence =
      q +
      (p.cu_seqlens_q == nullptr ? item.sequence * p.q_stride_batch
                                 : item.q_begin * p.q_stride_seq) +
      (kHasIndex && p.cu_seqlens_q == nullptr ? item.q_begin * p.q_stride_seq : 0);
  const auto source_of = [&](int at) -> const Element* {
    const int row = item.row_tile * Config::rows + at / kQChunks, column = at % kQChunks * 8;
    const int query = small_quotient(row, p.group);
    if (query >= item.q_length || column >= p.head_dim_qk) return nullptr;
    return of_sequence + query * p.q_stride_seq +
           (item.head_kv * p.group + row - query * p.group) * p.q_stride_head + column;
  };
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const Element* const first = source_of(thread);
  ptx::wait_for_predecessors_behind(reinterpret_cast<uint64_t>(first) ^ addresses);
#pragma unroll 1
  for (int i = 0; i < kCopies; i += Config::threads) {
    const int at = i + thread;
    if (kCopies % Config::threads != 0 && at >= kCopies) break;
    const Element* const from = kCopies <= Config::threads ? first : source_of(at);
    ptx::cp_async_cg_16(q_smem + QLayout::offset(at / kQChunks, at % kQChunks),
                        from == nullptr ? q : from, from == nullptr ? 0 : 16);
  }
}

struct CodesShared;

// Lane (g, t) = (lane / 4, lane % 4) holds the keys or columns g and g + 8 of the rows 2t and 2t +
// 1 of each row tile of 8.
struct WarpSums {
  using QFragments = uint32_t[kRowTiles][2];
  QFragments q[kQInRegisters ? kDSteps : 1];
  float o[kDSteps][kRowTiles][4];   // sums of p·v, transposed
  float reference[kRowTiles][2];    // log2 units, of a row
  float denominator[kRowTiles][2];  // this lane's share
  LaneAddress<kChunks> k_lane, v_lane;
  uint32_t q_tile;

  __device__ __forceinline__ WarpSums(uint32_t ring_smem, int lane, const CodesShared&)
      : k_lane(ring_smem, lane_row_major(lane).row, lane_row_major(lane).chunk),
        v_lane(ring_smem + kTileBytes, lane_of_v(lane).row, lane_of_v(lane).chunk) {}

  // Transposed, two neighbouring codes are one element.
  static __device__ __forceinline__ LaneCoords lane_of_v(int lane) {
    return kHasCodes ? lane_row_major(lane) : lane_col_major(lane);
  }

  // The queries are in shared memory.
  __device__ __forceinline__ void begin_item(uint32_t q_smem, int lane) {
    q_tile = q_smem;
    if constexpr (kQInRegisters)
#pragma unroll
      for (int d = 0; d < kDSteps; ++d) load_queries(q[d], d, lane);
  }

  __device__ __forceinline__ void begin_split() {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) reference[n][e] = kNoReference, denominator[n][e] = 0.f;
#pragma unroll
      for (int d = 0; d < kDSteps; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][n][i] = 0.f;
    }
  }

  // Stores the sums of a row tile; `place_of` has the place of a column of one of its rows.
  template <class Place>
  __device__ __forceinline__ void stage(float* staging, int row_tile, int lane,
                                        const Place& place_of) const {
#pragma unroll
    for (int d = 0; d < kDSteps; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        staging[place_of(lane % 4 * 2 + i % 2, d * 16 + lane / 4 + i / 2 * 8)] = o[d][row_tile][i];
  }

  __device__ __forceinline__ void load_queries(QFragments& to, int d, int lane) const {
    const LaneCoords at = lane_col_major(ptx::opaque(lane));
    if constexpr (kRowTiles == 1) {
      // Lanes 16 to 31 name rows that are not used.
      uint32_t pair[4];
      ptx::ldmatrix_x4(pair, q_tile + QLayout::offset(at.row % 8, 2 * d + at.chunk));
      to[0][0] = pair[0], to[0][1] = pair[1];
    } else {
#pragma unroll
      for (int n = 0; n < kRowTiles; n += 2) {
        uint32_t pair[4];
        ptx::ldmatrix_x4(pair, q_tile + QLayout::offset(n * 8 + at.row, 2 * d + at.chunk));
        to[n][0] = pair[0], to[n][1] = pair[1], to[n + 1][0] = pair[2], to[n + 1][1] = pair[3];
      }
    }
  }

  // Bit 2·n + e is set where row 8·n + 2·(lane % 4) + e attends to the key. In a loop, because
  // registers are short.
  __device__ __forceinline__ static uint32_t rows_that_see(
      const blockflash_attention_decode_params& p, const DecodeItem& item, int key, int lane) {
    const AttentionMask mask = DecodeSequence::mask(p, item.q_length, item.kv_length);
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = item.row_tile * Config::rows + i / 2 * 8 + lane % 4 * 2 + i % 2;
      const KeyRange visible = mask.keys_of(small_quotient(row, p.group));
      bits |= static_cast<uint32_t>(key >= visible.begin && key < visible.end) << i;
    }
    return bits;
  }

  // The same for a key of a step, in which all rows see the same keys where lists name them.
  __device__ __forceinline__ static uint32_t rows_that_see_of(
      const blockflash_attention_decode_params& p, const DecodeItem& item, int first_key, int key,
      int lane) {
    if constexpr (kHasIndex) return first_key >> key & 1 ? ~0u : 0u;
    return rows_that_see(p, item, first_key + key, lane);
  }

  // `terms` are what is added to scores and hidden beyond the window (terms.cuh). With lists the
  // step has bits of its visible keys in place of a first key, the same for all rows, and the keys
  // and values of the others are zeros.
  template <class Terms>
  __device__ __forceinline__ void add_step(const blockflash_attention_decode_params& p,
                                           const DecodeItem& item, unsigned char* ring, int stage,
                                           int first_key, const Terms& terms, int lane) {
    if (kHasIndex && first_key == 0) return;
    const uint32_t offset = stage * kStageBytes;
    float s[kRowTiles][4] = {}, odd[kRowTiles][4] = {};
#pragma unroll
    for (int d = 0; d < kDSteps; ++d) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, k_lane.at(0, d) + offset);
      if constexpr (!kQInRegisters) load_queries(q[0], d, lane);
      const QFragments& q_step = q[kQInRegisters ? d : 0];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        ptx::mma_m16n8k16<Element>(kTwoChains && d % 2 != 0 ? odd[n] : s[n], k, q_step[n][0],
                                   q_step[n][1]);
    }
    if constexpr (kTwoChains)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    cap_scores(s, p.scores);
    terms.add(s, item, first_key, lane);
    if (kHasIndex) {
      hide_keys(s, first_key, lane);
    } else if (first_key < item.all.begin || first_key + kStepKeys > item.all.end ||
               terms.may_hide(item, first_key)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + lane / 4 + half * 8;
        const uint32_t see =
            rows_that_see(p, item, key, lane) & terms.rows_that_see(item, key, lane);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(see >> (2 * n + e) & 1)) s[n][2 * half + e] = -CUDART_INF_F;
      }
      add_visible_nonfinite(p, item, ring + offset + kTileBytes, first_key, terms, lane);
    }
    float subtract[kRowTiles][2];
    move_references(s, p.scores, subtract, [&](int n, int e, float rescale, float) {
#pragma unroll
      for (int d = 0; d < kDSteps; ++d) o[d][n][e] *= rescale, o[d][n][e + 2] *= rescale;
    });
    uint32_t probabilities[kRowTiles][2];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[n][i] = ptx::ex2_approx(fmaf(s[n][i], p.scores.scale_log2, -subtract[n][i % 2]));
#pragma unroll
      for (int e = 0; e < 2; ++e) denominator[n][e] += s[n][e] + s[n][e + 2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        probabilities[n][half] =
            ptx::movmatrix_trans(ElementTraits<Element>::pack(s[n][2 * half], s[n][2 * half + 1]));
    }
#pragma unroll
    for (int d = 0; d < kDSteps; ++d) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, v_lane.at(0, d) + offset);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        ptx::mma_m16n8k16<Element>(o[d][n], v, probabilities[n][0], probabilities[n][1]);
    }
  }

  // Hides the keys of a step whose bits are not set.
  static __device__ __forceinline__ void hide_keys(float (&s)[kRowTiles][4], int visible,
                                                   int lane) {
    if (visible == (1 << kStepKeys) - 1) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (!(visible >> (lane / 4 + half * 8) & 1))
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) s[n][2 * half] = s[n][2 * half + 1] = -CUDART_INF_F;
  }

  // A reference moves when a score of its own row exceeds it, so that a key with nearly all the
  // weight has a probability of 1, which no rounding changes. Other rows have no say in it.
  // `subtract` takes its place in the exponents, where large scores are changed. `rescale_sums`
  // gets the factor of the sums of a row, and by how much its reference moved.
  template <class Rescale>
  __device__ __forceinline__ void move_references(float (&s)[kRowTiles][4],
                                                  const blockflash_scores& scores,
                                                  float (&subtract)[kRowTiles][2],
                                                  const Rescale& rescale_sums) {
    float largest[kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        largest[n][e] = fmaxf(s[n][e], s[n][e + 2]) * scores.scale_log2;
        subtract[n][e] = reference[n][e];
        grew |= largest[n][e] > reference[n][e] || may_be_beyond_fused(reference[n][e]);
      }
    if (!__any_sync(~0u, grew)) return;
    bool beyond = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float all = column_max(largest[n][e]);
        const float moved = fmaxf(all, reference[n][e]);
        const float before = reference[n][e], rescale = ptx::ex2_approx(before - moved);
        reference[n][e] = subtract[n][e] = moved;
        denominator[n][e] *= rescale;
        rescale_sums(n, e, rescale, moved - before);
        beyond |= is_beyond_fused(moved);
      }
    if (!beyond) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!is_beyond_fused(reference[n][e])) continue;
        subtract[n][e] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          s[n][2 * half + e] =
              with_rounded_product(s[n][2 * half + e], scores.scale_log2, scores.inverse_scale_log2,
                                   reference[n][e], 0.f);
      }
  }

  // A NaN or infinity in V reaches all rows of an MMA, also those whose probability for its key is
  // 0. Where a step is masked, such values are therefore added here to the rows that attend to
  // them, and then removed. Rare, so small code.
  template <class Terms>
  __device__ __forceinline__ void add_visible_nonfinite(const blockflash_attention_decode_params& p,
                                                        const DecodeItem& item,
                                                        unsigned char* v_tile, int first_key,
                                                        const Terms& terms, int lane) {
    bool found = false;
    const auto element = [&](int key, int column) {
      return reinterpret_cast<uint16_t*>(v_tile + TileLayout::offset(key, column / 8)) + column % 8;
    };
#pragma unroll 1
    for (int i = lane; i < kStepKeys * Config::head_dim; i += kWarpSize)
      found |= is_nonfinite<Element>(*element(i / Config::head_dim, i % Config::head_dim));
    if (!__any_sync(~0u, found)) return;
#pragma unroll 1
    for (int key = 0; key < kStepKeys; ++key) {
      const uint32_t see = rows_that_see(p, item, first_key + key, lane) &
                           terms.rows_that_see(item, first_key + key, lane);
#pragma unroll
      for (int d = 0; d < kDSteps; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint16_t bits = *element(key, d * 16 + half * 8 + lane / 4);
          const float value =
              is_nonfinite<Element>(bits) ? ElementTraits<Element>::to_float(bits) : 0.f;
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              o[d][n][2 * half + e] += see >> (2 * n + e) & 1 ? value : 0.f;
        }
    }
    __syncwarp();  // all have read the tile before it is changed
#pragma unroll 1
    for (int i = lane; i < kStepKeys * Config::head_dim; i += kWarpSize) {
      uint16_t* const x = element(i / Config::head_dim, i % Config::head_dim);
      if (is_nonfinite<Element>(*x)) *x = 0;
    }
    __syncwarp();
  }
};

}  // namespace
}  // namespace blockflash

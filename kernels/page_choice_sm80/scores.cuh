// Scores of pages: the largest product of a query and the summary of a page.
#pragma once

#include <math_constants.h>

#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/config/page_choice.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/page_choice.h"

namespace blockflash {

// The queries of a sequence, and the columns of the block table that hold its keys.
struct PagedQueries {
  int sequence;
  PackedRows rows;
  int columns;
};

// Eight elements.
struct Chunk {
  static constexpr int size = 8;
  float x[size];

  static __device__ __forceinline__ Chunk of(const uint4& words) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < size; ++i)
      chunk.x[i] = ElementTraits<PageChoiceConfig::Element>::to_float(
          static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2))));
    return chunk;
  }
};

// The part of a query's product with the mean of a page that a lane has elements of.
__device__ __forceinline__ float product(const Chunk& query, const uint4 (&words)[1]) {
  const Chunk mean = Chunk::of(words[0]);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Chunk::size; ++i) sum = fmaf(query.x[i], mean.x[i], sum);
  return sum;
}

// The same for the upper bound of the products with the keys of a page.
__device__ __forceinline__ float product(const Chunk& query, const uint4 (&words)[2]) {
  const Chunk least = Chunk::of(words[0]), most = Chunk::of(words[1]);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Chunk::size; ++i)
    sum += fmaxf(query.x[i] * least.x[i], query.x[i] * most.x[i]);
  return sum;
}

// Sums over `lanes` neighbouring lanes. Each gets one of the `count` sums, in ascending order.
template <int lanes, int count>
__device__ __forceinline__ float sum_over(float (&sums)[count], int lane) {
  constexpr unsigned kAllLanes = 0xFFFFFFFF;
  int distance = lanes / 2;
#pragma unroll
  for (int half = count / 2; half > 0; half /= 2, distance /= 2) {
    const bool is_upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = is_upper ? sums[i + half] : sums[i];
      const float given = is_upper ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(kAllLanes, given, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
  return sums[0];
}

// Scores every column but the first and the last one, with `lanes` lanes for each page.
template <int lanes, int statistics>
__device__ __forceinline__ void score_pages(const blockflash_page_choice_params& p,
                                            const PagedQueries& queries, int head, int part,
                                            float* scores) {
  using Element = PageChoiceConfig::Element;
  constexpr int kWarps = PageChoiceConfig::threads / kWarpSize;
  constexpr int kAtOnce = kWarpSize / lanes;       // pages of an instruction
  constexpr int kLoads = statistics == 1 ? 4 : 2;  // instructions in flight, for each statistic
  constexpr int kBatch = kAtOnce * kLoads;
  constexpr int kLanesOfSum = lanes / kLoads;  // that have the same sum
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int own = lane / lanes, first_element = lane % lanes * Chunk::size;
  const bool has_elements = first_element < p.head_dim;
  const int end = queries.columns - 1;
  const Element* const summaries = static_cast<const Element*>(p.summaries.rows) +
                                   head * p.summaries.stride_head + first_element;
  const Element* const q = static_cast<const Element*>(p.q) +
                           (p.cu_seqlens_q == nullptr ? queries.sequence * p.q_stride_batch
                                                      : queries.rows.begin * p.q_stride_seq) +
                           static_cast<int64_t>(head) * p.group * p.q_stride_head + first_element;
  const uint4 zeros = make_uint4(0, 0, 0, 0);

  for (int64_t first = 1 + (part * kWarps + warp) * kBatch; first < end;
       first += p.parts * kWarps * kBatch) {
    uint4 words[kLoads][statistics];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t column = first + i * kAtOnce + own;
      const bool exists = column < end && has_elements;
      const int page =
          exists ? page_of_column(p.cache, queries.sequence, static_cast<int>(column)) : 0;
      const Element* const at = summaries + page * p.summaries.stride_page;
#pragma unroll
      for (int row = 0; row < statistics; ++row)
        words[i][row] =
            exists ? __ldg(reinterpret_cast<const uint4*>(at + row * p.summaries.stride_statistic))
                   : zeros;
    }
    float best = -CUDART_INF_F;
#pragma unroll 1
    for (int token = 0; token < queries.rows.length; ++token) {
      const Element* row = q + token * p.q_stride_seq;
#pragma unroll 1
      for (int member = 0; member < p.group; ++member, row += p.q_stride_head) {
        const Chunk query =
            Chunk::of(has_elements ? __ldg(reinterpret_cast<const uint4*>(row)) : zeros);
        float sums[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) sums[i] = product(query, words[i]);
        best = fmaxf(best, sum_over<lanes>(sums, lane));  // passes over NaN
      }
    }
    const int64_t column = first + lane % lanes / kLanesOfSum * kAtOnce + own;
    if (column < end && lane % kLanesOfSum == 0) scores[column] = best;
  }
}

template <int statistics>
__device__ __forceinline__ void score_pages(const blockflash_page_choice_params& p,
                                            const PagedQueries& queries, int head, int part,
                                            float* scores) {
  if (p.head_dim <= 64)
    score_pages<8, statistics>(p, queries, head, part, scores);
  else if (p.head_dim <= 128)
    score_pages<16, statistics>(p, queries, head, part, scores);
  else
    score_pages<32, statistics>(p, queries, head, part, scores);
}

__device__ __forceinline__ void score_pages(const blockflash_page_choice_params& p,
                                            const PagedQueries& queries, int head, int part,
                                            float* scores) {
  if (p.summaries.statistics == 1)
    score_pages<1>(p, queries, head, part, scores);
  else
    score_pages<2>(p, queries, head, part, scores);
}

}  // namespace blockflash

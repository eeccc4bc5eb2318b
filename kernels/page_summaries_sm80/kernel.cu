// Summaries of the pages of a cache for sm_80 and newer: the mean of the keys of a page and head,
// or their minimum and maximum.
//
// A CTA reads the keys of one head of one page, each once, and this is bound by memory. All sums
// have one fixed order. Numbers of pages and lengths are clamped, so whatever they are, nothing
// outside the cache is read and nothing outside the summaries is written.
#include <math_constants.h>

#include "blockflash/config/page_choice.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/page_choice.h"

namespace blockflash {
namespace {

using Config = PageSummariesConfig;
using Params = blockflash_page_summaries_params;
using Element = Config::Element;
using Traits = ElementTraits<Element>;

constexpr int kThreads = Config::threads;
constexpr int kChunk = 8;  // elements of a 16-byte load

// The sum of some keys, element by element.
struct Mean {
  static constexpr int rows = 1;
  static __device__ __forceinline__ float start(int) { return 0.f; }
  static __device__ __forceinline__ float joined(int, float a, float b) { return a + b; }
  static __device__ __forceinline__ float end(float x, int keys) {
    return x / static_cast<float>(keys);
  }
};

// The minimum and the maximum; both pass over NaN.
struct Bounds {
  static constexpr int rows = 2;
  static __device__ __forceinline__ float start(int row) {
    return row == 0 ? CUDART_INF_F : -CUDART_INF_F;
  }
  static __device__ __forceinline__ float joined(int row, float a, float b) {
    return row == 0 ? fminf(a, b) : fmaxf(a, b);
  }
  static __device__ __forceinline__ float end(float x, int) { return x; }
};

// Summarises the first `keys` slots of a page, at least one.
template <class Statistics>
__device__ __forceinline__ void summarize(const Params& p, int page, int head, int keys) {
  constexpr int kRows = Statistics::rows;
  __shared__ float parts[kRows][kThreads * kChunk];  // [teams][head_dim] each
  const Element* const k = static_cast<const Element*>(p.cache.k) + page * p.cache.k_stride_page +
                           head * p.cache.k_stride_head;
  const int chunks = p.head_dim / kChunk;
  const int teams = kThreads / chunks;  // each team takes every teams-th key
  const int team = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  if (team < teams) {
    float part[kRows][kChunk];
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int j = 0; j < kChunk; ++j) part[row][j] = Statistics::start(row);
#pragma unroll 1
    for (int first = team; first < keys; first += Config::loads * teams) {
      uint4 words[Config::loads];  // in flight together to hide the latency of memory
#pragma unroll
      for (int i = 0; i < Config::loads; ++i) {
        const int key = min(first + i * teams, keys - 1);
        words[i] =
            __ldg(reinterpret_cast<const uint4*>(k + key * p.cache.k_stride_slot + chunk * kChunk));
      }
#pragma unroll
      for (int i = 0; i < Config::loads; ++i) {
        if (first + i * teams >= keys) break;
        const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const float x = Traits::to_float(static_cast<uint16_t>(pairs[j / 2] >> (16 * (j % 2))));
#pragma unroll
          for (int row = 0; row < kRows; ++row)
            part[row][j] = Statistics::joined(row, part[row][j], x);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int j = 0; j < kChunk; ++j)
        parts[row][team * p.head_dim + chunk * kChunk + j] = part[row][j];
  }
  __syncthreads();
  const blockflash_page_summaries& to = p.summaries;
  for (int i = threadIdx.x; i < kRows * p.head_dim / 2; i += kThreads) {
    const int row = i / (p.head_dim / 2), d = i % (p.head_dim / 2) * 2;
    float x = Statistics::start(row), y = x;
    for (int other = 0; other < teams; ++other) {
      x = Statistics::joined(row, x, parts[row][other * p.head_dim + d]);
      y = Statistics::joined(row, y, parts[row][other * p.head_dim + d + 1]);
    }
    Element* const at = static_cast<Element*>(to.rows) + page * to.stride_page +
                        row * to.stride_statistic + head * to.stride_head + d;
    *reinterpret_cast<uint32_t*>(at) =
        Traits::pack(Statistics::end(x, keys), Statistics::end(y, keys));
  }
}

}  // namespace
}  // namespace blockflash

// Heads come first in the order, since heads of the same keys are neighbours in memory.
BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_page_summaries_params p) {
  using namespace blockflash;
  // One thread decides for all, since the length may change meanwhile.
  __shared__ int page, keys;
  const int head = blockIdx.x % p.num_heads_kv;
  const int index = blockIdx.x / p.num_heads_kv;
  if (threadIdx.x == 0) {
    const int sequence = index / p.most_pages;
    const int length = keys_of_sequence(p.cache, sequence);
    const int first = max(length - p.tokens, 0) / p.cache.page_size;
    const int64_t column = static_cast<int64_t>(first) + index % p.most_pages;
    const int64_t begin = column * p.cache.page_size;
    keys = static_cast<int>(min(max(length - begin, int64_t{0}), int64_t{p.cache.page_size}));
    if (keys > 0) page = page_of_column(p.cache, sequence, static_cast<int>(column));
  }
  __syncthreads();
  if (keys == 0) return;
  if (p.summaries.statistics == 1)
    summarize<Mean>(p, page, head, keys);
  else
    summarize<Bounds>(p, page, head, keys);
}

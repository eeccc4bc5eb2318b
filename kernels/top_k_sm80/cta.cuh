// What the threads of a CTA compute together.
#pragma once

#include "row.cuh"

namespace blockflash {
namespace {

constexpr int kThreads = Config::threads;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kOwnBins = kBins / kThreads;
static_assert(kBins % kThreads == 0 && kWarps <= kWarpSize, "each thread has some bins");
static_assert(kBins >= BLOCKFLASH_TOP_K_MOST, "the bins hold a list, too");

// A column and the key of its score as one number. All are different, and of two equal scores the
// lower column has the larger number. 0: none.
using Candidate = unsigned long long;
constexpr int kColumnBits = 20;
constexpr uint32_t kMostColumns = 1u << kColumnBits;

__device__ __forceinline__ Candidate candidate_of(uint32_t key, int column) {
  if (key == 0) return 0;
  return static_cast<Candidate>(key) << kColumnBits | (kMostColumns - 1 - column);
}
__device__ __forceinline__ int column_of(Candidate candidate) {
  return kMostColumns - 1 - (static_cast<uint32_t>(candidate) & (kMostColumns - 1));
}
__device__ __forceinline__ uint32_t key_in(Candidate candidate) {
  return static_cast<uint32_t>(candidate >> kColumnBits);
}

constexpr int kFewest = kWarpSize;  // candidates among which a warp finds the one that is searched

struct Shared {
  union {
    int counts[kBins];                    // of the candidates in each bin, or
    int32_t list[BLOCKFLASH_TOP_K_MOST];  // chosen columns
  };
  int sums[2][kWarps];
  uint32_t largest[kWarps], least[kWarps];
  Candidate few[kFewest];
  Candidate found;
  int bin, before, inside;  // the bin that is searched, candidates above it and in it
  int count;                // of a list that threads append to
  bool is_last;
};
constexpr int kSharedBytes = 9 * 1024;
static_assert(sizeof(Shared) <= kSharedBytes, "the manifest counts on it");

// The threads of a CTA.
struct Cta {
  Shared& shared;
  Candidate* held;  // [Config::held], in shared memory
  int parity = 0;   // of sums

  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  // The sum of `x` of the threads before this one, and of all. One barrier.
  __device__ __forceinline__ int sum_before(int x, int& all) {
    int reached = x;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int others = __shfl_up_sync(~0u, reached, distance);
      if (lane() >= distance) reached += others;
    }
    // Whoever is ahead writes to the other row.
    int(&sums)[kWarps] = shared.sums[parity];
    parity ^= 1;
    if (lane() == kWarpSize - 1) sums[warp()] = reached;
    __syncthreads();
    const int own = lane() < kWarps ? sums[lane()] : 0;
    all = __reduce_add_sync(~0u, own);
    return reached - x + __reduce_add_sync(~0u, lane() < warp() ? own : 0);
  }

  // The largest and the least key of all threads that have some, which is one of them at least. One
  // barrier, and one between two calls.
  __device__ __forceinline__ void bounds(uint32_t& largest, uint32_t& least) {
    largest = __reduce_max_sync(~0u, largest), least = __reduce_min_sync(~0u, least);
    if (lane() == 0) shared.largest[warp()] = largest, shared.least[warp()] = least;
    __syncthreads();
    const int other = min(lane(), kWarps - 1);
    largest = __reduce_max_sync(~0u, shared.largest[other]);
    least = __reduce_min_sync(~0u, shared.least[other]);
  }

  __device__ __forceinline__ void clear_bins() {
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) shared.counts[i * kThreads + thread()] = 0;
    __syncthreads();
  }

  // Counts a bin where `counts`. All lanes of a warp call this. Those that count the first lane's
  // bin are added at once, since equal scores would make them wait for one another.
  __device__ __forceinline__ void count_bin(int bin, bool counts) {
    const unsigned counting = __ballot_sync(~0u, counts);
    if (counting == 0) return;
    const int leader = __ffs(static_cast<int>(counting)) - 1;
    const int common = __shfl_sync(~0u, bin, leader);
    const unsigned same = __ballot_sync(~0u, counts && bin == common);
    if (lane() == leader)
      atomicAdd(shared.counts + common, __popc(same));
    else if (counts && bin != common)
      atomicAdd(shared.counts + bin, 1);
  }

  // Finds the bin, from the highest one down, in which the `wanted`-th is, into `shared`. There are
  // as many. Three barriers.
  __device__ __forceinline__ void find_bin(int wanted) {
    __syncthreads();
    const int first = kBins - 1 - thread() * kOwnBins;
    int own[kOwnBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) sum += own[i] = shared.counts[first - i];
    int all;
    int before = sum_before(sum, all);
    if (before < wanted && wanted <= before + sum) {
      int bin = first;
#pragma unroll
      for (int i = 0; i < kOwnBins - 1; ++i)
        if (bin == first - i && before + own[i] < wanted) before += own[i], --bin;
      shared.bin = bin, shared.before = before, shared.inside = shared.counts[bin];
    }
    __syncthreads();
  }

  // Places in a list for what the lanes of a warp append, `mine` each; the lanes' own first one.
  __device__ __forceinline__ int places(int mine) {
    int reached = mine;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int others = __shfl_up_sync(~0u, reached, distance);
      if (lane() >= distance) reached += others;
    }
    int first = 0;
    if (lane() == kWarpSize - 1 && reached > 0) first = atomicAdd(&shared.count, reached);
    return __shfl_sync(~0u, first, kWarpSize - 1) + reached - mine;
  }
};

}  // namespace
}  // namespace blockflash

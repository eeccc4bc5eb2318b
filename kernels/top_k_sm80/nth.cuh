// The n-th largest of many candidates, by a CTA.
#pragma once

#include "cta.cuh"

namespace blockflash {
namespace {

// Where candidates are: in shared memory; where the parts of a row left them, if there are counts;
// or all columns of a row, if there are scores.
struct Source {
  int size;
  const Candidate* left;   // [parts, most]
  const uint32_t* counts;  // [parts]
  int most;
  const float* scores;  // of the first of the columns
  int begin;            // that one

  static __device__ __forceinline__ Source held(int count) { return {count}; }
  static __device__ __forceinline__ Source parts(const Candidate* left, const uint32_t* counts,
                                                 int parts, int most) {
    return {parts * most, left, counts, most};
  }
  static __device__ __forceinline__ Source columns(const Row& row, int begin, int end) {
    return {end - begin, nullptr, nullptr, 0, row.scores + begin, begin};
  }

  // The candidate in a place, or 0.
  __device__ __forceinline__ Candidate at(const Cta& cta, int i) const {
    if (scores != nullptr) return candidate_of(valid_key_of(__ldcg(scores + i)), begin + i);
    if (counts == nullptr) return cta.held[i];
    const int part = i / most;
    return i - part * most < static_cast<int>(__ldcg(counts + part)) ? __ldcg(left + i) : 0;
  }
};

// Calls `visit` for each candidate, or 0, with all lanes of each warp together.
template <class Visit>
__device__ __forceinline__ void each_candidate(const Cta& cta, const Source& source, Visit visit) {
  constexpr int kAtOnce = 4;  // loads
#pragma unroll 1
  for (int first = Cta::warp() * kWarpSize; first < source.size; first += kAtOnce * kThreads) {
    Candidate x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kThreads + Cta::lane();
      x[j] = i < source.size ? source.at(cta, i) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + j * kThreads < source.size) visit(x[j]);
  }
}

struct Nth {
  Candidate least;  // the least one that is chosen
  int count;        // of those chosen: `wanted`, or as many as there are
};

// Finds the `wanted` largest, at least 1. Everybody has met since the source was written.
__device__ __forceinline__ Nth nth_largest(Cta& cta, const Source& source, const int count) {
  Shared& shared = cta.shared;
  uint32_t largest = 0, least = ~0u;
  int valid = 0;
  each_candidate(cta, source, [&](Candidate x) {
    const uint32_t key = key_in(x);
    largest = max(largest, key);
    if (x != 0) least = min(least, key), ++valid;
  });
  int all;
  cta.sum_before(valid, all);
  if (all <= count) return {1, all};
  cta.bounds(largest, least);
  const Candidate base = static_cast<Candidate>(least) << kColumnBits;
  // Bits in which candidates may differ.
  int shift = kColumnBits + 32 - __clz(static_cast<int>(largest - least));
  int wanted = count;   // of those that are searched
  Candidate known = 0;  // (candidate - base) >> shift of those that are searched
  while (true) {
    const int bits = min(shift, kBinBits);
    const int next = shift - bits;
    cta.clear_bins();
    each_candidate(cta, source, [&](Candidate x) {
      const Candidate above = x - base;
      const bool counts = x != 0 && above >> shift == known;
      cta.count_bin(static_cast<int>(above >> next) & (1 << bits) - 1, counts);
    });
    cta.find_bin(wanted);
    known = known << bits | static_cast<Candidate>(shared.bin);
    wanted -= shared.before;
    shift = next;
    const int inside = shared.inside;
    if (inside == wanted || shift == 0) return {base + (known << shift), count};
    if (inside <= kFewest) break;
  }
  if (Cta::thread() == 0) shared.count = 0;
  if (Cta::thread() < kFewest) shared.few[Cta::thread()] = 0;
  __syncthreads();
  each_candidate(cta, source, [&](Candidate x) {
    if (x == 0 || (x - base) >> shift != known) return;
    const int at = atomicAdd(&shared.count, 1);
    if (at < kFewest) shared.few[at] = x;
  });
  __syncthreads();
  if (Cta::warp() == 0) {
    const Candidate own = shared.few[Cta::lane()];
    int larger = 0;
    for (int i = 0; i < kFewest; ++i) larger += shared.few[i] > own;
    if (own != 0 && larger == wanted - 1) shared.found = own;
  }
  __syncthreads();
  return {shared.found, count};
}

}  // namespace
}  // namespace blockflash

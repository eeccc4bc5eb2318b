// The n-th largest of many candidates, by a CTA.
//
// A source has
//   size()   places, and
//   at(i)    the candidate of one of them, or 0.
#pragma once

#include "cta.cuh"

namespace blockflash {
namespace {

// Candidates in shared memory.
struct HeldCandidates {
  const Candidate* held;
  int count;

  __device__ __forceinline__ int size() const { return count; }
  __device__ __forceinline__ Candidate at(int i) const { return held[i]; }
};

// All columns of a row from `begin` to `end`.
struct RowCandidates {
  const float* scores;
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
  __device__ __forceinline__ Candidate at(int i) const {
    return candidate_of(valid_key_of(__ldcg(scores + begin + i)), begin + i);
  }
};

// Calls `visit` for each candidate, or 0, with all lanes of each warp together.
template <class Source, class Visit>
__device__ __forceinline__ void each_candidate(const Source& source, Visit visit) {
  const int size = source.size();
#pragma unroll 4
  for (int first = Cta::warp() * kWarpSize; first < size; first += kThreads) {
    const int i = first + Cta::lane();
    visit(i < size ? source.at(i) : Candidate{0});
  }
}

struct Nth {
  Candidate least;  // the least one that is chosen
  int count;        // of those chosen: `wanted`, or as many as there are
};

// Finds the `wanted` largest, at least 1. Everybody has met since the source was written.
template <class Source>
__device__ __forceinline__ Nth nth_largest(Cta& cta, const Source& source, const int count) {
  Shared& shared = cta.shared;
  uint32_t largest = 0, least = ~0u;
  int valid = 0;
  each_candidate(source, [&](Candidate x) {
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
    each_candidate(source, [&](Candidate x) {
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
  each_candidate(source, [&](Candidate x) {
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

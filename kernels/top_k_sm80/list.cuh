// Lists of chosen columns.
#pragma once

#include "nth.cuh"

namespace blockflash {
namespace {

// Calls `place(i, candidate)` for each candidate from the least one on, with numbers i in any
// order. One barrier before and none behind.
template <class Place>
__device__ __forceinline__ void place_from(Cta& cta, const Source& source, Candidate least,
                                           Place place) {
  if (Cta::thread() == 0) cta.shared.count = 0;
  __syncthreads();
  each_candidate(cta, source, [&](Candidate x) {
    const bool is_chosen = x >= least && x != 0;
    const unsigned all = __ballot_sync(~0u, is_chosen);
    if (all == 0) return;
    int first = 0;
    if (Cta::lane() == 0) first = atomicAdd(&cta.shared.count, __popc(all));
    first = __shfl_sync(~0u, first, 0);
    if (is_chosen) place(first + __popc(all & (1u << Cta::lane()) - 1), x);
  });
}

// Writes the columns of shared.list, `count` from `begin` on and before `end`, in ascending order:
// they become bits, which are listed in turn. The candidates in shared memory are overwritten.
__device__ __forceinline__ void write_ascending(Cta& cta, int count, int begin, int end,
                                                int32_t* list) {
  constexpr int kWords = Config::held * sizeof(Candidate) / 4;  // that shared memory holds
  uint32_t* const bits = reinterpret_cast<uint32_t*>(cta.held);
  const int words = (end - begin + 31) / 32;
  int place = 0;
#pragma unroll 1
  for (int first = 0; first < words; first += kWords) {
    const int here = min(words - first, kWords);
    __syncthreads();
    for (int i = Cta::thread(); i < here; i += kThreads) bits[i] = 0;
    __syncthreads();
    for (int i = Cta::thread(); i < count; i += kThreads) {
      const int bit = cta.shared.list[i] - begin - first * 32;
      if (bit >= 0 && bit < here * 32) atomicOr(bits + bit / 32, 1u << bit % 32);
    }
    __syncthreads();
    const int own = (here + kThreads - 1) / kThreads;
    const int from = min(Cta::thread() * own, here), to = min(from + own, here);
    int mine = 0, all;
    for (int i = from; i < to; ++i) mine += __popc(bits[i]);
    int at = place + cta.sum_before(mine, all);
    for (int i = from; i < to; ++i)
      for (uint32_t word = bits[i]; word != 0; word &= word - 1) {
        const int column = begin + (first + i) * 32 + __ffs(static_cast<int>(word)) - 1;
        // Nothing is written behind the list, whatever the scores are meanwhile.
        if (at < count) list[at] = column;
        ++at;
      }
    place += all;
  }
}

}  // namespace
}  // namespace blockflash

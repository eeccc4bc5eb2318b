// Rows for CTAs.
#pragma once

#include "blockflash/decode/arrivals.cuh"
#include "blockflash/ptx/launch.cuh"
#include "filter.cuh"
#include "list.cuh"

namespace blockflash {
namespace {

constexpr int kHeldBytes = Config::held * static_cast<int>(sizeof(Candidate));
static_assert(Config::is_of_warps || Config::smem_bytes == kHeldBytes + kSharedBytes,
              "manifest and kernel disagree on smem");
static_assert(kHeldBytes % 16 == 0, "what follows is aligned");

// What the parts of a row left.
struct PartCandidates {
  const Candidate* candidates;  // [parts, k]
  const uint32_t* counts;       // [parts]
  int parts, k;

  __device__ __forceinline__ int size() const { return parts * k; }
  __device__ __forceinline__ Candidate at(int i) const {
    const int part = i / k;
    return i - part * k < static_cast<int>(__ldcg(counts + part)) ? __ldcg(candidates + i) : 0;
  }
};

// Chooses among the candidates of a source and writes the row's list.
template <class Source>
__device__ __forceinline__ void choose(Cta& cta, const Params& p, const Row& row,
                                       const Source& source) {
  Nth nth{1, 0};
  if (row.wanted > 0) nth = nth_largest(cta, source, row.wanted);
  __syncthreads();  // the bins become the list
  place_from(cta, source, nth.count > 0 ? nth.least : ~Candidate{0}, [&](int i, Candidate x) {
    if (i < BLOCKFLASH_TOP_K_MOST) cta.shared.list[i] = column_of(x);
  });
  __syncthreads();
  write_ascending(cta, nth.count, row.free_begin, row.free_end, row.list());
  row.write_rest(p, nth.count, Cta::thread(), kThreads);
}

// By one CTA alone.
__device__ __forceinline__ void choose_alone(Cta& cta, const Params& p, const Row& row) {
  const float bound = row.free() > Config::held ? bound_of(cta, row) : kNoBound;
  hold_from(cta, row, row.free_begin, row.free_end, bound);
  const int count = cta.shared.count;
  __syncthreads();
  const bool is_enough = count >= row.wanted || bound == kNoBound;
  if (is_enough && count <= Config::held)
    choose(cta, p, row, HeldCandidates{cta.held, count});
  else
    choose(cta, p, row, RowCandidates{row.scores, row.free_begin, row.free_end});
}

// Leaves the candidates of a part of a row in the workspace.
__device__ __forceinline__ void leave_candidates(Cta& cta, const Params& p, const Row& row,
                                                 int part, Candidate* candidates,
                                                 uint32_t* counts) {
  int left = 0;
  if (row.free() > Config::held && row.wanted > 0) {
    const int columns = (row.free() + p.parts - 1) / p.parts;
    const int begin = min(row.free_begin + part * columns, row.free_end);
    const int end = min(begin + columns, row.free_end);
    const float bound = bound_of(cta, row);
    hold_from(cta, row, begin, end, bound);
    const int count = cta.shared.count;
    __syncthreads();
    const auto leave = [&](const auto& source) {
      Nth nth{1, count};
      if (count > row.wanted) nth = nth_largest(cta, source, row.wanted);
      left = nth.count;
      place_from(cta, source, nth.least, [&](int i, Candidate x) {
        if (i < p.k) candidates[i] = x;
      });
    };
    if (count <= Config::held)
      leave(HeldCandidates{cta.held, count});
    else
      leave(RowCandidates{row.scores, begin, end});
  }
  if (Cta::thread() == 0) counts[part] = left;
}

__device__ __forceinline__ void choose_with_ctas(const Params& p, unsigned char* smem) {
  Shared& shared = *reinterpret_cast<Shared*>(smem + kHeldBytes);
  Cta cta{shared, reinterpret_cast<Candidate*>(smem)};
  const int index = blockIdx.x / p.parts, part = blockIdx.x - index * p.parts;
  const Row row = Row::of(p, index);
  if (p.parts == 1) {
    ptx::launch_dependents();
    choose_alone(cta, p, row);
    return;
  }
  Arrivals arrivals;
  if (Cta::thread() == 0) arrivals = Arrivals::begin(p.arrivals, LaunchWords::load(p.arrivals));
  Candidate* const candidates =
      reinterpret_cast<Candidate*>(p.candidates) + static_cast<int64_t>(index) * p.parts * p.k;
  uint32_t* const counts = p.counts + static_cast<int64_t>(index) * p.parts;
  leave_candidates(cta, p, row, part, candidates + static_cast<int64_t>(part) * p.k, counts);
  ptx::launch_dependents();
  // What all threads have left comes before the arrival. Every CTA arrives, however long its row
  // is.
  __syncthreads();
  if (Cta::thread() == 0) shared.is_last = arrivals.are_complete_with_this(index, p.parts);
  __syncthreads();
  if (!shared.is_last) return;
  if (row.free() <= Config::held || row.wanted <= 0) {
    choose_alone(cta, p, row);
    return;
  }
  // Other CTAs have just written these counts.
  int all;
  const int own =
      Cta::thread() < p.parts ? min(static_cast<int>(__ldcg(counts + Cta::thread())), p.k) : 0;
  const int before = cta.sum_before(own, all);
  if (all < row.wanted) {
    // The bound was too high, or there are no more.
    choose(cta, p, row, RowCandidates{row.scores, row.free_begin, row.free_end});
  } else if (all > Config::held) {
    choose(cta, p, row, PartCandidates{candidates, counts, p.parts, p.k});
  } else {
    if (Cta::thread() < p.parts) shared.list[Cta::thread()] = before;
    __syncthreads();
    for (int i = Cta::warp(); i < p.parts; i += kWarps) {
      const int first = shared.list[i];
      const int count = (i + 1 < p.parts ? shared.list[i + 1] : all) - first;
      for (int j = Cta::lane(); j < count; j += kWarpSize)
        cta.held[first + j] = __ldcg(candidates + static_cast<int64_t>(i) * p.k + j);
    }
    __syncthreads();
    choose(cta, p, row, HeldCandidates{cta.held, all});
  }
}

}  // namespace
}  // namespace blockflash

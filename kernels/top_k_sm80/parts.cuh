// Rows for CTAs, one or several for each.
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

// The candidates that all parts of a row have left, in shared memory if there is room. Those that
// are enough: if the bound was too high, all columns of the row are candidates.
__device__ __forceinline__ Source gather(Cta& cta, const Params& p, const Row& row,
                                         const Candidate* left, const uint32_t* counts) {
  int all;
  // Other CTAs have just written these.
  const bool has_part = Cta::thread() < p.parts;
  const int own = has_part ? min(static_cast<int>(__ldcg(counts + Cta::thread())), p.k) : 0;
  const int before = cta.sum_before(own, all);
  if (all < row.wanted) return Source::columns(row, row.free_begin, row.free_end);
  if (all > Config::held) return Source::parts(left, counts, p.parts, p.k);
  int32_t* const firsts = cta.shared.list;
  if (has_part) firsts[Cta::thread()] = before;
  __syncthreads();
#pragma unroll 1
  for (int part = Cta::warp(); part < p.parts; part += kWarps) {
    const int first = firsts[part], count = (part + 1 < p.parts ? firsts[part + 1] : all) - first;
    for (int i = Cta::lane(); i < count; i += kWarpSize)
      cta.held[first + i] = __ldcg(left + static_cast<int64_t>(part) * p.k + i);
  }
  __syncthreads();
  return Source::held(all);
}

__device__ __forceinline__ void choose_with_ctas(const Params& p, unsigned char* smem) {
  Shared& shared = *reinterpret_cast<Shared*>(smem + kHeldBytes);
  Cta cta{shared, reinterpret_cast<Candidate*>(smem)};
  const int index = blockIdx.x / p.parts, part = blockIdx.x - index * p.parts;
  Arrivals arrivals;
  if (p.parts > 1 && Cta::thread() == 0)
    arrivals = Arrivals::begin(p.arrivals, LaunchWords::load(p.arrivals));
  const Row row = Row::of(p, index);
  // One CTA is enough for a short row.
  const bool is_long = row.free() > Config::held && row.wanted > 0;
  if (part > 0 && !is_long) return;
  bool is_part = p.parts > 1 && is_long;
  int begin = row.free_begin, end = row.free_end;
  if (is_part) {
    const int columns = (row.free() + p.parts - 1) / p.parts;
    begin = min(begin + part * columns, end), end = min(begin + columns, end);
  }
  const float bound = is_long ? bound_of(cta, row) : kNoBound;
  hold_from(cta, row, begin, end, bound);
  const int count = shared.count;
  __syncthreads();
  const bool is_enough = is_part || count >= row.wanted || bound == kNoBound;
  Source source =
      is_enough && count <= Config::held ? Source::held(count) : Source::columns(row, begin, end);
  Candidate* const left =
      reinterpret_cast<Candidate*>(p.candidates) + static_cast<int64_t>(index) * p.parts * p.k;
  uint32_t* const counts = p.counts + static_cast<int64_t>(index) * p.parts;
  Nth nth;
#pragma unroll 1
  while (true) {
    nth = {~Candidate{0}, 0};
    if (row.wanted > 0) nth = nth_largest(cta, source, row.wanted);
    __syncthreads();  // the bins become the list
    Candidate* const to = left + static_cast<int64_t>(part) * p.k;
    place_from(cta, source, nth.least, [&](int i, Candidate x) {
      if (is_part && i < p.k) to[i] = x;
      if (!is_part && i < BLOCKFLASH_TOP_K_MOST) shared.list[i] = column_of(x);
    });
    if (!is_part) break;
    if (Cta::thread() == 0) counts[part] = nth.count;
    ptx::launch_dependents();
    __syncthreads();  // what all threads have left comes before the arrival
    if (Cta::thread() == 0) shared.is_last = arrivals.are_complete_with_this(index, p.parts);
    __syncthreads();
    if (!shared.is_last) return;
    source = gather(cta, p, row, left, counts);
    is_part = false;
  }
  __syncthreads();
  write_ascending(cta, nth.count, row.free_begin, row.free_end, row.list());
  row.write_rest(p, nth.count, Cta::thread(), kThreads);
}

}  // namespace
}  // namespace blockflash

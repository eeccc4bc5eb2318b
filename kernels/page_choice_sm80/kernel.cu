// The pages of a cache that the queries of each sequence visit, for sm_80 and newer: scores, and
// the choice of the largest ones, in one launch.
//
// The CTAs that share the pages of a sequence and key head write scores to the workspace, and the
// last one to arrive chooses. A score has one fixed order of sums, and scores decide alone, so
// results do not depend on the division or on who comes last.
#include "blockflash/config/page_choice.cuh"
#include "blockflash/decode/arrivals.cuh"
#include "blockflash/params/page_choice.h"
#include "blockflash/ptx/launch.cuh"
#include "choose.cuh"
#include "scores.cuh"

namespace blockflash {
namespace {

// What one thread reads for all, since lengths and offsets may change meanwhile.
__device__ __forceinline__ PagedQueries sequence_of(const blockflash_page_choice_params& p,
                                                    int sequence) {
  const PackedRows rows = p.cu_seqlens_q == nullptr
                              ? PackedRows{0, p.seqlen_q}
                              : PackedRows::of(p.cu_seqlens_q, sequence, p.total_q, p.seqlen_q);
  const int length = keys_of_sequence(p.cache, sequence);
  const int columns = length / p.cache.page_size + (length % p.cache.page_size != 0);
  return {sequence, rows, columns};
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_page_choice_params p) {
  using namespace blockflash;
  __shared__ PagedQueries shared;
  __shared__ bool is_last;
  ptx::wait_for_predecessors();
  Arrivals arrivals;
  if (threadIdx.x == 0) arrivals = Arrivals::begin(p.arrivals, LaunchWords::load(p.arrivals));
  const int tiles = p.batch * p.parts * p.num_heads_kv;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // Heads come first in the order, since heads of the same pages are neighbours in memory.
    const int head = tile % p.num_heads_kv;
    const int part = tile / p.num_heads_kv % p.parts;
    const int sequence = tile / p.num_heads_kv / p.parts;
    if (threadIdx.x == 0) shared = sequence_of(p, sequence);
    __syncthreads();
    const PagedQueries queries = shared;
    const int64_t group = static_cast<int64_t>(sequence) * p.num_heads_kv + head;
    float* const scores = p.scores + group * p.max_pages;
    if (queries.columns > p.list_capacity) score_pages(p, queries, head, part, scores);
    // The scores of all threads come before the arrival. Every CTA arrives, whatever the length is.
    __syncthreads();
    if (threadIdx.x == 0)
      is_last = arrivals.are_complete_with_this(static_cast<int>(group), p.parts);
    __syncthreads();
    // What comes after waits for the lists, but may be launched meanwhile.
    if (tile + gridDim.x >= tiles) ptx::launch_dependents();
    if (is_last) {
      int32_t* const list = p.lists + group * p.list_capacity;
      if (threadIdx.x == 0 && head == 0) p.counts[sequence] = min(queries.columns, p.list_capacity);
      if (queries.columns > p.list_capacity)
        choose_pages(scores, queries.columns, list, p.list_capacity);
      else
        for (int i = threadIdx.x; i < p.list_capacity; i += PageChoiceConfig::threads)
          list[i] = i < queries.columns ? i : 0;
    }
    __syncthreads();  // nobody reads `shared` and `is_last` any more
  }
}

// The transpose of lists of keys, for sm_80 and newer: for each bin of keys the queries that visit
// it, in the order of queries and of their entries, in four launches.
//
// It is a sort of the entries by bin that keeps their order. In the first launch a CTA counts the
// entries of a slab of queries by bin. The second one adds these numbers up over the slabs, and the
// third one over the bins, which are divided into items. In the last one a CTA has a slab again and
// writes each entry to its place. Its warps have neighbouring queries, and a lane finds its place
// among the lanes of its warp by comparing bins, so that results do not depend on who is first.
//
// The lists may change meanwhile, so nothing here relies on equal sums: every access is bounded by
// sizes that are parameters, or by an entry that is read once.
#include "blockflash/attention/index_visits.cuh"
#include "blockflash/config/attention_index_bwd.cuh"

namespace blockflash {
namespace {

using Params = blockflash_attention_index_bwd_params;
using Config = IndexTransposeConfig;
constexpr int kThreads = Config::threads, kWarps = kThreads / kWarpSize;
constexpr int kSlab = BLOCKFLASH_INDEX_SLAB, kWarpQueries = kSlab / kWarps;
constexpr int kListBins = Config::list_bins, kCountBins = kListBins * kWarps;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

// What a query of a slab sees: entries [first, last], of which entry e is in bin
// first_bin + (e << granularity_log2 >> log2 of the width).
struct Listing {
  const int32_t* entries;
  int first, last, first_bin;
};

// Query v of a set. It sees no entry if `first` is beyond `last`.
__device__ __forceinline__ Listing listing_of(const Params& p, int set, int v) {
  const int list = v / p.queries, query = p.first_query + (v - list * p.queries);
  const IndexedSequence sequence = IndexedSequence::of_query(p, query);
  Listing listing;
  listing.entries = p.lists.entries + (set * p.set_lists + list) * p.lists.stride_group +
                    query * p.lists.stride_query;
  listing.first_bin = sequence.first_bin;
  const int row = query - sequence.queries.begin;
  const KeyRange keys = sequence.mask(p).keys_of(row);
  const bool sees = row >= 0 && row < sequence.queries.length && keys.begin < keys.end;
  listing.first = sees ? keys.begin >> p.lists.granularity_log2 : 0;
  listing.last = sees ? (keys.end - 1) >> p.lists.granularity_log2 : -1;
  return listing;
}

// The work of a CTA: a slab of the queries of a set, and a range of bins.
struct Slab {
  int set, index, first_bin, bins;
  int queries;  // of the slab

  __device__ __forceinline__ Slab(const Params& p, int bins_per_cta) {
    const int chunks = (p.bins + bins_per_cta - 1) / bins_per_cta;
    int rest = blockIdx.x;
    first_bin = rest % chunks * bins_per_cta, rest /= chunks;
    index = rest % p.slabs;
    set = rest / p.slabs;
    bins = min(p.bins - first_bin, bins_per_cta);
    queries = min(p.set_lists * p.queries - index * kSlab, kSlab);
  }
  __device__ __forceinline__ int32_t* counts(const Params& p) const {
    return p.counts + (static_cast<int64_t>(set) * p.slabs + index) * p.bins + first_bin;
  }
};

__device__ __forceinline__ Listing* listings() {
  __shared__ Listing listings[kSlab];
  return listings;
}

// Calls visit(query of the slab, place in its list, entry, bin of the CTA) for each entry of the
// queries of a warp, with the lanes together; the bin is beyond `slab.bins` if it is that of
// another CTA, and -1 if the query does not see the entry or if there is none.
template <class Visit>
__device__ __forceinline__ void each_entry(const Params& p, const Slab& slab, Visit visit) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first = warp * kWarpQueries;
  const int count = max(min(slab.queries - first, kWarpQueries), 0) * p.lists.capacity;
  const int shift = bin_width_log2(p) - p.lists.granularity_log2;
#pragma unroll 2
  for (int at = lane; at - lane < count; at += kWarpSize) {
    const bool exists = at < count;
    const int query = exists ? at / p.lists.capacity : 0;
    const int place = at - query * p.lists.capacity;
    const Listing& listing = listings()[first + query];
    const int entry = exists ? listing.entries[place] : -1;
    const bool seen = exists && entry >= listing.first && entry <= listing.last;
    // Bins before the first one of the CTA are beyond the last one as unsigned numbers.
    const int bin = listing.first_bin + (entry >> shift) - slab.first_bin;
    visit(exists, first + query, place, entry, seen ? static_cast<uint32_t>(bin) : ~0u);
  }
}

__device__ __forceinline__ void count(const Params& p, uint32_t* counters) {
  const Slab slab(p, kCountBins);
  for (int bin = threadIdx.x; bin < slab.bins; bin += kThreads) counters[bin] = 0;
  if (threadIdx.x < slab.queries)
    listings()[threadIdx.x] = listing_of(p, slab.set, slab.index * kSlab + threadIdx.x);
  __syncthreads();
  each_entry(p, slab, [&](bool, int, int, int, uint32_t bin) {
    if (bin < slab.bins) atomicAdd(counters + bin, 1);
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < slab.bins; bin += kThreads) slab.counts(p)[bin] = counters[bin];
}

// The numbers of a bin become sums over the slabs before each.
__device__ __forceinline__ void sum(const Params& p) {
  const int chunks = (p.bins + kThreads - 1) / kThreads;
  const int set = blockIdx.x / chunks, bin = blockIdx.x % chunks * kThreads + threadIdx.x;
  if (bin >= p.bins) return;
  int32_t* const counts = p.counts + static_cast<int64_t>(set) * p.slabs * p.bins + bin;
  int sum = 0;
#pragma unroll 8
  for (int slab = 0; slab < p.slabs; ++slab) {
    const int n = counts[static_cast<int64_t>(slab) * p.bins];
    counts[static_cast<int64_t>(slab) * p.bins] = sum;
    sum += n;
  }
  p.lengths[static_cast<int64_t>(set) * p.bins + bin] = sum;
}

// Replaces the numbers of all threads by sums over the threads before each, and returns the sum
// over all of them.
template <int n>
__device__ __forceinline__ void sum_before(int (&values)[n], int (&all)[n]) {
  __shared__ int sums[kWarps][n];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  int own[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    own[i] = values[i];
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, values[i], step);
      if (lane >= step) values[i] += before;
    }
    if (lane == kWarpSize - 1) sums[warp][i] = values[i];
    values[i] -= own[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) {
    all[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) values[i] += sums[w][i];
      all[i] += sums[w][i];
    }
  }
  __syncthreads();  // the next call overwrites the sums
}

__device__ __forceinline__ void divide(const Params& p) {
  const int set = blockIdx.x;
  const int64_t first = static_cast<int64_t>(set) * p.bins;
  blockflash_index_item* const items = p.items + static_cast<int64_t>(set) * p.max_items;
  int totals[3] = {};  // visits, items and parts of the bins before
  for (int bin = threadIdx.x; bin - static_cast<int>(threadIdx.x) < p.bins; bin += kThreads) {
    const int visits = bin < p.bins ? p.lengths[first + bin] : 0;
    const int count = (visits + p.item_visits - 1) / p.item_visits;
    const int parts = count > 1 ? count : 0;
    int before[3] = {visits, count, parts}, all[3];
    sum_before(before, all);
#pragma unroll
    for (int i = 0; i < 3; ++i) before[i] += totals[i], totals[i] += all[i];
    if (bin < p.bins) p.begins[first + bin] = before[0], p.first_part[first + bin] = before[2];
    for (int i = 0; i < count; ++i)
      if (before[1] + i < p.max_items) {
        const int of_items = i * p.item_visits;
        items[before[1] + i] = {bin, before[0] + of_items, min(visits - of_items, p.item_visits),
                                parts > 0 ? before[2] + i : -1};
      }
  }
  for (int i = totals[1] + threadIdx.x; i < p.max_items; i += kThreads) items[i] = {-1, 0, 0, -1};
}

__device__ __forceinline__ void list(const Params& p, uint32_t* counters) {
  const Slab slab(p, kListBins);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t* const own = counters + warp * kListBins;
  for (int i = threadIdx.x; i < kWarps * kListBins; i += kThreads) counters[i] = 0;
  if (threadIdx.x < slab.queries)
    listings()[threadIdx.x] = listing_of(p, slab.set, slab.index * kSlab + threadIdx.x);
  __syncthreads();
  each_entry(p, slab, [&](bool, int, int, int, uint32_t bin) {
    if (bin < slab.bins) atomicAdd(own + bin, 1);
  });
  __syncthreads();
  // The number of a warp and bin becomes the place of its next visit.
  const int32_t* const begins = p.begins + static_cast<int64_t>(slab.set) * p.bins + slab.first_bin;
  for (int bin = threadIdx.x; bin < slab.bins; bin += kThreads) {
    uint32_t next = begins[bin] + slab.counts(p)[bin];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t n = counters[w * kListBins + bin];
      counters[w * kListBins + bin] = next;
      next += n;
    }
  }
  __syncthreads();
  const int64_t entries = entries_of_set(p);
  uint32_t* const visits = p.visits + slab.set * entries;
  int32_t* const places = p.places + slab.set * entries;
  const int bits = run_bits(p);
  each_entry(p, slab, [&](bool exists, int query, int place, int entry, uint32_t bin) {
    const bool here = bin < slab.bins;
    const unsigned peers = __match_any_sync(kAllLanes, here ? bin : ~0u);
    const uint32_t next = here ? own[bin] : 0;
    __syncwarp();  // all have read it before it moves on
    const unsigned before = peers & ((1u << lane) - 1);
    if (here && before == 0) own[bin] = next + __popc(peers);
    __syncwarp();
    const int v = slab.index * kSlab + query;
    const int64_t at = static_cast<int64_t>(v) * p.lists.capacity + place;
    const uint32_t to = next + __popc(before);
    if (here && to < entries) {
      visits[to] = static_cast<uint32_t>(v) << bits | (entry & ((1 << bits) - 1));
      places[at] = to;
    } else if (exists && (here || (bin == ~0u && slab.first_bin == 0))) {
      places[at] = -1;  // by one CTA of the slab
    }
  });
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_bwd_params p) {
  using namespace blockflash;
  __shared__ uint32_t counters[kCountBins];
  if (p.step == BLOCKFLASH_INDEX_COUNT)
    count(p, counters);
  else if (p.step == BLOCKFLASH_INDEX_SUM)
    sum(p);
  else if (p.step == BLOCKFLASH_INDEX_DIVIDE)
    divide(p);
  else
    list(p, counters);
}

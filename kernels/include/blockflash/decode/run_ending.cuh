// The end of an item: who combines the runs of a row tile.
#pragma once

#include "blockflash/decode/arrivals.cuh"
#include "blockflash/decode/run_results.cuh"

namespace blockflash {
namespace {

// What two CTAs tell each other about a share of the rows of a group of runs: the CTA of the run
// with that number, which takes it if it sees the group complete soon, and the CTA that completed
// the group.
enum Claim : uint32_t { kNobody, kTaken, kLeft, kOwned };
// How often a CTA looks whether its group is complete.
constexpr int kPolls = 24;

// A bit for each.
constexpr int kMostShares = 32;

struct Ending {
  uint32_t shares;     // bits of the shares that the CTA combines
  uint32_t left;       // and of those that others left to it
  bool last, is_last;  // whether it completed its group of runs, and the groups
};

// Stores that the run arrived and decides, with one thread, which shares of the group's rows this
// CTA combines: all if it is the last one, or with `helped` only its own, and the first one, which
// has no word. Nobody waits for long: a CTA whose group is not complete soon leaves its share.
__device__ __forceinline__ void arrive(const Arrivals& arrivals, const Slots& slots, int own,
                                       bool helped, Ending& ending) {
  ending.last = arrivals.are_complete_with_this(slots.first, slots.count);
  ending.shares = ending.last ? (helped ? 1u << own | 1 : 1) : 0;
  if (ending.last || !helped || own == 0) return;
  bool complete = false;
#pragma unroll 1
  for (int i = 0; i < kPolls && !complete; ++i)
    complete = arrivals.are_complete(slots.first, slots.count);
  const uint32_t before =
      arrivals.exchange(slots.first + own * slots.step, complete ? kTaken : kLeft);
  if (complete && before == kNobody) ending.shares = 1u << own;
}

// The shares that the other CTAs of a complete group left, requested by a warp.
__device__ __forceinline__ uint32_t left_shares(const Arrivals& arrivals, const Slots& slots,
                                                int own) {
  const int share = threadIdx.x % kWarpSize;
  bool mine = false;
  if (share > 0 && share < slots.count && share != own)
    mine = arrivals.exchange(slots.first + share * slots.step, kOwned) != kTaken;
  return __ballot_sync(~0u, mine);
}

// Ends an item, whose sums are stored, with all threads. Whether runs are computed side by side, so
// that others of the row tile end soon, is up to the caller, and so is whether they are single
// splits.
__device__ __forceinline__ void combine_runs(const blockflash_attention_decode_params& p,
                                             bool are_splits, const DecodeRun& item,
                                             const Arrivals& arrivals, Ending& ending,
                                             bool side_by_side) {
  // Runs that are computed side by side are one group.
  const bool helped = side_by_side && item.runs <= kMostShares;
  const int of_group = helped ? kMostShares : are_splits ? kGroup : kInner;
  const int groups = ceil_div(item.runs, of_group);
  const int group = item.run / of_group, own = item.run - group * of_group;
  Slots slots{item.slot + group * of_group * item.slot_step, item.slot_step,
              min(item.runs - group * of_group, of_group), are_splits};
  const int rows = rows_of(p, item), parts = helped ? slots.count : 1;
  bool is_top = groups == 1;
  Team::sync();  // all have stored
  if (threadIdx.x == 0) arrive(arrivals, slots, own, helped, ending);
  Team::sync();
  const bool last = ending.last;
  uint32_t shares = ending.shares;
  bool requested = !helped || !last;
#pragma unroll 1
  while (shares != 0) {
    const int share = __ffs(static_cast<int>(shares)) - 1;
    shares &= shares - 1;
    if (slots.count > 1) combine_slots(p, item, slots, is_top, {rows, share, parts});
    if (shares != 0 || is_top && requested) continue;
    if (is_top) {
      requested = true;
      if (threadIdx.x < kWarpSize) {
        const uint32_t left = left_shares(arrivals, slots, own);
        if (threadIdx.x == 0) ending.left = left;
      }
      Team::sync();
      shares = ending.left;
      continue;
    }
    Team::sync();
    // With several groups there is a run 1, whose word counts for no group.
    if (threadIdx.x == 0)
      ending.is_last = arrivals.are_complete_with_this(item.slot + item.slot_step, groups);
    Team::sync();
    if (!ending.is_last) return;
    slots = {item.slot, slots.step * of_group, groups, false};
    is_top = true, shares = 1;
  }
}

}  // namespace
}  // namespace blockflash

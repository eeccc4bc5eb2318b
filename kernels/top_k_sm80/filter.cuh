// From the columns of a long row to the few that may be among the largest: those that reach a
// bound, which a sample of the row suggests. A bound that turns out to be too high or too low costs
// time alone.
#pragma once

#include <float.h>

#include "cta.cuh"

namespace blockflash {
namespace {

// Below all scores that may be chosen.
constexpr float kNoBound = -FLT_MAX;

// A score that a few more than the `wanted` largest ones of the free columns of a row reach. It
// depends on the row alone, so that all CTAs that share a row find the same.
__device__ __forceinline__ float bound_of(Cta& cta, const Row& row) {
  constexpr int kSamples = 8;  // of a thread
  Shared& shared = cta.shared;
  const int columns = row.free();
  const int samples = columns > 1 << 18 ? kSamples : kSamples / 2;
  const int all = samples * kThreads;
  // Each sample is in a part of its own, at a place that no period of the row meets again and
  // again.
  const float part = static_cast<float>(columns) / static_cast<float>(all);
  uint32_t keys[kSamples];
  uint32_t largest = 0, least = ~0u;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    const int at = i * kThreads + Cta::thread();
    const float place = static_cast<float>(at * 2654435769u >> 8) * (1.f / (1 << 24));
    const int column = min(static_cast<int>((static_cast<float>(at) + place) * part), columns - 1);
    keys[i] = i < samples ? valid_key_of(__ldcg(row.scores + row.free_begin + column)) : 0;
  }
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    largest = max(largest, keys[i]);
    if (keys[i] != 0) least = min(least, keys[i]);
  }
  int valid = 0, all_valid;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) valid += keys[i] != 0;
  cta.sum_before(valid, all_valid);
  // So many samples are expected among the largest columns. With these more, hardly ever too few
  // columns reach the bound.
  const float expected = static_cast<float>(row.wanted) / part;
  const int wanted = static_cast<int>(expected + 4.5f * sqrtf(expected)) + 4;
  if (wanted >= all_valid) return kNoBound;
  cta.bounds(largest, least);
  int shift = 32 - __clz(static_cast<int>(largest - least));
  uint32_t known = 0;
  int left = wanted;
  while (true) {
    const int bits = min(shift, kBinBits);
    const int next = shift - bits;
    cta.clear_bins();
#pragma unroll
    for (int i = 0; i < kSamples; ++i) {
      const uint32_t above = keys[i] - least;
      // A shift by 32 is 0 here.
      const bool counts = keys[i] != 0 && static_cast<uint64_t>(above) >> shift == known;
      cta.count_bin(static_cast<int>(above >> next) & (1 << bits) - 1, counts);
    }
    cta.find_bin(left);
    known = known << bits | static_cast<uint32_t>(shared.bin);
    left -= shared.before;
    shift = next;
    // All of a bin reach the bound: no finer ones if they are few.
    if (shared.inside - left <= wanted / 2 || shift == 0) break;
  }
  return score_of_key(least + (known << shift));
}

// Appends the columns [begin, end) of a row that reach the bound to `held`, as many as there is
// room for, and counts them all in shared.count. Two barriers.
__device__ __forceinline__ void hold_from(Cta& cta, const Row& row, int begin, int end,
                                          float bound) {
  constexpr int kLoads = 4;  // of 16 bytes, of a lane
  Shared& shared = cta.shared;
  if (Cta::thread() == 0) shared.count = 0;
  __syncthreads();
  const int lane = Cta::lane();
  const float* const scores = row.scores;
  const auto append = [&](uint32_t columns, auto column_of_bit) {
    int at = cta.places(__popc(columns));
    for (; columns != 0; columns &= columns - 1) {
      const int column = column_of_bit(__ffs(static_cast<int>(columns)) - 1);
      if (at < Config::held) cta.held[at] = column;
      ++at;
    }
  };
  // The columns before the first and behind the last whole 16 bytes.
  const int before = static_cast<int>(-(reinterpret_cast<uintptr_t>(scores + begin) / 4) & 3);
  const int first = min(begin + before, end), quads = (end - first) / 4;
  if (Cta::warp() == 0) {
    const int rest = first + quads * 4 + lane - 4;
    const int column = lane < 4 ? begin + lane : rest;
    const bool exists = lane < 4 ? column < first : column < end;
    append(exists && lane < 8 && __ldcg(scores + column) >= bound, [&](int) { return column; });
  }
  const float4* const of_quads = reinterpret_cast<const float4*>(scores + first);
#pragma unroll 1
  for (int at = Cta::warp() * kLoads * kWarpSize; at < quads; at += kLoads * kThreads) {
    float4 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int quad = at + i * kWarpSize + lane;
      const float none = -CUDART_INF_F;
      x[i] = quad < quads ? __ldcg(of_quads + quad) : make_float4(none, none, none, none);
    }
    uint32_t reach = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) reach |= (of[j] >= bound ? 1u : 0u) << (4 * i + j);
    }
    append(reach, [&](int bit) { return first + (at + bit / 4 * kWarpSize + lane) * 4 + bit % 4; });
  }
  __syncthreads();
  // Now their keys.
  const int held = min(shared.count, Config::held);
#pragma unroll 4
  for (int i = Cta::thread(); i < held; i += kThreads) {
    const int column = static_cast<int>(cta.held[i]);
    cta.held[i] = candidate_of(valid_key_of(__ldcg(scores + column)), column);
  }
}

}  // namespace
}  // namespace blockflash

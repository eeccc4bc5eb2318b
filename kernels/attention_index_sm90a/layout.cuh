// Shared memory, barriers, and the order of steps.
#pragma once

#include "blockflash/attention/index_tiles.cuh"
#include "blockflash/config/attention_index_hopper.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/shared.cuh"

namespace blockflash {
namespace {

using Config = AttentionIndexHopperConfig;
using Element = Config::Element;
using Params = blockflash_attention_index_tma_params;

constexpr int kRows = 64;  // of a row group, the rows of a warpgroup
constexpr int kKeys = Config::step_keys, kStages = Config::stages;
constexpr int kPanels = Config::head_dim / 64;
// Panels of 64 columns with rows of 128 bytes, the layout of the 128-byte swizzle.
constexpr int kPanelBytes = kKeys * 128, kQPanelBytes = kRows * 128;
constexpr int kStageBytes = kPanels * kPanelBytes, kQBytes = kPanels * kQPanelBytes;

constexpr int kKOffset = kRowGroups * kQBytes, kVOffset = kKOffset + kStages * kStageBytes,
              kZerosOffset = kVOffset + kStages * kStageBytes, kSharedOffset = kZerosOffset + 1024;

// A step has kKeys keys of listed blocks. Keys that are neighbours in one block are a segment.
constexpr int kMostSegments = kKeys / 16;

// A tile and what follows from it.
struct Work {
  IndexTile tile;
  int number;  // of the tile in the workspace
  int steps[kKinds];
  KeyRange unmasked[kRowGroups];   // keys that all queries of a row group see
  uint64_t everybody[kRowGroups];  // the members of a block that all of them list
};

// What a step tells those who mask scores.
struct Step {
  int first_key[kMostSegments];
  uint64_t members[kMostSegments][kRowGroups];
  uint32_t is_masked[kRowGroups];
};

constexpr int kWorks = 4;
struct Shared {
  Work works[kWorks];
  Step steps[kStages];          // of the keys in each stage
  uint32_t scans[kStages];      // of the values in each stage: whether they are scanned,
  uint32_t nonfinite[kStages];  // and whether they hold NaN or infinity
  uint64_t
      barriers[2 * kKinds * kStages + kKinds * kStages + 2 * kStages + 2 * kRowGroups + 2 * kWorks];
};
static_assert(sizeof(Shared) <= 2048 && Config::smem_bytes == kSharedOffset + 2048,
              "manifest and kernel disagree on shared memory");

// Keys and values of a stage have a "full" mbarrier for each kind of step, so that a warpgroup
// counts the phases of its own steps only. Scanners complete the phase of `scanned` behind that of
// `v_full`.
struct Barriers {
  uint32_t k_full, v_full, scanned;  // kind · kStages + stage
  uint32_t k_empty, v_empty;
  uint32_t q_full, q_empty;  // of a row group
  uint32_t work_full, work_empty;
  static constexpr int kWarps = 8, kScanners = 1;
  // Those who read a tile beside the consumers' warps: two loaders and a scanner.
  static constexpr int kReaders = kWarps + 2 + kScanners;

  __device__ __forceinline__ explicit Barriers(Shared& shared)
      : k_full(static_cast<uint32_t>(__cvta_generic_to_shared(shared.barriers))),
        v_full(barrier_of(k_full, kKinds * kStages)),
        scanned(barrier_of(v_full, kKinds * kStages)),
        k_empty(barrier_of(scanned, kKinds * kStages)),
        v_empty(barrier_of(k_empty, kStages)),
        q_full(barrier_of(v_empty, kStages)),
        q_empty(barrier_of(q_full, kRowGroups)),
        work_full(barrier_of(q_empty, kRowGroups)),
        work_empty(barrier_of(work_full, kWorks)) {}

  __device__ __forceinline__ void init() const {
    const auto init = [](uint32_t barriers, int count, int arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier_of(barriers, i), arrivals);
    };
    init(k_full, 2 * kKinds * kStages, 1);  // and v_full
    init(scanned, kKinds * kStages, kScanners);
    init(k_empty, kStages, kWarps);
    init(v_empty, kStages, kWarps + kScanners);
    init(q_full, kRowGroups, 1);
    init(q_empty, kRowGroups, kWarps / kRowGroups);
    init(work_full, kWorks, 1);
    init(work_empty, kWorks, kReaders);
    ptx::fence_mbarrier_init();
  }
};

// The order of the steps of a tile. What one row group has more than the other comes first, then
// steps for the first and for the second one alternate, then those for both come. So a warpgroup
// waits for more than one step of the other one at the beginning of a tile only, when it holds no
// stage.
struct StepOrder {
  int more_kind, more, rounds, both;

  __device__ __forceinline__ explicit StepOrder(const int (&steps)[kKinds])
      : more_kind(steps[1] > steps[0]),
        more(abs(steps[0] - steps[1])),
        rounds(min(steps[0], steps[1])),
        both(steps[kBothKind]) {}

  __device__ __forceinline__ int all() const { return more + 2 * rounds + both; }
  // The kind of the step at a position, and its number among those of its kind.
  __device__ __forceinline__ int kind_at(int position, int& number) const {
    if (position < more) {
      number = position;
      return more_kind;
    }
    position -= more;
    if (position < 2 * rounds) {
      const int kind = position % 2;
      number = position / 2 + (kind == more_kind ? more : 0);
      return kind;
    }
    number = position - 2 * rounds;
    return kBothKind;
  }
  // The steps of a row group, and the position of one of them.
  __device__ __forceinline__ int steps_of(int which) const {
    return (which == more_kind ? more : 0) + rounds + both;
  }
  __device__ __forceinline__ int position_of(int which, int step) const {
    if (which == more_kind) {
      if (step < more) return step;
      step -= more;
    }
    if (step < rounds) return more + 2 * step + which;
    return more + rounds + step;
  }
};

}  // namespace
}  // namespace blockflash

// The producer warps: one finds tiles and loads queries, two load keys and values, and one searches
// values for NaN and infinity.
#pragma once

#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/tensor_copy.cuh"
#include "layout.cuh"

namespace blockflash {
namespace {

// Steps of a kind of which there are so many entries.
__device__ __forceinline__ int steps_of_entries(int entries, int granularity_log2) {
  return static_cast<int>(((static_cast<int64_t>(entries) << granularity_log2) + kKeys - 1) /
                          kKeys);
}

// Describes the tiles that this CTA takes, each while the one before is computed, and loads their
// queries.
__device__ __forceinline__ void schedule(const Params& params, Shared& shared,
                                         const Barriers& barriers, uint32_t smem) {
  const blockflash_attention_decode_params& d = params.index.scaled.decode;
  const blockflash_index_unions& unions = params.unions;
  const int lane = threadIdx.x % kWarpSize;
  uint32_t* const counter = d.tile_counter;
  int number = blockIdx.x;
#pragma unroll 1
  for (int n = 0;; ++n) {
    IndexTile tile = {};
    tile.sequence = -1;
    if (number < unions.count) tile = reinterpret_cast<const IndexTile*>(unions.tiles)[number];
    const bool exists = tile.sequence >= 0;
    wait_empty<kWorks>(barriers.work_empty, n);
    Work& work = shared.works[n % kWorks];
    if (lane == 0) work.tile = tile, work.number = number;
    if (exists && lane < kKinds)
      work.steps[lane] = steps_of_entries(lane == 0   ? tile.listed[0]
                                          : lane == 1 ? tile.listed[1]
                                                      : tile.listed[2],
                                          params.index.lists.granularity_log2);
    if (exists && lane < kRowGroups) {
      const RowGroup rows = RowGroup::of(unions, tile, lane);
      work.unmasked[lane] = mask_of(params.index, tile).keys_of_all(rows.begin, rows.end - 1);
      work.everybody[lane] = bits_below(rows.queries());
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.work_full, n % kWorks));
    // The last CTA that gets none leaves the counter as it was.
    if (!exists) {
      if (lane == 0 && counter != nullptr &&
          ptx::atomic_inc_acq_rel(counter + 1, gridDim.x - 1) == gridDim.x - 1)
        counter[0] = 0;
      return;
    }
    uint32_t taken = 0;
    if (lane == 0 && counter != nullptr) taken = atomicAdd(counter, 1u);
    if (lane < kRowGroups) {
      const RowGroup rows = RowGroup::of(unions, tile, lane);
      const uint32_t full = barrier_of(barriers.q_full, lane);
      const bool packed = d.cu_seqlens_q != nullptr;
      wait_empty<1>(barrier_of(barriers.q_empty, lane), n);
      ptx::mbarrier_arrive_expect_tx(full, kPanels * 128 * unions.pack * unions.pack_queries);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        ptx::tensor_copy_4d(smem + lane * kQBytes + panel * kQPanelBytes, &params.q, panel * 64,
                            tile.unit * d.group + rows.pack * unions.pack,
                            tile.q_begin + rows.begin, packed ? 0 : tile.sequence, full);
    }
    __syncwarp();
    number = counter != nullptr ? gridDim.x + __shfl_sync(~0u, taken, 0) : number + gridDim.x;
  }
}

// The keys of a box: lane i knows box i of each step.
struct Box {
  int block, offset;  // its first key is that many keys behind the beginning of the block
  uint64_t members[kRowGroups];
  bool is_listed;

  // Asks the workspace.
  __device__ __forceinline__ static Box of(const Params& params, const Work& work, int kind,
                                           int step, int row) {
    const int log2 = params.index.lists.granularity_log2;
    const int listed = kind == 0   ? work.tile.listed[0]
                       : kind == 1 ? work.tile.listed[1]
                                   : work.tile.listed[2];
    const int64_t key = static_cast<int64_t>(step) * kKeys + row;
    const int entry = static_cast<int>(key >> log2);
    Box box = {0, static_cast<int>(key & ((1 << log2) - 1)), {0, 0}, entry < listed && row < kKeys};
    if (!box.is_listed) return box;
    const ListedPlaces places(params.unions, params.index.lists.capacity, work.number);
    const int64_t place = places.of(kind, entry);
    box.block = __ldcg(params.unions.entries + place);
    const int words = params.unions.member_words, queries = params.unions.pack_queries;
    const uint32_t* const bits = params.unions.members + place * words;
    uint64_t low = __ldcg(bits), high = 0;
    if (words > 1) low |= static_cast<uint64_t>(__ldcg(bits + 1)) << 32;
    if (words > 2) high = __ldcg(bits + 2);
    if (words > 3) high |= static_cast<uint64_t>(__ldcg(bits + 3)) << 32;
    box.members[0] = low & bits_below(queries);
    box.members[1] =
        queries >= 64 ? high : (low >> queries | high << (64 - queries)) & bits_below(queries);
    return box;
  }
  __device__ __forceinline__ int first_key(const Params& params) const {
    return (block << params.index.lists.granularity_log2) + offset;
  }
  __device__ __forceinline__ bool is_masked(const Params& params, const Work& work,
                                            int which) const {
    const int key = first_key(params);
    return !is_listed || members[which] != work.everybody[which] ||
           key < work.unmasked[which].begin || key + params.box_rows > work.unmasked[which].end;
  }
};

// Where the keys of a box are. Those that do not exist are in the page behind the last one, which
// TMA reads as zeros. Slots behind the last key of a sequence hold anything; they are masked.
struct Place {
  int page, slot;

  __device__ __forceinline__ static Place of(const Params& params, const Work& work,
                                             const Box& box) {
    const blockflash_kv_cache& cache = params.index.scaled.decode.cache;
    const int key = box.first_key(params);
    if (!box.is_listed || key >= work.tile.kv_length) return {cache.pages, 0};
    if (cache.block_table == nullptr)
      return {params.index.cu_seqlens_kv != nullptr ? 0 : work.tile.sequence,
              work.tile.kv_begin + key};
    const int column = key / cache.page_size;
    return {page_of_column(cache, work.tile.sequence, column), key - column * cache.page_size};
  }
};

// Loads the keys, or the values, of all steps with the lanes of a warp. Entries are asked for two
// steps ahead and their pages one step ahead, while stages become free.
template <bool values>
__device__ __forceinline__ void load_steps(const Params& params, Shared& shared,
                                           const Barriers& barriers, uint32_t smem) {
  const int lane = threadIdx.x % kWarpSize, row = min(lane * params.box_rows, kKeys);
  const uint32_t full = values ? barriers.v_full : barriers.k_full,
                 empty = values ? barriers.v_empty : barriers.k_empty;
  const blockflash_tensor_map& map = values ? params.v : params.k;
  const uint32_t ring = smem + (values ? kVOffset : kKOffset);
  int all = 0;  // steps of all tiles
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_full<kWorks>(barriers.work_full, n);
    const Work& work = shared.works[n % kWorks];
    if (work.tile.sequence < 0) return;
    const StepOrder order(work.steps);
    const int steps = order.all();
    const auto box_at = [&](int position) {
      int number = 0;
      const int kind = order.kind_at(position, number);
      if (position >= steps) return Box{0, 0, {0, 0}, false};
      return Box::of(params, work, kind, number, row);
    };
    Box now = box_at(0), next = box_at(1);
    Place place = Place::of(params, work, now);
    const int head = work.tile.unit * params.index.scaled.decode.num_heads_kv / params.index.units;
#pragma unroll 1
    for (int position = 0; position < steps; ++position, ++all) {
      const Place next_place = Place::of(params, work, next);
      const Box after = box_at(position + 2);
      const int stage = all % kStages;
      int number = 0;
      const int kind = order.kind_at(position, number);
      const uint32_t at = barrier_of(full, kind * kStages + stage);
      bool masked[kRowGroups];
#pragma unroll
      for (int which = 0; which < kRowGroups; ++which)
        masked[which] =
            __any_sync(~0u, row < kKeys && kind != 1 - which && now.is_masked(params, work, which));
      wait_empty<kStages>(empty, all);
      if constexpr (values) {
        if (lane == 0) shared.scans[stage] = masked[0] || masked[1];
      } else {
        Step& step = shared.steps[stage];
        const int segment_log2 = min(params.index.lists.granularity_log2, kKeys == 128 ? 7 : 6);
        if (row < kKeys && (row & ((1 << segment_log2) - 1)) == 0) {
          const int segment = row >> segment_log2;
          step.first_key[segment] = now.first_key(params);
#pragma unroll
          for (int which = 0; which < kRowGroups; ++which)
            step.members[segment][which] = now.members[which];
        }
        if (lane < kRowGroups) step.is_masked[lane] = lane == 0 ? masked[0] : masked[1];
      }
      __syncwarp();
      if (lane == 0) {
        // In place of the warpgroup that it is not for.
        if (kind != kBothKind) ptx::mbarrier_arrive_as(barrier_of(empty, stage), 4);
        ptx::mbarrier_arrive_expect_tx(at, kStageBytes);
      }
      __syncwarp();
      if (row < kKeys) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
          ptx::tensor_copy_4d(ring + stage * kStageBytes + panel * kPanelBytes + row * 128, &map,
                              panel * 64, place.slot, head, place.page, at);
      }
      now = next, next = after, place = next_place;
    }
    __syncwarp();  // all have read the tile
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.work_empty, n % kWorks));
  }
}

// Searches the values of steps with a mask for NaN and infinity.
__device__ __forceinline__ void scan_values(Shared& shared, const Barriers& barriers,
                                            uint32_t smem) {
  using Traits = ElementTraits<Element>;
  const int lane = threadIdx.x % kWarpSize;
  PhaseBits full = PhaseBits::consumer();
  int all = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_full<kWorks>(barriers.work_full, n);
    const Work& work = shared.works[n % kWorks];
    if (work.tile.sequence < 0) return;
    const StepOrder order(work.steps);
    const int steps = order.all();
#pragma unroll 1
    for (int position = 0; position < steps; ++position, ++all) {
      int number = 0;
      const int stage = all % kStages, at = order.kind_at(position, number) * kStages + stage;
      full.wait(barriers.v_full, at);
      if (shared.scans[stage]) {
        const uint32_t from = smem + kVOffset + stage * kStageBytes + lane * 16;
        uint32_t sums = 0;
#pragma unroll 8
        for (int piece = 0; piece < kStageBytes / 512; ++piece) {
          const int4 words = ptx::load_shared_int4(from + piece * 512);
          for (int word : {words.x, words.y, words.z, words.w})
            sums = Traits::zero_times_plus(word, sums);
        }
        const bool found = __any_sync(~0u, sums != 0);
        if (lane == 0) shared.nonfinite[stage] = found;
      }
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(barrier_of(barriers.scanned, at));
        ptx::mbarrier_arrive(barrier_of(barriers.v_empty, stage));
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier_of(barriers.work_empty, n % kWorks));
  }
}

}  // namespace
}  // namespace blockflash

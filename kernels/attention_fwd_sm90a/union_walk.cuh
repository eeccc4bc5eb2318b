// The producer where two neighbouring block rows share a CTA. It walks the union of their lists,
// from the last key tile to the first, and each consumer warpgroup computes the tiles of its own
// list. One thread walks and loads Q and K, another one loads V and tells the consumers.
//
// A tile that both rows visit is loaded once, and that saves reads from L2, which bind where lists
// are arbitrary. A warpgroup never touches a stage that holds a foreign tile: the producer arrives
// at the "empty" mbarrier in its place. So it cannot count stages, and the producer tells it what
// to do next by a queue of words, one step each.
#pragma once

#include "blockflash/ptx/mbarrier_many.cuh"
#include "pipeline.cuh"

namespace blockflash {

// What a warpgroup does next. Stage and parity are those of K and of V.
struct Step {
  // Scores of the key tile in `stage`; begin the next query tile; or, without either, complete the
  // pending product.
  static constexpr int kScores = 16, kBegins = 32;
  int word;

  static __device__ __forceinline__ Step of(int stage, int parity, int bits) {
    return {stage | parity << 3 | bits};
  }
  __device__ __forceinline__ int stage() const { return word & 7; }
  __device__ __forceinline__ int parity() const { return word >> 3 & 1; }
  __device__ __forceinline__ bool is(int bits) const { return word & bits; }
};
static_assert(kStages <= 8);

// The queue of a warpgroup's steps: a word and an mbarrier per place. No place is overwritten
// before every warp has read its word: of own key tiles at most kStages are told ahead, since each
// has a stage, and beside them a completion after each, and a query tile without key tiles, which
// waits until the previous one has given its Q back.
struct StepQueue {
  static constexpr int kPlaces = kStepPlaces;
  static_assert(kPlaces >= 2 * kStages + 2 && (kPlaces & (kPlaces - 1)) == 0);
  uint32_t words, told;
  uint32_t turn = 0;

  __device__ __forceinline__ StepQueue(uint32_t smem, int warpgroup)
      : words(smem + kStepsOffset + 4 * kPlaces * warpgroup),
        told(smem + kToldOffset + 8 * kPlaces * warpgroup) {}

  __device__ __forceinline__ void put(Step step) {
    const int at = turn++ % kPlaces;
    ptx::store_shared(words + 4 * at, step.word);
    ptx::mbarrier_arrive(told + 8 * at);
  }
  // The same word in every lane, in a uniform register.
  __device__ __forceinline__ Step take() {
    const int at = turn % kPlaces;
    ptx::mbarrier_wait(told + 8 * at, turn++ / kPlaces & 1);
    return {__shfl_sync(~0u, static_cast<int>(ptx::load_shared(words + 4 * at)), 0)};
  }
};

// After so many foreign key tiles in succession a warpgroup completes its pending product without
// new scores. With more than kStages, the stage of V that it holds would stop the ring before its
// next key tile is told: a deadlock.
constexpr int kPatience = kStages - 1;

// What the checker warp does with a stage of V.
constexpr int kPassValues = 0, kSearchValues = 1, kNoMoreValues = 2;

// A step of the walk, as the thread that loads K passes it on: the rows of V and who visits them.
struct UnionStep {
  // Without kLoads there are no rows. kSearch: a mask concerns them. For row w, shifted by w:
  // kVisits; kTells, there is a step for it, which may begin its query tile.
  static constexpr int kLoads = 1, kSearch = 2, kEnds = 4, kVisits = 8, kTells = 32, kBegins = 128;
  int row, head, batch, flags;

  static constexpr int kPlaces = kStepPlaces;  // as for StepQueue, which is filled from here
  __device__ __forceinline__ void put(uint32_t smem, uint32_t turn) const {
    const int at = turn % kPlaces;
    ptx::store_shared_int4(smem + kUnionOffset + 16 * at, make_int4(row, head, batch, flags));
    ptx::mbarrier_arrive(smem + kToldOffset + 8 * (2 * kPlaces + at));
  }
  static __device__ __forceinline__ UnionStep take(uint32_t smem, uint32_t turn) {
    const int at = turn % kPlaces;
    ptx::mbarrier_wait(smem + kToldOffset + 8 * (2 * kPlaces + at), turn / kPlaces & 1);
    const int4 a = ptx::load_shared_int4(smem + kUnionOffset + 16 * at);
    return {a.x, a.y, a.z, a.w};
  }
};

// The list of a row as the producer walks it.
struct RowWalk {
  int left, all;                      // key tiles that have not been loaded, of all
  int unmasked_first, unmasked_last;  // these need no mask, counted from the first one
  DescendingTiles tiles;

  __device__ __forceinline__ RowWalk(uint32_t slot, int w, const KeyWalk& walk)
      : left(walk.left),
        all(walk.left),
        unmasked_first(walk.unmasked_first - walk.lead),
        unmasked_last(walk.unmasked_last - walk.lead),
        tiles(slot + kListInSlot + 16 * w, left > 0 ? walk.lead + left - 1 : -1) {}
  static __device__ __forceinline__ RowWalk of(uint32_t slot, int w, bool any) {
    return RowWalk(slot, w, any ? KeyWalk::load(slot + kWalkInSlot + 16 * w) : KeyWalk{0, 0, 0, 0});
  }
  __device__ __forceinline__ int next() const { return left > 0 ? tiles.tile() : -1; }
};

// Loads a tile of 64 columns by as many panels as head_dim has.
__device__ __forceinline__ void load_tile(const Barriers& barriers, int at, uint32_t dst, int rows,
                                          const blockflash_tensor_map& map, int row, int head,
                                          int batch) {
  ptx::mbarrier_arrive_expect_tx(barriers.full + 8 * at, rows * 128 * kPanels);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    ptx::tensor_copy_4d(dst + panel * rows * 128, &map, panel * 64, row, head, batch,
                        barriers.full + 8 * at);
}

// Releases a stage in place of a row that does not visit it.
__device__ __forceinline__ void release_foreign(const Barriers& barriers, int at, int visitors) {
  if (visitors != 3) ptx::mbarrier_arrive_many(barriers.empty + 8 * at, 4);
}

// One thread walks and loads Q and K.
__device__ __forceinline__ void load_keys(const Params& params, uint32_t smem,
                                          const Barriers& barriers) {
  Phases empty = {~0u};  // every stage is empty at first
  int stage = 0;
  uint32_t turn = 0;
  // Key tiles since the last own one of each row, up to kPatience.
  int foreign[2] = {kPatience, kPatience};
  const auto copy_q = [&](const TileRows& place, int head, int w, bool wanted) {
    const int at = Barriers::kQ + w;
    empty.wait(barriers.empty, at);
    if (wanted)
      load_tile(barriers, at, smem + w * kQBytes, 64, params.q, place.q + w * kRowStep, head,
                place.batch);
    else
      ptx::mbarrier_arrive(barriers.full + 8 * at);
  };
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(barriers.announced, n & 1);
    const uint32_t slot = slot_of(smem, n);
    const QueryTile tile = QueryTile::load(slot);
    const TileRows place = TileRows::load(slot + kRowsInSlot);
    RowWalk rows[2] = {RowWalk::of(slot, 0, tile.key_tiles > 0),
                       RowWalk::of(slot, 1, tile.key_tiles > 0)};
    bool announced_next = tile.key_tiles < 0;
    const auto announce_next = [&] {
      if (announced_next || max(rows[0].left, rows[1].left) > kAnnounceAhead) return;
      ptx::mbarrier_arrive(barriers.wanted);
      announced_next = true;
    };
    announce_next();
#pragma unroll
    for (int w = 0; w < 2; ++w) copy_q(place, tile.head, w, rows[w].left > 0);
    if (tile.key_tiles <= 0) {
      const int ends = tile.key_tiles < 0 ? UnionStep::kEnds : 0;
      UnionStep{0, 0, 0, 3 * (UnionStep::kTells | UnionStep::kBegins) | ends}.put(smem, turn++);
      foreign[0] = foreign[1] = kPatience;
      if (ends) break;
    }
    bool first = true;
#pragma unroll 1
    while (max(rows[0].left, rows[1].left) > 0) {
      const int next[2] = {rows[0].next(), rows[1].next()}, now = max(next[0], next[1]);
      const int visitors = (next[0] == now) | (next[1] == now) << 1;
      const int row = place.kv + now * kBlockKv;
      empty.wait(barriers.empty, stage);
      release_foreign(barriers, stage, visitors);
      load_tile(barriers, stage, smem + kKOffset + stage * kKvBytes, kBlockKv, params.k, row,
                place.head_kv, place.batch);
      int flags = UnionStep::kLoads | visitors * UnionStep::kVisits;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        RowWalk& walk = rows[w];
        bool tells = visitors >> w & 1, begins = false;
        if (tells) {
          begins = walk.left-- == walk.all;
          if (walk.left > walk.unmasked_last || walk.left < walk.unmasked_first)
            flags |= UnionStep::kSearch;
          walk.tiles.advance();
          foreign[w] = 0;
        } else if (first && walk.all == 0) {
          tells = begins = true;
          foreign[w] = kPatience;
        } else if (foreign[w] < kPatience) {
          tells = ++foreign[w] == kPatience;
        }
        flags |= tells * (UnionStep::kTells << w) | begins * (UnionStep::kBegins << w);
      }
      UnionStep{row, place.head_kv, place.batch, flags}.put(smem, turn++);
      first = false;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      announce_next();
    }
  }
}

// One thread loads V and tells the warpgroups their steps, each after the V before it, so that all
// mbarriers that a step needs are in their last phase and the parity tells.
__device__ __forceinline__ void load_values(const Params& params, uint32_t smem,
                                            const Barriers& barriers) {
  Phases empty = {~0u};
  int stage = 0, parity = 0;
  StepQueue queues[2] = {StepQueue(smem, 0), StepQueue(smem, 1)};
  ptx::wait_for_predecessors();
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    const UnionStep step = UnionStep::take(smem, turn);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const auto is = [&](int bit) { return step.flags & bit << w; };
      if (!is(UnionStep::kTells)) continue;
      const int bits = (is(UnionStep::kVisits) ? Step::kScores : 0) |
                       (is(UnionStep::kBegins) ? Step::kBegins : 0);
      queues[w].put(Step::of(stage, parity, bits));
    }
    if (step.flags & UnionStep::kEnds) break;
    if (!(step.flags & UnionStep::kLoads)) continue;
    const int at = Barriers::kV + stage;
    empty.wait(barriers.empty, at);
    ptx::store_shared(smem + kSearchOffset + 4 * stage,
                      step.flags & UnionStep::kSearch ? kSearchValues : kPassValues);
    release_foreign(barriers, at, step.flags / UnionStep::kVisits & 3);
    load_tile(barriers, at, smem + kVOffset + stage * kVStageBytes, kBlockKv, params.v, step.row,
              step.head, step.batch);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // Tells the checker that no values follow.
  empty.wait(barriers.empty, Barriers::kV + stage);
  ptx::store_shared(smem + kSearchOffset + 4 * stage, kNoMoreValues);
  ptx::mbarrier_arrive(barriers.full + 8 * (Barriers::kV + stage));
}

}  // namespace blockflash

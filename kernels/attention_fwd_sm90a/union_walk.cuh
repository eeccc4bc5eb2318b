// The producer where two neighbouring block rows share a CTA. It walks the union of their lists,
// from the last key tile to the first, and each consumer warpgroup computes the tiles of its own
// list.
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

// The queue of a warpgroup: a word and an mbarrier per place. No place is overwritten before every
// warp has read its word: of own key tiles at most kStages are told ahead, since each has a stage,
// and beside them a completion after each, and a query tile without key tiles, which waits until
// the previous one has given its Q back.
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
// new scores. With more than kStages + 1, the stage of V that it holds would stop the ring before
// its next key tile: a deadlock.
constexpr int kPatience = kStages - 1;

// What the checker warps do with a stage of V.
constexpr int kPassValues = 0, kSearchValues = 1, kNoMoreValues = 2;

// The list of a row as the producer walks it.
struct RowWalk {
  int left;  // key tiles that have not been loaded
  DescendingTiles tiles;

  __device__ __forceinline__ RowWalk(uint32_t slot, int w, bool any)
      : left(any ? KeyWalk::load(slot + kWalkInSlot + 16 * w).left : 0),
        tiles(slot + kListInSlot + 16 * w,
              left > 0 ? KeyWalk::load(slot + kWalkInSlot + 16 * w).lead + left - 1 : -1) {}
  __device__ __forceinline__ int next() const { return left > 0 ? tiles.tile() : -1; }
};

// One thread issues all TMA loads. V of a key tile follows K of the next one, also across query
// tiles. A step is told after the V before it, so that the "full" mbarriers of all that it needs
// are in their last phase and the parity tells.
template <class Given>
__device__ __forceinline__ void produce_union(const Given& kernel_params, uint32_t smem,
                                              const Barriers& barriers) {
  const Params& params = reinterpret_cast<const Params&>(kernel_params);
  Phases empty = {~0u};       // every stage is empty at first
  int stage = 0, parity = 0;  // of the next key tile
  int v_next = -1;            // key tile whose V is still to be loaded, into the stage before
  int v_rows = 0, v_search = kPassValues;  // who visits it, and whether a mask concerns it
  StepQueue steps[2] = {StepQueue(smem, 0), StepQueue(smem, 1)};
  // Key tiles since the last own one of each row, up to kPatience.
  int foreign[2] = {kPatience, kPatience};

  const auto copy = [&](int at, uint32_t dst, int bytes, int box_rows,
                        const blockflash_tensor_map& map, int row, int head, int batch) {
    ptx::mbarrier_arrive_expect_tx(barriers.full + 8 * at, bytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tensor_copy_4d(dst + panel * box_rows * 128, &map, panel * 64, row, head, batch,
                          barriers.full + 8 * at);
  };
  // Loads a key tile, and releases its stage in place of a row that does not visit it.
  const auto copy_keys = [&](int at, uint32_t dst, const blockflash_tensor_map& map, uint32_t slot,
                             int key_tile, int visitors) {
    if (visitors != 3) ptx::mbarrier_arrive_many(barriers.empty + 8 * at, 4);
    const TileRows place = TileRows::load(slot + kRowsInSlot);
    copy(at, dst, kKvBytes, kBlockKv, map, place.kv + key_tile * kBlockKv, place.head_kv,
         place.batch);
  };
  const auto copy_v = [&](uint32_t slot) {
    if (v_next < 0) return;
    const int v_stage = stage == 0 ? kStages - 1 : stage - 1;
    empty.wait(barriers.empty, Barriers::kV + v_stage);
    ptx::store_shared(smem + kSearchOffset + 4 * v_stage, v_search);
    copy_keys(Barriers::kV + v_stage, smem + kVOffset + v_stage * kVStageBytes, params.v, slot,
              v_next, v_rows);
    v_next = -1;
  };
  const auto copy_q = [&](uint32_t slot, int w, bool wanted) {
    const int at = Barriers::kQ + w;
    empty.wait(barriers.empty, at);
    if (!wanted) return ptx::mbarrier_arrive(barriers.full + 8 * at);
    const TileRows place = TileRows::load(slot + kRowsInSlot);
    copy(at, smem + w * kQBytes, kQBytes, 64, params.q, place.q + w * kRowStep,
         QueryTile::load(slot).head, place.batch);
  };

  ptx::wait_for_predecessors();
#pragma unroll 1
  for (int n = 0;; ++n) {
    ptx::mbarrier_wait(barriers.announced, n & 1);
    const uint32_t slot = slot_of(smem, n);
    const int key_tiles = QueryTile::load(slot).key_tiles;  // of the longer row
    RowWalk rows[2] = {RowWalk(slot, 0, key_tiles > 0), RowWalk(slot, 1, key_tiles > 0)};
    bool announced_next = key_tiles < 0;
    const auto announce_next = [&] {
      if (announced_next || max(rows[0].left, rows[1].left) > kAnnounceAhead) return;
      ptx::mbarrier_arrive(barriers.wanted);
      announced_next = true;
    };
    announce_next();
    if (key_tiles <= 0) copy_v(slot_of(smem, n - 1));
#pragma unroll
    for (int w = 0; w < 2; ++w) copy_q(slot, w, rows[w].left > 0);
    if (key_tiles <= 0) {
#pragma unroll
      for (int w = 0; w < 2; ++w) steps[w].put({Step::kBegins}), foreign[w] = kPatience;
      if (key_tiles < 0) break;
    }
    bool first = true;
#pragma unroll 1
    while (max(rows[0].left, rows[1].left) > 0) {
      const int next[2] = {rows[0].next(), rows[1].next()}, now = max(next[0], next[1]);
      empty.wait(barriers.empty, stage);
      const int visitors = (next[0] == now) | (next[1] == now) << 1;
      copy_keys(stage, smem + kKOffset + stage * kKvBytes, params.k, slot, now, visitors);
      copy_v(first ? slot_of(smem, n - 1) : slot);
      v_next = now, v_rows = visitors, v_search = kPassValues;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const KeyWalk walk = KeyWalk::load(slot + kWalkInSlot + 16 * w);
        if (visitors >> w & 1) {
          const int begins = rows[w].left == walk.left ? Step::kBegins : 0;
          const int position = walk.lead + --rows[w].left;
          steps[w].put(Step::of(stage, parity, Step::kScores | begins));
          if (position > walk.unmasked_last || position < walk.unmasked_first)
            v_search = kSearchValues;
          rows[w].tiles.advance();
          foreign[w] = 0;
        } else if (first && walk.left == 0) {
          steps[w].put({Step::kBegins});
          foreign[w] = kPatience;
        } else if (foreign[w] < kPatience && ++foreign[w] == kPatience) {
          steps[w].put({0});
        }
      }
      first = false;
      if (++stage == kStages) stage = 0, parity ^= 1;
      announce_next();
    }
  }
  // Tells the checkers that no values follow.
  empty.wait(barriers.empty, Barriers::kV + stage);
  ptx::store_shared(smem + kSearchOffset + 4 * stage, kNoMoreValues);
  ptx::mbarrier_arrive(barriers.full + 8 * (Barriers::kV + stage));
}

}  // namespace blockflash

// Attention of few queries to a cache whose values are the first columns of its keys, as absorbed
// MLA decodes, for sm_80 and newer. All heads share one row for each key.
//
// Each key is copied once, by cp.async, into a ring that all warps read: half of the columns for
// the scores, then a quarter of the columns for the output. There is one barrier for each step of
// 16 keys. The README says why.
#include "blockflash/latent/output.cuh"
#include "blockflash/latent/sums.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

struct Shared {
  Exchange exchange;
  DecodeItem items[4];          // item n in slot n % 4; three are in use at a time
  ItemWalk<Config::rows> walk;  // of the warp that publishes items,
  int number;                   // and the number of the item that it publishes next; -1: none
  Arrivals arrivals;            // if there is a workspace
  bool last[2];                 // whether the item completed a node of its splits
};
constexpr int kRingBytes = Config::stages * kTileBytes;
static_assert(sizeof(Shared) <= sizeof(Exchange) + 1024 &&
                  Config::smem_bytes == kRingBytes + static_cast<int>(sizeof(Exchange)) + 1024,
              "manifest and kernel disagree on smem");

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_decode_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int kStages = Config::stages;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t ring_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  Shared& shared = *reinterpret_cast<Shared*>(smem + kRingBytes);
  const auto item_of = [&](int n) -> DecodeItem& {
    return shared.items[static_cast<unsigned>(n) % 4];
  };

  // One warp takes the items for all, since lengths that change meanwhile could make warps disagree
  // about how often they meet at a barrier. Item n of this CTA is published during item n - 1.
  const bool one_each = gridDim.x >= static_cast<unsigned>(p.items);
  const auto publish = [&](int n) {
    const int number = shared.number;
    ItemWalk<Config::rows> walk = shared.walk;
    __syncwarp();
    const int next = number < 0 || one_each || lane > 0
                         ? -1
                         : static_cast<int>(gridDim.x + atomicAdd(p.tile_counter, 1));
    const bool found = number >= 0 && walk.find(p, number, item_of(n), lane);
    __syncwarp();
    if (lane > 0) return;
    shared.walk = walk;
    shared.number = found ? next : -1;
    if (!found) item_of(n).sequence = -1;
    // The last CTA that gets none leaves the counter as it was.
    if (!found && number >= 0 && !one_each &&
        ptx::atomic_inc_acq_rel(p.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
      p.tile_counter[0] = 0;
  };
  // The first item is found while predecessors are still running, if they have no say in it.
  const bool is_early = one_each && are_sequences_equal(p);
  if (!is_early) ptx::wait_for_predecessors();
  if (threadIdx.x == 0) shared.number = blockIdx.x, shared.walk = {}, item_of(1).sequence = -1;
  __syncwarp();

  Loader loader(p);
  int loading = -1;        // item that is copied
  int issued = 0, at = 0;  // steps: number of the next copy and of the next product, their stages:
  int issue_stage = 0, stage = 0;
  // Copies steps up to `limit`, as far as their items are known: the last one is `known`.
  const auto fill = [&](int limit, int known) {
    while (issued < limit) {
      while (!loader.has_step()) {
        if (loading == known || item_of(loading + 1).sequence < 0) return;
        ++loading;
        loader.begin_item(p, item_of(loading));
      }
      loader.start_step(p, item_of(loading), ring_smem + issue_stage * kTileBytes);
      ++issued, issue_stage = next_stage<kStages>(issue_stage);
    }
  };
  // Behind this barrier all threads see a step, if its copy was started, and nobody reads the steps
  // before the current one.
  const auto meet = [&](int step) {
    if (issued > step) wait_for_oldest_group<kStages - 1>(issued - step - 1);
    __syncthreads();
  };
  const auto end_step = [&] { ++at, stage = next_stage<kStages>(stage); };

  Sums sums;
#pragma unroll 1
  for (int n = -1;; ++n) {
    if (warp == 0 && (n < 0 || !one_each)) publish(n + 1);
    const DecodeItem& item = item_of(n);
    const bool has_keys = n >= 0 && item.positions.begin < item.positions.end;
    if (has_keys) sums.load_queries(ring_smem + stage * kTileBytes, 0);
    meet(has_keys ? at + 1 : at);
    const bool begins = n < 0 && threadIdx.x == 0 && p.arrivals != nullptr;
    if (n < 0 && is_early) ptx::wait_for_predecessors();
    fill(at + kStages, n + 1);
    if (begins) shared.arrivals = Arrivals::begin(p.arrivals, LaunchWords::load(p.arrivals));
    if (has_keys)
      end_step();
    else
      meet(at);
    if (kQueryParts > 1 && has_keys) {
      sums.load_queries(ring_smem + stage * kTileBytes, 1);
      meet(at + 1);
      fill(at + kStages, n + 1);
      end_step();
    }
    if (n >= 0) {
      sums.begin_item();
#pragma unroll 1
      for (int key = item.positions.begin; key < item.positions.end; key += kStepKeys) {
        sums.add_step(p, item, shared.exchange, at % 2, ring_smem + stage * kTileBytes, key, [&] {
          meet(at + 1);
          fill(at + kStages, n + 1);
        });
        end_step();
      }
      finish_split(p, item, sums);
      finish_item_in_tree<OutputTile>(p, n, shared);
    }
    if (item_of(n + 1).sequence < 0) return;
  }
}

// Attention of each query to the keys that its list names, in a cache whose values are the first
// columns of the keys (sparse attention over a latent cache), for sm_80 and newer.
//
// A CTA has one split of the positions of a list, for up to 16 heads of its query. The keys come
// one row at a time, by cp.async, into the ring of attention_latent_sm80, whose products these are.
// How often warps meet follows from the parameters alone, so each of them reads what the device
// knows for itself. The README says why.
#include "blockflash/latent/list_item.cuh"
#include "blockflash/latent/output.cuh"
#include "blockflash/latent/sums.cuh"
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/launch.cuh"
#include "lists.cuh"

namespace blockflash {
namespace {

struct Shared {
  Exchange exchange;
  ListedKeys listed;
  Arrivals arrivals;  // if there is a workspace
  bool last;          // whether the CTA completed a node of the splits
};
constexpr int kRingBytes = Config::stages * kTileBytes;
static_assert(sizeof(Shared) <= sizeof(Exchange) + 1024 &&
                  Config::smem_bytes == kRingBytes + static_cast<int>(sizeof(Exchange)) + 1024,
              "manifest and kernel disagree on smem");

// Combines the nodes of the splits that this CTA completes.
__device__ __forceinline__ void combine_in_tree(const blockflash_attention_decode_params& p,
                                                const DecodeItem& item, Shared& shared) {
  TreeNode node = TreeNode::from(item, 1);
#pragma unroll 1
  while (true) {
    __syncthreads();  // all have stored, and have looked at `last`
    if (threadIdx.x == 0) shared.last = node.is_complete_with_this(item, shared.arrivals);
    __syncthreads();
    if (!shared.last) return;
    combine_children<OutputTile>(p, item, node);
    if (node.is_root) return;
    node = TreeNode::from(item, node.level + 1);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_params params) {
  using namespace blockflash;
  const blockflash_attention_decode_params& p = params.scaled.decode;
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int kStages = Config::stages;
  const uint32_t ring_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  Shared& shared = *reinterpret_cast<Shared*>(smem + kRingBytes);

  const ListItem item(params, blockIdx.x);
  if (item.index >= params.lists.queries) return;
  ptx::wait_for_predecessors();
  LaunchWords words{};
  const bool counts = item.splits > 1 && threadIdx.x == 0;
  if (counts) words = LaunchWords::load(p.arrivals);

  ListLoader loader(params, item);
  int issued = 0, at = 0;  // steps: number of the next copy and of the next product, their stages:
  int issue_stage = 0, stage = 0;
  // Copies steps up to `limit`.
  const auto fill = [&](int limit) {
    while (issued < limit && loader.has_step()) {
      loader.start_step(params, item, ring_smem + issue_stage * kTileBytes,
                        shared.listed.of[issue_stage]);
      ++issued, issue_stage = next_stage<kStages>(issue_stage);
    }
  };
  // Behind this barrier all threads see a step, if there is one, and nobody reads the steps before
  // the current one.
  const auto meet = [&](int step) {
    if (issued > step) wait_for_oldest_group<kStages - 1>(issued - step - 1);
    __syncthreads();
  };
  const auto end_step = [&] { ++at, stage = next_stage<kStages>(stage); };

  fill(kStages);
  if (counts) shared.arrivals = Arrivals::begin(p.arrivals, words);
  Sums sums;
#pragma unroll 1
  for (int part = 0; part < kQueryParts; ++part) {
    meet(at);
    sums.load_queries(ring_smem + stage * kTileBytes, part);
    end_step();
  }
  meet(at);
  fill(at + kStages);
  sums.begin_item();
#pragma unroll 1
  for (int left = item.positions.end - item.positions.begin; left > 0; left -= kStepKeys) {
    sums.add_step(p, item, shared.exchange, at % 2, ring_smem + stage * kTileBytes,
                  shared.listed.word(stage), [&] {
                    meet(at + 1);
                    fill(at + kStages);
                  });
    end_step();
  }
  ptx::launch_dependents();
  finish_split(p, item, sums);
  if (item.splits > 1) combine_in_tree(p, item, shared);
}

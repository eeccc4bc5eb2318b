// Attention of few heads of each query to the keys that its list names, in a cache whose values are
// the first columns of the keys, for Hopper: as soon as possible.
//
// A CTA has one split of the positions of a list, for up to 16 heads of its query, and the whole
// shared memory of an SM for three steps of 64 keys. The splits of a list are a cluster. The README
// says why.
#include "blockflash/pipeline.cuh"
#include "blockflash/ptx/launch.cuh"
#include "cluster.cuh"
#include "row_sums.cuh"

namespace blockflash {
namespace {

struct Shared {
  Exchange exchange;
  ListedKeys listed;
  uint64_t full[Config::stages];  // mbarriers of the stages
};
constexpr int kRingBytes = Config::stages * kStageBytes;
constexpr int kSharedBytes = 2048 * kParts + 2048;
static_assert(sizeof(Shared) <= kSharedBytes && Config::smem_bytes == kRingBytes + kSharedBytes,
              "manifest and kernel disagree on smem");
static_assert(Shown::kBytes <= kRingBytes, "results take the place of the ring");
static_assert(Config::stages >= 2, "queries are in the last stage before its first keys");

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_params params) {
  using namespace blockflash;
  const blockflash_attention_decode_params& p = params.scaled.decode;
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int kStages = Config::stages;
  const uint32_t ring_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  Shared& shared = *reinterpret_cast<Shared*>(smem + kRingBytes);
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(shared.full));

  const Cluster cluster;
  const ListItem item(params, cluster.number, cluster.size, cluster.rank);
  if (item.index >= params.lists.queries) return;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      ptx::mbarrier_init(barrier_of(full, stage), Config::warps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_predecessors();
  RowLoader loader(params, item);
  RowLoader::start_queries(p, item, ring_smem + (kStages - 1) * kStageBytes);
  int issued = 0,
      issue_stage = 0;  // steps whose copies were started, and the stage of the next one
  const auto fill = [&](int limit) {
    while (issued < limit && loader.has_step()) {
      loader.start_step(ring_smem + issue_stage * kStageBytes, shared.listed.of[issue_stage],
                        barrier_of(full, issue_stage));
      ++issued, issue_stage = next_stage<kStages>(issue_stage);
    }
  };
  fill(kStages - 1);
  ptx::cp_async_wait_all();
  __syncthreads();
  RowSums sums(shared.exchange);
  sums.load_queries(ring_smem + (kStages - 1) * kStageBytes);
  auto state = PipelineState<kStages>::consumer();
#pragma unroll 1
  for (int step = 0; step < issued; ++step, state.advance()) {
    // Behind this barrier nobody reads the step before, or queries, and what warps have stored for
    // this one is visible.
    __syncthreads();
    fill(step + kStages);
    const uint64_t listed = shared.listed.word(state.stage);
    state.wait(full);
    if (listed != 0) sums.add_step(p.scores, ring_smem + state.stage * kStageBytes, listed);
  }
  ptx::launch_dependents();
  sums.join_denominators();  // behind it nobody reads the ring
  // Both are found again, instead of kept in registers.
  const Cluster same_cluster;
  const ListItem same(params, same_cluster.number, same_cluster.size, same_cluster.rank);
  if (same_cluster.size > 1)
    same_cluster.finish(p, same, sums, ring_smem);
  else
    finish_split(p, same, sums);
}

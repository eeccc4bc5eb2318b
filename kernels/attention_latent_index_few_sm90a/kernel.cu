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
  uint64_t barriers[2 * kStages];
};
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kSharedBytes = 4096 * kParts + 2048;
static_assert(sizeof(Shared) <= kSharedBytes && Config::smem_bytes == kRingBytes + kSharedBytes,
              "manifest and kernel disagree on smem");
static_assert(Shown::kBytes <= kRingBytes, "results take the place of the ring");
constexpr int kLoaderRegisters = 40, kTeamRegisters = 232;

// What the team does: products and results.
__device__ __forceinline__ void compute(const blockflash_attention_index_params& params,
                                        uint32_t smem, Shared& shared, const Barriers& barriers) {
  const blockflash_attention_decode_params& p = params.scaled.decode;
  const auto release = [&](int stage) {
    __syncwarp();  // all lanes have read it
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, stage));
  };
  int left;
  RowSums sums(shared.exchange);
  {
    const Cluster cluster;
    const ListItem item(params, cluster.number, cluster.size, cluster.rank);
    const uint32_t q_smem = smem + (kStages - 1) * kStageBytes;
    copy_queries(p, item, q_smem);
    Team::sync();
    sums.load_queries(q_smem);
    release(kStages - 1);
    left = item.positions.end - item.positions.begin;
  }
  auto state = PipelineState<kStages>::consumer();
#pragma unroll 1
  for (; left > 0; left -= kKeys, state.advance()) {
    state.wait(barriers.full);
    const uint64_t listed = shared.listed.word(state.stage);
    if (listed != 0) sums.add_step(p.scores, smem + state.stage * kStageBytes, listed);
    release(state.stage);
  }
  ptx::launch_dependents();
  sums.join_denominators();  // behind it nobody reads the ring
  // Found again, instead of kept in registers.
  const Cluster cluster;
  const ListItem item(params, cluster.number, cluster.size, cluster.rank);
  if (cluster.size > 1)
    cluster.finish(p, item, sums, smem);
  else
    finish_split(p, item, sums);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_params params) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  Shared& shared = *reinterpret_cast<Shared*>(smem_bytes + kRingBytes);
  const Barriers barriers(static_cast<uint32_t>(__cvta_generic_to_shared(shared.barriers)));
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarpSize, 0);

  const Cluster cluster;
  const ListItem item(params, cluster.number, cluster.size, cluster.rank);
  if (item.index >= params.lists.queries) return;
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  ptx::wait_for_predecessors();
  if (warp >= kWarps) {
    ptx::lower_registers<kLoaderRegisters>();
    RowLoader(params, item).copy_steps(smem, shared.listed, barriers);
  } else {
    ptx::raise_registers<kTeamRegisters>();
    compute(params, smem, shared, barriers);
  }
}

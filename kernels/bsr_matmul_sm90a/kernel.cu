// Block-sparse (BSR) times dense for Hopper: TMA, WGMMA, and persistent CTAs of one producer
// warpgroup and two consumer warpgroups.
//
// A tile of C is one block row of op(A), or two that share B, times block_n columns of B. The
// blocks of the row laid end to end are the depth of a dense matmul, 64 per stage, whose rows of B
// are gathered by the column indices. TMA loads blocks of A straight from the values: nothing is
// packed or planned. While the consumers store a tile, the producer fills the ring for the next
// one. Long tiles may be split along K (bsr/split_k.cuh), and neighbouring tiles may share A within
// a cluster (bsr/cluster.cuh). op(A) is A or, by an index over its block columns, the transpose of
// A; B is row-major or column-major.
#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/bsr/epilogue_columns.cuh"
#include "blockflash/bsr/epilogue_copy.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "producer.cuh"

namespace blockflash {
namespace {

// Each warpgroup takes 64 rows of the tile; where the tile has only 64, the warpgroups split its
// columns.
constexpr int kRowGroups = kRows * kSteps, kColumnGroups = Config::warpgroups / kRowGroups;
constexpr int kN = kBlockN / kColumnGroups;  // columns of a warpgroup
static_assert(kRowGroups * kColumnGroups == Config::warpgroups && kN % 64 == 0,
              "tiles divide among the warpgroups");
static_assert(!Config::b_column_major || kBlockN <= 256, "a box has at most 256 columns of B");

// Advances 16 along K, in units of matrix descriptors: along the rows of a K-major operand, or 16
// rows down in an MN-major one.
constexpr int kNextA = Config::a_transposed ? 16 * 128 >> 4 : 32 >> 4,
              kNextB = Config::b_column_major ? 32 >> 4 : 16 * 128 >> 4;

// Staging of C: pages of a warp for TMA stores, or a slice of 16 rows × kSliceN columns of
// accumulators, whose rows are padded to keep them in different banks. Pages are used alternately,
// also across tiles, so there are no more of them than a tile has.
constexpr int kStagingBytes = (Config::smem_bytes - kStagingOffset) / kConsumerWarps;
constexpr int kPages = kStagingBytes / kPageBytes < kN / 64 ? kStagingBytes / kPageBytes : kN / 64;
constexpr int kSliceN = kStagingBytes >= 16 * 40 * 4 ? 32 : 16, kSliceStride = kSliceN * 5 / 4;
static_assert(kPages <= 2 && kStagingBytes >= 16 * kSliceStride * 4, "there is room for either");

struct Consumer {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  const int warpgroup;
  PipelineState<kStages> at = PipelineState<kStages>::consumer();

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void release(int stage) const {
    Cluster::release(barrier_of(barriers.empty, stage), lane());
  }

  // acc += A·B over `steps` stages, or up to the stage that is marked as the last of the tile.
  __device__ __forceinline__ void multiply(float (&acc)[kN / 2], int steps) {
    const uint32_t a_smem = smem + warpgroup % kRowGroups * 64 * 128,
                   b_smem = smem + kABytes + warpgroup / kRowGroups * kN * 128;
    const uint64_t a_ring = Config::a_transposed
                                ? ptx::wgmma_descriptor_mn(a_smem, kPanelBytes, 1024)
                                : ptx::wgmma_descriptor(a_smem);
    const uint64_t b_ring = Config::b_column_major
                                ? ptx::wgmma_descriptor(b_smem)
                                : ptx::wgmma_descriptor_mn(b_smem, kPanelBytes, 1024);
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      at.wait(barriers.full);
      const uint32_t offset = at.stage * kStageBytes >> 4;
      bool mine = true;
      if constexpr (kRows > 1) {
        // Shifted before the shuffle: otherwise the assembler takes the branch for a divergent one
        // and serialises the WGMMAs.
        const uint32_t owners =
            __shfl_sync(~0u, ptx::load_shared(barriers.owners + 4 * at.stage) >> warpgroup, 0);
        mine = owners & 1;
        if (owners >> (kRows - warpgroup)) steps = step + 1;
      }
      if (mine) {
        ptx::wgmma_pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < Config::block_k / 16; ++k)
          ptx::Wgmma<kN, Element>::template ss<true, !Config::b_column_major, Config::a_transposed>(
              acc, a_ring + offset + k * kNextA, b_ring + offset + k * kNextB);
        ptx::wgmma_commit_group();
      } else {
        ptx::wgmma_commit_group();  // an empty group, so that the previous group is always the one
                                    // to wait for
      }
      ptx::wgmma_wait_group<1>();  // the products of the previous stage have read it
      if (step > 0) release(before);
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(acc);
    if (steps > 0) release(before);
  }

  __device__ __forceinline__ void run(unsigned char* smem_bytes) {
    const int warp = threadIdx.x / 32 % 4;
    const uint32_t pages = smem + kStagingOffset + (warpgroup * 4 + warp) * kPages * kPageBytes;
    float* const slice = reinterpret_cast<float*>(smem_bytes + kStagingOffset) +
                         (warpgroup * 4 + warp) * 16 * kSliceStride;
    if (lane() == 0)
      Cluster::request(barriers.requested_of(1));  // the second slot holds no tile yet
    ptx::wait_for_predecessors();
#pragma unroll 1
    for (int n = 0;; ++n) {
      barriers.wait_published(n);
      const uint32_t slot = slot_of(smem, n);
      int blocks = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const BlockRow row = BlockRow::load(slot + 16 * r);
        blocks += row.end_block - row.first_block;
      }
      const int block_row = BlockRow::load(slot + 16 * (warpgroup % kRowGroups / kSteps)).index;
      const int first_column = ptx::load_shared(slot + kColumnInSlot) + Cluster::rank() * kBlockN;
      const BsrSplit split = kSplits ? BsrSplit::load(slot + kSplitInSlot) : BsrSplit{0, 1};
      const int position = kSplits ? ptx::load_shared(slot + kSplitInSlot + 4) : 0;
      if (BlockRow::load(slot).index < 0) break;
      __syncwarp();
      if (lane() == 0) Cluster::request(barriers.requested_of(n));
      float acc[kN / 2] = {};
      multiply(acc, blocks * kSteps);
      if constexpr (kSplits) {
        const int tiles_n =
            static_cast<int>((params.base.n + kClusterN - 1) / kClusterN) * Config::cluster;
        const BsrSums<kConsumerWarps, kN / 2> sums = {
            params, position, first_column / kBlockN, tiles_n, warpgroup * 4 + warp, lane()};
        if (split.number > 0) {
          sums.leave(split.number, acc);
          continue;
        }
        sums.add(split.count, acc);
      }
      const int64_t first_row =
          static_cast<int64_t>(block_row) * kBlock + warpgroup % kSteps * 64 + warp * 16;
      const auto& tiles = reinterpret_cast<const float(&)[1][kN / 8][4]>(acc);
      const int64_t column = first_column + warpgroup / kRowGroups * kN;
      if (kPages > 0 && params.c_by_copies)
        store_tile_by_copies<kPages ? kPages : 1>(params, tiles[0], pages, first_row, column,
                                                  lane());
      else if (params.base.c_column_major)
        store_tile_columns<kSliceN, kSliceStride>(params.base, tiles[0], slice, first_row, column,
                                                  lane());
      else if (!store_tile_directly(params.base, tiles[0], first_row, column, lane()))
        store_tile<kSliceN, kSliceStride>(params.base, tiles, slice, first_row, column, lane());
    }
    if (kPages > 0 && lane() == 0) ptx::tensor_store_wait();
  }
};

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem + kBarrierOffset);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  begin_early<Cluster>(barriers, params.a, params.b, params.b_edge);

  if (warpgroup == 0) {
    ptx::lower_registers<40>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0 && warp < kLoaders) produce(params, smem, barriers, warp == 0);
    if (threadIdx.x == kLoaders * 32 && Cluster::rank() == 0) schedule(params, smem, barriers);
  } else {
    ptx::raise_registers<Config::ctas == 1 ? 232 : 96>();
    Consumer{params, barriers, smem, warpgroup - 1}.run(smem_bytes);
  }
  Cluster::end();
}

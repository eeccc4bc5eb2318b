// Sampled dense-dense product (SDDMM) for Hopper: dense A times dense B at the stored blocks of a
// block-sparse matrix. TMA, WGMMA, and persistent CTAs of one producer warpgroup and two consumer
// warpgroups.
//
// A tile is several neighbouring stored blocks of a block row, which share its rows of A. Their
// columns of B are gathered by the column indices and are side by side in shared memory, so that a
// tile is one dense product. While the consumers store a tile, the producer fills the ring for the
// next one.
#include <type_traits>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "producer.cuh"

namespace blockflash {
namespace {

// Each warpgroup takes 64 rows of the tile; where the tile has only 64, the warpgroups split its
// blocks. Either way each warpgroup has two blocks.
constexpr int kRowGroups = kBlock / 64, kN = 2 * kBlock, kTiles = kBlock / 8;
static_assert(kN * Config::warpgroups / kRowGroups == kBlock * kBlocks,
              "tiles divide among the warpgroups");

// The 16-bit types of values, and f32.
template <class Out>
struct Pair {
  using type = uint32_t;
  static __device__ __forceinline__ float2 widened(uint32_t x) {
    return make_float2(ElementTraits<Out>::to_float(x & 0xFFFF),
                       ElementTraits<Out>::to_float(x >> 16));
  }
};
template <>
struct Pair<float> {
  using type = float2;
  static __device__ __forceinline__ float2 widened(float2 x) { return x; }
};

// values = alpha·acc + beta·values for 16 rows of the block at `values`; zero from row `height` and
// column `width` on.
template <class Out>
__device__ __forceinline__ void store_rows(const Params& p, const float (&acc)[kTiles][4],
                                           Out* values, int height, int width, int lane) {
  using Two = typename Pair<Out>::type;
  const bool whole = height >= 16 && width >= kBlock;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(lane, 2 * half), column = accumulator_column(lane, 0);
    Out* const to = values + row * kBlock;
    Two old[kTiles];
    if (p.beta != 0.f) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) old[n] = *reinterpret_cast<const Two*>(to + n * 8 + column);
    }
    const int end = row < height ? width : 0;
#pragma unroll
    for (int n0 = 0; n0 < kTiles; n0 += 4) {
      float2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = make_float2(p.alpha * acc[n0 + i][2 * half], p.alpha * acc[n0 + i][2 * half + 1]);
        if (p.beta != 0.f) {
          const float2 before = Pair<Out>::widened(old[n0 + i]);
          x[i].x += p.beta * before.x, x[i].y += p.beta * before.y;
        }
        // Set explicitly: zeros in one operand times NaN or infinity in the other would be NaN.
        if (!whole) {
          if ((n0 + i) * 8 + column >= end) x[i].x = 0.f;
          if ((n0 + i) * 8 + column + 1 >= end) x[i].y = 0.f;
        }
      }
      if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) *reinterpret_cast<float2*>(to + (n0 + i) * 8 + column) = x[i];
      } else {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = ElementTraits<Out>::pack(x[i].x, x[i].y);
        quad_transpose(words, lane % 4);
        *reinterpret_cast<uint4*>(to + (n0 + lane % 4) * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

struct Consumer {
  const Params& p;
  const Barriers barriers;
  const uint32_t smem;
  const int warpgroup;
  PipelineState<kStages> at = PipelineState<kStages>::consumer();

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void release(int stage) const {
    if (lane() == 0) ptx::mbarrier_arrive(barrier_of(barriers.empty, stage));
  }

  // Releases the stages of a tile unread.
  __device__ __forceinline__ void skip(int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      at.wait(barriers.full);
      release(at.stage);
      at.advance();
    }
  }

  // acc += A·B over the stages of a tile, for n columns.
  template <int n>
  __device__ __forceinline__ void multiply(float (&acc)[n / 2], int steps) {
    const uint32_t a = smem + warpgroup % kRowGroups * kPanelBytes,
                   b = smem + kBlockBytes + warpgroup / kRowGroups * 2 * kBlockBytes;
    const uint64_t a_ring = Config::a_column_major ? ptx::wgmma_descriptor_mn(a, kPanelBytes, 1024)
                                                   : ptx::wgmma_descriptor(a);
    const uint64_t b_ring = Config::b_column_major ? ptx::wgmma_descriptor(b)
                                                   : ptx::wgmma_descriptor_mn(b, kPanelBytes, 1024);
    // Advances 16 along K: 32 bytes of a row, or 16 rows.
    constexpr int kAStep = (Config::a_column_major ? 16 * 128 : 32) >> 4,
                  kBStep = (Config::b_column_major ? 32 : 16 * 128) >> 4;
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      at.wait(barriers.full);
      const uint32_t offset = at.stage * kStageBytes >> 4;
      ptx::wgmma_pin(acc);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k)
        ptx::Wgmma<n, Config::Element>::template ss<true, !Config::b_column_major,
                                                    Config::a_column_major>(
            acc, a_ring + offset + k * kAStep, b_ring + offset + k * kBStep);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();  // the products of the previous stage have read it
      if (step > 0) release(before);
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(acc);
    if (steps > 0) release(before);
  }

  template <class Out>
  __device__ __forceinline__ void store(const Tile& tile, int first,
                                        const float (&acc)[2][kTiles][4]) const {
    const int row = warpgroup % kRowGroups * 64 + threadIdx.x / 32 % 4 * 16,
              height = p.m - tile.block_row * kBlock - row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i >= tile.blocks) break;
      const int column = kRowGroups == 1 && warpgroup > 0 ? tile.columns[2 + i] : tile.columns[i];
      Out* const values =
          static_cast<Out*>(p.values) +
          (static_cast<int64_t>(tile.first_block + first + i) * kBlock + row) * kBlock;
      store_rows(p, acc[i], values, height, p.n - column * kBlock, lane());
    }
  }

  __device__ __forceinline__ void run() {
    const int steps = p.k / kDepth + (p.k % kDepth != 0), first = warpgroup / kRowGroups * 2;
    if (lane() == 0)
      ptx::mbarrier_arrive(barriers.requested_of(1));  // the second slot holds no tile yet
    ptx::wait_for_predecessors();
#pragma unroll 1
    for (int n = 0;; ++n) {
      barriers.wait_published(n);
      const Tile tile = Tile::load(slot_of(smem, n));
      if (tile.block_row < 0) break;
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(barriers.requested_of(n));
      // Shuffled, or the assembler takes the branches for divergent ones and serialises the WGMMAs.
      const int mine = __shfl_sync(~0u, tile.blocks, 0) - first;
      if (mine <= 0) {
        skip(steps);
        continue;
      }
      float acc[2][kN / 4] = {};
      if (mine == 1)
        multiply<kBlock>(acc[0], steps);
      else
        multiply<kN>(reinterpret_cast<float(&)[kN / 2]>(acc), steps);
      const auto& blocks = reinterpret_cast<const float(&)[2][kTiles][4]>(acc);
      if (p.values_dtype == BLOCKFLASH_DTYPE_F32)
        store<float>(tile, first, blocks);
      else if (p.values_dtype == BLOCKFLASH_DTYPE_F16)
        store<__half>(tile, first, blocks);
      else
        store<__nv_bfloat16>(tile, first, blocks);
    }
  }
};

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_sddmm_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem + kBarrierOffset);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  begin_early<BsrCluster<1>>(barriers, params.a, params.b);

  if (warpgroup == 0) {
    ptx::lower_registers<40>();
    if (threadIdx.x == 0) produce(params, smem, barriers);
    if (threadIdx.x / 32 == 1) schedule(params, smem, barriers, threadIdx.x % 32);
  } else {
    ptx::raise_registers<232>();
    Consumer{params, barriers, smem, warpgroup - 1}.run();
  }
}

// Block-sparse (BSR) times dense for Hopper and small blocks: TMA and mma.sync, persistent CTAs of
// one producer warpgroup and two or four consumer warpgroups.
//
// A tile of C is a group of block rows of A times block_n columns of B. B is loaded once for the
// union of their block columns, in stages listed by the plan of the pattern (bsr/gather.cuh), and
// each consumer warp multiplies it by the blocks of its own block row: no missing block is ever
// multiplied. The plan depends on the pattern alone, so values are not packed and may change
// between launches. Long tiles may be split along K (bsr/split_k.cuh), and neighbouring tiles may
// share A within a cluster (bsr/cluster.cuh).
#include "blockflash/bsr/epilogue.cuh"
#include "blockflash/params/bsr.h"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "copy.cuh"

namespace blockflash {
namespace {

// A block row belongs to one warp, or to two side by side with kN columns each.
constexpr int kWarpsPerRow = kConsumerWarps / kRows, kN = kBlockN / kWarpsPerRow, kPairs = kN / 16;
constexpr int kTiles = kBlock / 16;  // MMA tiles along the rows of a block, and along its columns
static_assert(kWarpsPerRow * kRows == kConsumerWarps && kN % 16 == 0,
              "tiles divide among the warps");

// Staging of C, 16 rows × kSliceN columns per warp. The padding keeps the rows of a store in
// different banks.
constexpr int kSliceStride = (Config::smem_bytes - kSliceOffset) / (kConsumerWarps * 16 * 4),
              kSliceN = kSliceStride / 16 * 16;
static_assert(kSliceN >= 16 && kN % kSliceN == 0 && kSliceStride % 4 == 0,
              "slices hold pieces of eight columns, 16-byte aligned");

// Fragments of a block of A: MMA tiles [rows][columns].
using Fragments = uint32_t[kTiles][kTiles][4];

struct Consumer {
  const Params& params;
  const Barriers barriers;
  const uint32_t smem;
  const int warp, lane;
  uint32_t a_lane, b_lane;  // offsets of the addresses that this lane passes to ldmatrix
  PipelineState<kStages> at = PipelineState<kStages>::consumer();

  // Rows of a block are short: kPitch of them share 128 bytes, so eight rows at the same chunk of
  // 16 bytes would meet in few banks. Each row therefore reads its chunks in an order XOR-ed with
  // its number in units of kPitch, and the registers are put in order afterwards.
  static constexpr int kChunks = kBlock / 8, kPitch = 8 / kChunks, kLoadRows = 32 / kChunks;

  __device__ __forceinline__ Consumer(const Params& params, const Barriers& barriers, uint32_t smem)
      : params(params),
        barriers(barriers),
        smem(smem),
        warp(threadIdx.x / 32 - 4),
        lane(threadIdx.x % 32) {
    const int matrix = lane / 8, row = lane % 8;
    a_lane = (matrix / kChunks * 8 + row) * kBlock * 2 + ((matrix % kChunks) ^ (row / kPitch)) * 16;
    const int first_column = warp % kWarpsPerRow * kN, k = lane % 16;
    b_lane = first_column / 64 * kPanelBytes + k * 128 +
             ((first_column % 64 / 8 + lane / 16) ^ (k % 8)) * 16;
  }

  __device__ __forceinline__ void load_a(Fragments& a, uint32_t block) const {
    const int order = lane / 4 / kPitch;
#pragma unroll
    for (int row0 = 0; row0 < kBlock; row0 += kLoadRows) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, block + a_lane + row0 * kBlock * 2);
#pragma unroll
      for (int bit = 1; bit < kChunks; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if ((i & bit) == 0) {
            const uint32_t low = r[i], high = r[i | bit];
            r[i] = order & bit ? high : low, r[i | bit] = order & bit ? low : high;
          }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + i / kChunks * 8, chunk = i % kChunks;
        a[row / 16][chunk / 2][row % 16 / 8 + chunk % 2 * 2] = r[i];
      }
    }
  }

  // Fragments of B for 16 of the depth and 16 columns: number `i` of a block column, columns first.
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t column, int i) const {
    const int pair = i % kPairs;
    ptx::ldmatrix_x4_trans(
        b, (column + b_lane ^ pair % 4 * 32) + pair / 4 * kPanelBytes + i / kPairs * (16 * 128));
  }

  // acc += one block of A times one block column of B.
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][kN / 8][4], const Fragments& a,
                                           uint32_t column) const {
    constexpr int kLoads = kTiles * kPairs, kBuffers = 4;
    uint32_t b[kBuffers][4];
#pragma unroll
    for (int i = 0; i < kBuffers - 1; ++i) load_b(b[i], column, i);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i + kBuffers - 1 < kLoads)
        load_b(b[(i + kBuffers - 1) % kBuffers], column, i + kBuffers - 1);
      const uint32_t(&now)[4] = b[i % kBuffers];
      const int pair = i % kPairs, step = i / kPairs;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc[m][2 * pair], a[m][step], now[0], now[1]);
        ptx::mma_m16n8k16<Element>(acc[m][2 * pair + 1], a[m][step], now[2], now[3]);
      }
    }
  }

  // acc += A·B over the stages of a tile.
  __device__ __forceinline__ void walk(float (&acc)[kTiles][kN / 8][4], int stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      at.wait(barriers.full);
      const uint32_t row = ptx::load_shared(stage_word(smem, at.stage, warp / kWarpsPerRow)),
                     b = smem + at.stage * kStageBytes;
      uint32_t block = b + kBBytes + (row >> 8) * kBlockBytes, mine = row & 0xFF;
#pragma unroll 1
      for (; mine != 0; mine &= mine - 1, block += kBlockBytes) {
        Fragments a;
        load_a(a, block);
        multiply(acc, a, b + (__ffs(mine) - 1) * kColumnBytes);
      }
      // The MMAs have been issued, so their fragments have been read.
      __syncwarp();
      Cluster::release(at.of(barriers.empty), lane);
      at.advance();
    }
  }

  __device__ __forceinline__ void run(unsigned char* smem_bytes) {
    const blockflash_bsr_matmul_params& p = params.base;
    float* const slice =
        reinterpret_cast<float*>(smem_bytes + kSliceOffset) + warp * 16 * kSliceStride;
    if (lane == 0) Cluster::request(barriers.requested_of(1));  // the second slot holds no tile yet
    ptx::wait_for_predecessors();
#pragma unroll 1
    for (int n = 0;; ++n) {
      barriers.wait_published(n);
      const Tile tile = Tile::load(smem, n);
      const int first_column = tile.first_column + Cluster::rank() * kBlockN;
      const BsrSplit split = Tile::split(smem, n);
      if (tile.group < 0) break;
      __syncwarp();
      if (lane == 0) Cluster::request(barriers.requested_of(n));
      // A row that does not exist is the first one beyond A.
      const int position = tile.group * kRows + warp / kWarpsPerRow,
                block_rows = static_cast<int>((p.m + kBlock - 1) / kBlock);
      const int64_t block_row = position < block_rows ? p.row_order[position] : block_rows;
      float acc[kTiles][kN / 8][4] = {};
      walk(acc, tile.stages);
      auto& all = reinterpret_cast<float(&)[kTiles * kN / 8 * 4]>(acc);
      const int tiles_n = static_cast<int>((p.n + kClusterN - 1) / kClusterN) * Config::cluster;
      const BsrSums<kConsumerWarps, kTiles * kN / 2> sums = {
          params, tile.group, first_column / kBlockN, tiles_n, warp, lane};
      if (split.number > 0) {
        sums.leave(split.number, all);
        continue;
      }
      sums.add(split.count, all);
      const int64_t column = first_column + warp % kWarpsPerRow * kN;
      bool stored = true;  // either all of it or nothing
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        stored &= store_tile_directly(p, acc[m], block_row * kBlock + m * 16, column, lane);
      if (!stored)
        store_tile<kSliceN, kSliceStride>(p, acc, slice, block_row * kBlock, column, lane);
    }
  }
};

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_matmul_tma_params params) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes));
  const Barriers barriers(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  begin_early<Cluster>(barriers, params.b, params.b_edge);

  // The consumers may take only what the producers give up, or setmaxnreg would wait for ever.
  // Launch bounds give 96 registers with four consumer warpgroups, otherwise 168.
  constexpr bool kMany = Config::warpgroups == 4;
  constexpr int kConsumerRegisters = kMany ? 104 : 232, kProducerRegisters = kMany ? 64 : 40;
  if (warp < 4) {
    ptx::lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0 && Cluster::rank() == 0) schedule(params, smem, barriers);
    if (warp > 0) copy(params, smem, barriers, warp - 1);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    Consumer(params, barriers, smem).run(smem_bytes);
  }
  Cluster::end();
}

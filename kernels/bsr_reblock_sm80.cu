// Block-sparse values in larger blocks, for sm_80 and newer: what is copied where depends on the pattern alone and comes as an index.
//
// A block of threads writes neighbouring chunks of 16 bytes of one large block, row by row, so stores are whole lines; loads are rows of
// small blocks. Elements are bytes here, of whatever type.
#include "blockflash/config.cuh"

namespace blockflash {
namespace {

constexpr int kThreads = BsrReblockConfig::threads;
constexpr int kChunks = BsrReblockConfig::chunks;

// Chunk `at` of a large block: of the small block that lies there, zeros if none does.
__device__ __forceinline__ uint4 load_chunk(const blockflash_bsr_reblock_params& p, const int32_t* blocks, int at) {
  const int large_row_chunks = p.factor * p.row_chunks;
  const int row = at / large_row_chunks, column = at % large_row_chunks;
  const int block = __ldg(blocks + row / p.block * p.factor + column / p.row_chunks);
  if (block < 0) return make_uint4(0, 0, 0, 0);
  const int64_t source = (static_cast<int64_t>(block) * p.block + row % p.block) * p.row_chunks + column % p.row_chunks;
  return __ldg(static_cast<const uint4*>(p.from) + source);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_bsr_reblock_params p) {
  using namespace blockflash;
  const int large_chunks = p.factor * p.block * p.factor * p.row_chunks;  // of a large block
  const int parts = (large_chunks + kThreads * kChunks - 1) / (kThreads * kChunks);
  const int large = blockIdx.x / parts;
  const int first = static_cast<int>(blockIdx.x % parts) * kThreads * kChunks + threadIdx.x;
  const int32_t* const blocks = p.block_idx + static_cast<int64_t>(large) * p.factor * p.factor;
  uint4* const to = static_cast<uint4*>(p.to) + static_cast<int64_t>(large) * large_chunks;
  uint4 chunks[kChunks];  // under way together, or each would wait for memory
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int at = first + i * kThreads;
    if (at < large_chunks) chunks[i] = load_chunk(p, blocks, at);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int at = first + i * kThreads;
    if (at < large_chunks) to[at] = chunks[i];
  }
}

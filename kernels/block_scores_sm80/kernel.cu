// Scores of blocks for sm_80 and newer: the mean query of each block row times the mean key of each
// block column, in two launches.
//
// In the first launch a CTA computes one mean; every byte of q and k is read once, and this is
// bound by memory. In the second launch a CTA computes a tile of scores in f32 on the CUDA cores,
// since tensor cores would round the f32 means. All sums have one fixed order.
#include "blockflash/config/block_mask.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/params/block_mask_build.h"

namespace blockflash {
namespace {

using Config = BlockScoresConfig;
using Params = blockflash_block_scores_params;
using Element = Config::Element;

constexpr int kThreads = Config::threads;
constexpr int kChunk = 8;  // elements of a 16-byte load
constexpr int kLoads = 8;  // loads in flight per thread
constexpr int kTile = Config::tile;
constexpr int kDepth = 16;  // elements of the means that are multiplied between two barriers
constexpr int kRowsPerThread = kTile / (kThreads / kWarpSize);  // rows of a score tile per warp,
constexpr int kColsPerThread = kTile / kWarpSize;  // and a lane takes every 32nd column
static_assert(kRowsPerThread % 4 == 0, "rows are read from shared memory four at a time");
static_assert(kTile * (kDepth / 4) % kThreads == 0,
              "the tile must divide evenly among the threads");

// The mean of `rows` rows that are `stride` elements apart.
__device__ __forceinline__ void write_mean(const Element* x, int64_t stride, int rows, int head_dim,
                                           float* mean) {
  __shared__ float sums[kThreads * kChunk];  // [teams][head_dim]
  const int chunks = head_dim / kChunk;
  const int teams = kThreads / chunks;  // each team adds up every teams-th row
  const int team = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  if (team < teams) {
    float sum[kChunk] = {};
#pragma unroll 1
    for (int first = team; first < rows; first += kLoads * teams) {
      uint4 words[kLoads];  // in flight together to hide the latency of memory
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = first + i * teams;
        words[i] = row < rows
                       ? __ldg(reinterpret_cast<const uint4*>(x + row * stride + chunk * kChunk))
                       : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int j = 0; j < kChunk; ++j)
          sum[j] += ElementTraits<Element>::to_float(
              static_cast<uint16_t>(pairs[j / 2] >> (16 * (j % 2))));
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sums[team * head_dim + chunk * kChunk + i] = sum[i];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    float sum = 0;
    for (int i = 0; i < teams; ++i) sum += sums[i * head_dim + d];
    mean[d] = sum / static_cast<float>(rows);
  }
}

// Means of q, then of k. Heads come first in the order, since heads of the same rows are neighbours
// in memory.
__device__ __forceinline__ void means(const Params& p) {
  int index = blockIdx.x;
  const int count_q = p.batch * p.num_heads_q * p.rows;
  const bool is_q = index < count_q;
  if (!is_q) index -= count_q;
  const int heads = is_q ? p.num_heads_q : p.num_heads_kv, blocks = is_q ? p.rows : p.cols;
  const int size = is_q ? p.block_q : p.block_kv, seqlen = is_q ? p.seqlen_q : p.seqlen_kv;
  const int64_t stride_batch = is_q ? p.q_stride_batch : p.k_stride_batch;
  const int64_t stride_seq = is_q ? p.q_stride_seq : p.k_stride_seq;
  const int64_t stride_head = is_q ? p.q_stride_head : p.k_stride_head;
  const int head = index % heads, block = index / heads % blocks, batch = index / heads / blocks;
  const int first = block * size;
  const Element* const x = static_cast<const Element*>(is_q ? p.q : p.k) + batch * stride_batch +
                           head * stride_head + first * stride_seq;
  float* const mean = (is_q ? p.q_means : p.k_means) +
                      ((static_cast<int64_t>(batch) * heads + head) * blocks + block) * p.head_dim;
  write_mean(x, stride_seq, min(size, seqlen - first), p.head_dim, mean);
}

// Loads rows [first_row, first_row + kTile) and columns [first, first + kDepth) of the [rows,
// depth] means, transposed; zeros beyond them.
__device__ __forceinline__ void load_transposed(float (&tile)[kDepth][kTile], const float* means,
                                                int first_row, int rows, int first, int depth) {
#pragma unroll
  for (int i = threadIdx.x; i < kTile * (kDepth / 4); i += kThreads) {
    const int row = i % kTile, d = i / kTile * 4;
    const bool exists = first_row + row < rows && first + d < depth;
    const float4 x = exists ? *reinterpret_cast<const float4*>(
                                  means + static_cast<int64_t>(first_row + row) * depth + first + d)
                            : make_float4(0, 0, 0, 0);
    tile[d][row] = x.x;
    tile[d + 1][row] = x.y;
    tile[d + 2][row] = x.z;
    tile[d + 3][row] = x.w;
  }
}

__device__ __forceinline__ void products(const Params& p) {
  __shared__ __align__(16) float q_smem[kDepth][kTile], k_smem[kDepth][kTile];
  const int tiles_m = (p.rows + kTile - 1) / kTile, tiles_n = (p.cols + kTile - 1) / kTile;
  const int first_col = static_cast<int>(blockIdx.x % tiles_n) * kTile;
  const int first_row = static_cast<int>(blockIdx.x / tiles_n % tiles_m) * kTile;
  const int group = blockIdx.x / tiles_n / tiles_m;  // batch entry and head of q
  const int head_kv = group % p.num_heads_q / (p.num_heads_q / p.num_heads_kv);
  const int64_t group_kv = static_cast<int64_t>(group / p.num_heads_q) * p.num_heads_kv + head_kv;
  const float* const q = p.q_means + static_cast<int64_t>(group) * p.rows * p.head_dim;
  const float* const k = p.k_means + group_kv * p.cols * p.head_dim;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  float sum[kRowsPerThread][kColsPerThread] = {};
  for (int first = 0; first < p.head_dim; first += kDepth) {
    __syncthreads();  // all have multiplied the tiles that are overwritten
    load_transposed(q_smem, q, first_row, p.rows, first, p.head_dim);
    load_transposed(k_smem, k, first_col, p.cols, first, p.head_dim);
    __syncthreads();  // the tiles are visible
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      float b[kColsPerThread];
#pragma unroll
      for (int n = 0; n < kColsPerThread; ++n) b[n] = k_smem[d][n * kWarpSize + lane];
#pragma unroll
      for (int m = 0; m < kRowsPerThread; m += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&q_smem[d][warp * kRowsPerThread + m]);
#pragma unroll
        for (int n = 0; n < kColsPerThread; ++n) {
          sum[m][n] = fmaf(a.x, b[n], sum[m][n]);
          sum[m + 1][n] = fmaf(a.y, b[n], sum[m + 1][n]);
          sum[m + 2][n] = fmaf(a.z, b[n], sum[m + 2][n]);
          sum[m + 3][n] = fmaf(a.w, b[n], sum[m + 3][n]);
        }
      }
    }
  }
  float* const scores = p.scores + static_cast<int64_t>(group) * p.rows * p.cols;
#pragma unroll
  for (int m = 0; m < kRowsPerThread; ++m)
#pragma unroll
    for (int n = 0; n < kColsPerThread; ++n) {
      const int row = first_row + warp * kRowsPerThread + m, col = first_col + n * kWarpSize + lane;
      if (row < p.rows && col < p.cols)
        scores[static_cast<int64_t>(row) * p.cols + col] = sum[m][n];
    }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_block_scores_params p) {
  using namespace blockflash;
  if (p.step == BLOCKFLASH_BLOCK_SCORES_MEANS)
    means(p);
  else
    products(p);
}

// Attention backward with respect to the bias, for sm_80 and newer: the gradients of the scores,
// summed over the axes along which the bias broadcasts.
//
// One CTA computes a tile of the gradient. It visits the batch entries, heads, query tiles and key
// tiles that are summed there, in this order, so the result has one order of summation, and
// computes their scores and dO·vᵀ again. Tiles that nobody sees leave zeros.
#include "blockflash/attention/gradient_terms.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/mma/products.cuh"
#include "blockflash/mma/tile_copy.cuh"

namespace blockflash {
namespace {

using Config = AttentionPortableConfig;
using Element = Config::Element;

constexpr int kChunks = Config::head_dim / 8;  // 16-byte chunks of a row
constexpr int kQ = Config::block_q, kKv = Config::block_kv;
constexpr int kRowsPerWarp = kQ / Config::warps;
constexpr int kMTiles = kRowsPerWarp / 16;  // MMA tiles of a warp along queries
constexpr int kKvTiles = kKv / 8;           // and along keys
constexpr int kDSteps = Config::head_dim / 16;
constexpr int kQTileBytes = kQ * Config::head_dim * 2, kKvTileBytes = kKv * Config::head_dim * 2;
constexpr int kSumsRow = kKv + 4;  // floats of a row of sums: lanes of 8 rows meet no bank twice

static_assert(kHasTerms && 64 % kQ == 0 && 64 % kKv == 0,
              "a tile of scores is inside 64 × 64 bits");
static_assert(kRowsPerWarp % 16 == 0, "a warp computes whole MMA tiles");
static_assert(Config::smem_bytes == 2 * (kQTileBytes + kKvTileBytes),
              "manifest and kernel disagree on smem");
static_assert(kQ * kSumsRow * 4 <= Config::smem_bytes, "sums take the place of the tiles");

using QCopy = TileCopy<kQ, kChunks, Config::threads>;
using KvCopy = TileCopy<kKv, kChunks, Config::threads>;
using Scores = float[kMTiles][kKvTiles][4];

// What is summed into an entry of the gradient along one axis: a part of `size` positions.
struct Range {
  int begin, end;
  static __device__ __forceinline__ Range of(int at, int entries, int size) {
    return entries == 1 ? Range{0, size} : Range{at, at + 1};
  }
};

__device__ __forceinline__ int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

__device__ __forceinline__ void store(void* to, int64_t at, int dtype, float x) {
  if (dtype == BLOCKFLASH_DTYPE_F32)
    static_cast<float*>(to)[at] = x;
  else if (dtype == BLOCKFLASH_DTYPE_F16)
    static_cast<__half*>(to)[at] = __float2half_rn(x);
  else
    static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(x);
}

// Finds a tile of scores in the lists of the block mask: the place of its bits, -1 if all pairs of
// its block are visible, or kNotListed. One thread reads the lists for all, since threads that read
// them separately could disagree about barriers.
constexpr int kNotListed = -2;
__device__ __forceinline__ int find_tile(const blockflash_attention_fwd_params& p,
                                         const blockflash_score_terms& terms, int batch, int head,
                                         int first_row, int key_tile) {
  __shared__ int shared;
  if (threadIdx.x == 0) {
    const TileList list = TileList::of(p.block_mask, kKv, batch, head, first_row);
    const int position = list.lower_bound(key_tile);
    const bool listed =
        position < list.count * list.tiles_per_col && list.tile_at(position) == key_tile;
    shared = listed ? bits_of_tile(terms.block_bits, terms.bit_tiles, p.block_mask, list, position,
                                   first_row, kKv)
                    : kNotListed;
  }
  __syncthreads();
  const int found = shared;
  __syncthreads();  // all have read it before the next one is written
  return found;
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_bwd_bias_params all) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_attention_bwd_params& params = all.base.bwd;
  const blockflash_attention_fwd_params& p = params.base;
  const blockflash_score_terms& terms = all.base.terms;

  const int col_tiles = tiles_of(all.cols, kKv), row_tiles = tiles_of(all.rows, kQ);
  const int col_tile = blockIdx.x % col_tiles, row_tile = blockIdx.x / col_tiles % row_tiles;
  const int head_batch = blockIdx.x / col_tiles / row_tiles;
  const Range batches = Range::of(head_batch / all.heads, all.batch, p.batch),
              heads = Range::of(head_batch % all.heads, all.heads, p.num_heads_q),
              of_queries = Range::of(row_tile, all.rows, tiles_of(p.seqlen_q, kQ)),
              of_keys = Range::of(col_tile, all.cols, tiles_of(p.seqlen_kv, kKv));
  const AttentionMask mask = AttentionMask::of(p.scores.window, p.seqlen_q, p.seqlen_kv);

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t d_o_smem = q_smem + kQTileBytes, k_smem = d_o_smem + kQTileBytes,
                 v_smem = k_smem + kKvTileBytes;
  const QCopy q_copy(threadIdx.x);
  const KvCopy kv_copy(threadIdx.x);
  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const LaneAddress<kChunks> q_lane(q_smem, warp * kRowsPerWarp + row_major.row, row_major.chunk);
  const LaneAddress<kChunks> kv_lane(k_smem, col_major.row, col_major.chunk);

  // Adds the gradients of the scores of a tile.
  Scores sums;
  clear(sums);
  const auto visit = [&](int batch, int head, int q_begin, int k_begin) {
    const KeyRange seen = mask.keys_of_any(q_begin, min(q_begin + kQ, p.seqlen_q) - 1);
    if (k_begin >= seen.end || k_begin + kKv <= seen.begin) return;
    int bits = -1;
    if (p.block_mask.row_ptr != nullptr) {
      bits = find_tile(p, terms, batch, head, q_begin, k_begin / kKv);
      if (bits == kNotListed) return;
    }
    const int head_kv = head / (p.num_heads_q / p.num_heads_kv);
    const auto at = [&](const void* tensor, int64_t batch_stride, int64_t seq_stride,
                        int64_t head_stride, int of_head, int row) {
      return static_cast<const Element*>(tensor) + batch * batch_stride + of_head * head_stride +
             row * seq_stride;
    };
    __syncthreads();  // all have read the tiles before, which are replaced
    q_copy.start(q_smem, at(p.q, p.q_stride_batch, p.q_stride_seq, p.q_stride_head, head, q_begin),
                 p.q_stride_seq, p.seqlen_q - q_begin, p.head_dim_qk);
    q_copy.start(d_o_smem,
                 at(params.d_o, params.d_o_stride_batch, params.d_o_stride_seq,
                    params.d_o_stride_head, head, q_begin),
                 params.d_o_stride_seq, p.seqlen_q - q_begin, p.head_dim_v);
    kv_copy.start(k_smem,
                  at(p.k, p.k_stride_batch, p.k_stride_seq, p.k_stride_head, head_kv, k_begin),
                  p.k_stride_seq, p.seqlen_kv - k_begin, p.head_dim_qk);
    kv_copy.start(v_smem,
                  at(p.v, p.v_stride_batch, p.v_stride_seq, p.v_stride_head, head_kv, k_begin),
                  p.v_stride_seq, p.seqlen_kv - k_begin, p.head_dim_v);
    ptx::cp_async_commit_group();

    const int first_row = q_begin + warp * kRowsPerWarp;
    const int64_t statistics =
        batch * params.statistics_stride_batch + head * params.statistics_stride_head;
    float negative_log[kMTiles][2], delta[kMTiles][2];
    PairBits pairs[kMTiles];
    bool large = false;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      pairs[m] = load_bits(terms.bits, bits, first_row + m * 16, k_begin, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * 16 + accumulator_row(lane, 2 * half);
        if (row >= p.seqlen_q) pairs[m] &= half == 0 ? 0xFFFF0000u : 0xFFFFu;
        const bool inside = row < p.seqlen_q;
        negative_log[m][half] = inside ? params.negative_logs[statistics + row] : -CUDART_INF_F;
        delta[m][half] = inside ? params.deltas[statistics + row] : 0.f;
        large |= is_beyond_fused(negative_log[m][half]);
      }
    }
    restrict_keys(pairs, mask, first_row, k_begin, lane);
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the tiles are visible to all

    Scores s, dp;
    multiply_transposed<Element, kDSteps>(s, q_lane, 0, kv_lane, 0, 0);
    multiply_transposed<Element, kDSteps>(dp, q_lane, kQTileBytes, kv_lane, 0, kKvTileBytes);
    differentiate_with_terms<false, true>(
        s, dp, p.scores, terms, batch, head, {first_row, k_begin, p.seqlen_q, p.seqlen_kv}, pairs,
        __any_sync(~0u, large),
        [&](int m, int, float(&x)[2]) { x[0] = negative_log[m][0], x[1] = negative_log[m][1]; },
        [&](int m, int, float(&x)[2]) { x[0] = delta[m][0], x[1] = delta[m][1]; }, lane);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] += dp[m][n][i];
  };
#pragma unroll 1
  for (int batch = batches.begin; batch < batches.end; ++batch)
#pragma unroll 1
    for (int head = heads.begin; head < heads.end; ++head)
#pragma unroll 1
      for (int row = of_queries.begin; row < of_queries.end; ++row)
#pragma unroll 1
        for (int col = of_keys.begin; col < of_keys.end; ++col)
          visit(batch, head, row * kQ, col * kKv);

  __syncthreads();  // all have read the last tiles
  float* const of_tile = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * kRowsPerWarp + m * 16 + accumulator_row(lane, i);
        of_tile[row * kSumsRow + n * 8 + accumulator_column(lane, i)] = sums[m][n][i];
      }
  __syncthreads();

  // The rows and columns that are summed to one, and those that there are.
  const int sum_rows = all.rows == 1 ? kQ : 1, sum_cols = all.cols == 1 ? kKv : 1;
  const int first_row = all.rows == 1 ? 0 : row_tile * kQ,
            first_col = all.cols == 1 ? 0 : col_tile * kKv;
  const int rows = min(kQ / sum_rows, all.rows - first_row), cols = kKv / sum_cols;
  const int64_t first = head_batch / all.heads * all.d_bias_stride_batch +
                        head_batch % all.heads * all.d_bias_stride_head +
                        first_row * all.d_bias_stride_q + first_col * all.d_bias_stride_kv;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * cols; i += Config::threads) {
    const int row = i / cols, col = i % cols;
    if (first_col + col >= all.cols) continue;
    float sum = 0.f;
#pragma unroll 1
    for (int r = row; r < row + sum_rows; ++r)
#pragma unroll 1
      for (int c = col; c < col + sum_cols; ++c) sum += of_tile[r * kSumsRow + c];
    store(all.d_bias, first + row * all.d_bias_stride_q + col * all.d_bias_stride_kv,
          all.d_bias_type, sum);
  }
}

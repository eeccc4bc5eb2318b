// Gradients of attention by lists, for sm_80 and newer: dv = pᵀ·dO and dk = dsᵀ·q·scale of keys,
// and for each visit its part ds·k of dq.
//
// One CTA computes block_kv keys of one key head and walks the rows that visit them, pairs of a
// query and a head, 64 at a time, wherever they are. K and V stay in shared memory; Q, dO and their
// row statistics are gathered into it. All warps share the scores of a tile, p and ds pass through
// shared memory, and three products follow. Visits have a fixed order and nothing is shared between
// CTAs, so the result has one order of summation.
#include "blockflash/mma/products.cuh"
#include "blockflash/ptx/cp_async_word.cuh"
#include "parts.cuh"
#include "rows.cuh"

namespace blockflash {
namespace {

// Pairs of warps divide rows or keys, and `kWarpsN` warps divide keys or columns:
//   scores   rows / 2 × keys / kWarpsN
//   dk, dv   keys / 2 × columns / kWarpsN
//   dq       rows / 2 × columns / kWarpsN
constexpr int kWarpsM = 2, kWarpsN = Config::warps_d;
constexpr int kKeys = Config::block_kv;
constexpr int kRowTiles = kRows / kWarpsM / 16;     // MMA tiles of a warp along rows, 16 each,
constexpr int kKeyTiles = kKeys / kWarpsN / 8;      // and along keys, 8 each, of scores
constexpr int kKeyRowTiles = kKeys / kWarpsM / 16;  // along keys, 16 each, of dk and dv
constexpr int kDTiles = Config::head_dim / 8 / kWarpsN;
constexpr int kDSteps = Config::head_dim / 16;
constexpr int kKvTileBytes = kKeys * Config::head_dim * 2;
constexpr int kRowTileBytes = kRows * Config::head_dim * 2;
constexpr int kScoreChunks = kKeys / 8;
constexpr int kScoreBytes = kRows * kKeys * 2;
constexpr int kStages = 2;  // of Q; dO has one

static_assert(Config::warps == kWarpsM * kWarpsN, "warps divide rows, keys and columns");
static_assert(Config::stages == kStages, "of Q");
static_assert(kRows % 32 == 0 && kKeyTiles % 2 == 0 && kDTiles % 4 == 0 && kKeys % 32 == 0,
              "a warp computes whole MMA tiles");
static_assert(kRows <= Config::threads, "a thread has one row of a table");
static_assert(Config::smem_bytes == 2 * kKvTileBytes + (kStages + 1) * kRowTileBytes +
                                        2 * kScoreBytes +
                                        kStages * (kTableBytes + 2 * kStatisticsBytes),
              "manifest and kernel disagree on smem");

using KvCopy = TileCopy<kKeys, kChunks, Config::threads>;
using Scores = float[kRowTiles][kKeyTiles][4];
using Gradient = float[kKeyRowTiles][kDTiles][4];

// Turns scores into probabilities and dp into gradients of the scores.
template <Pairs pairs, bool masked>
__device__ __forceinline__ void differentiate_tile(Scores& s, Scores& dp,
                                                   const blockflash_scores& scores,
                                                   uint32_t statistics, uint32_t table,
                                                   int first_row, int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + accumulator_row(lane, 2 * half);
      const float negative_log = __uint_as_float(ptx::load_shared(statistics + row * 4)),
                  delta =
                      __uint_as_float(ptx::load_shared(statistics + kStatisticsBytes + row * 4));
      uint32_t begin = 0, end = 0;
      if constexpr (masked) {
        const uint32_t seen = ptx::load_shared(table + row * 8 + 4);
        begin = seen & 0xFF, end = seen >> 8 & 0xFF;
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const uint32_t key = first_key + n * 8 + accumulator_column(lane, i);
          const bool visible = !masked || (key >= begin && key < end);
          differentiate<pairs>(s[m][n][i], dp[m][n][i], scores, negative_log, delta, visible);
        }
    }
}

// Writes this warp's part of a tile of scores in 16 bits.
__device__ __forceinline__ void store_scores(const Scores& s, uint32_t tile, int row0, int chunk0,
                                             int lane) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(tile +
                              Swizzle<kScoreChunks>::offset(
                                  row0 + m * 16 + accumulator_row(lane, 2 * half), chunk0 + n) +
                              accumulator_column(lane, 0) * 2,
                          ElementTraits<Element>::pack(s[m][n][2 * half], s[m][n][2 * half + 1]));
}

// gradient += aᵀ·b over the rows of a tile, `a` scores in shared memory.
__device__ __forceinline__ void accumulate_transposed(Gradient& gradient,
                                                      const LaneAddress<kScoreChunks>& a,
                                                      uint32_t a_offset,
                                                      const LaneAddress<kChunks>& b,
                                                      uint32_t b_offset) {
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    uint32_t fragment[kKeyRowTiles][4];
#pragma unroll
    for (int m = 0; m < kKeyRowTiles; ++m)
      ptx::ldmatrix_x4_trans(fragment[m], a.at(step * 16, m) + a_offset);
    accumulate_step<Element>(gradient, fragment, b, step * 16, 0, b_offset);
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_index_bwd_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_attention_bwd_params& bwd = p.bwd;
  const blockflash_attention_fwd_params& fwd = bwd.base;

  const Work& work = Work::agreed(p);
  if (work.bin < 0) return;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;
  const bool packed = fwd.cu_seqlens_q != nullptr;
  const int heads_per_key_head = fwd.num_heads_q / fwd.num_heads_kv;
  // The first element of a tensor's sequence, and of a head.
  const auto at = [&](const void* tensor, int64_t batch, int64_t head, int of_head, int64_t row) {
    const Work& work = Work::shared();
    return static_cast<const Element*>(tensor) + (packed ? 0 : work.sequence.batch * batch) +
           of_head * head + row;
  };

  const uint32_t k_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t v_smem = k_smem + kKvTileBytes, q_smem = v_smem + kKvTileBytes;
  const uint32_t d_o_smem = q_smem + kStages * kRowTileBytes, p_smem = d_o_smem + kRowTileBytes;
  const uint32_t ds_smem = p_smem + kScoreBytes, tables = ds_smem + kScoreBytes;
  const uint32_t statistics = tables + kStages * kTableBytes;
  __shared__ uint32_t partly[kStages][kTableWarps];  // whether some row does not see all keys

  const KvCopy kv_copy(threadIdx.x);
  const RowCopy row_copy(threadIdx.x);
  {
    const int rows = work.sequence.keys.length - work.first_key;
    const int64_t row = (packed ? work.sequence.keys.begin : 0) + int64_t{work.first_key};
    kv_copy.start(
        k_smem,
        at(fwd.k, fwd.k_stride_batch, fwd.k_stride_head, work.head_kv, row * fwd.k_stride_seq),
        fwd.k_stride_seq, rows, fwd.head_dim_qk);
    kv_copy.start(
        v_smem,
        at(fwd.v, fwd.v_stride_batch, fwd.v_stride_head, work.head_kv, row * fwd.v_stride_seq),
        fwd.v_stride_seq, rows, fwd.head_dim_v);
  }

  const int tiles = (work.rows + kRows - 1) / kRows;
  // A thread of the first ones fills a row of the table of the i-th tile.
  const auto load_word = [&](int i) {
    return threadIdx.x < kRows ? load_visit(p, Work::shared(), i * kRows + threadIdx.x) : 0;
  };
  const auto fill_table = [&](int i, uint32_t word) {
    if (threadIdx.x >= kRows) return;
    const Row row = row_of(p, Work::shared(), i * kRows + threadIdx.x, word);
    const uint32_t to = tables + i % kStages * kTableBytes + threadIdx.x * 8;
    ptx::store_shared(to, row.query);
    ptx::store_shared(to + 4, row.head_and_keys);
    const bool some = __any_sync(~0u, !sees_all(row));
    if (lane == 0) partly[i % kStages][warp] = some;
  };
  // Every call commits one group, also past the end.
  const auto start_q = [&](int i) {
    if (i < tiles) {
      const Work& work = Work::shared();
      const int head = work.head_kv * heads_per_key_head;
      const uint32_t table = tables + i % kStages * kTableBytes;
      RowCopy(row_copy.anew())
          .start(q_smem + i % kStages * kRowTileBytes, table,
                 at(fwd.q, fwd.q_stride_batch, fwd.q_stride_head, head,
                    packed ? work.sequence.queries.begin * fwd.q_stride_seq : 0),
                 fwd.q_stride_seq, fwd.q_stride_head, fwd.head_dim_qk);
      if (threadIdx.x < kRows) {
        const int query = static_cast<int>(ptx::load_shared(table + threadIdx.x * 8));
        const int head_of_row =
            head + static_cast<int>(ptx::load_shared(table + threadIdx.x * 8 + 4) >> 16);
        const int64_t from =
            (packed ? 0 : work.sequence.batch * bwd.statistics_stride_batch) +
            head_of_row * bwd.statistics_stride_head + max(query, 0) +
            statistics_row(packed, work.sequence.batch, work.sequence.queries.begin);
        const uint32_t to = statistics + i % kStages * (2 * kStatisticsBytes) + threadIdx.x * 4;
        ptx::cp_async_ca_4_or_zero(to, bwd.negative_logs + from, query >= 0);
        ptx::cp_async_ca_4_or_zero(to + kStatisticsBytes, bwd.deltas + from, query >= 0);
      }
    }
    ptx::cp_async_commit_group();
  };
  const auto start_d_o = [&](int i) {
    if (i < tiles) {
      const Work& work = Work::shared();
      RowCopy(row_copy.anew())
          .start(d_o_smem, tables + i % kStages * kTableBytes,
                 at(bwd.d_o, bwd.d_o_stride_batch, bwd.d_o_stride_head,
                    work.head_kv * heads_per_key_head,
                    packed ? work.sequence.queries.begin * bwd.d_o_stride_seq : 0),
                 bwd.d_o_stride_seq, bwd.d_o_stride_head, fwd.head_dim_v);
    }
    ptx::cp_async_commit_group();
  };

  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const int warp_row = warp_m * (kRows / kWarpsM), warp_key = warp_n * (kKeys / kWarpsN);
  const int warp_column = warp_n * kDTiles * 8;
  const LaneAddress<kChunks> q_lane(q_smem, warp_row + row_major.row, row_major.chunk);
  const LaneAddress<kChunks> k_lane(k_smem, warp_key + col_major.row, col_major.chunk);
  // Operands whose rows are summed over, from the first column of this warp on. Tiles of keys and
  // of rows have the same layout.
  const LaneAddress<kChunks> columns_lane(k_smem, row_major.row,
                                          row_major.chunk + warp_n * kDTiles);
  const LaneAddress<kScoreChunks> transposed_lane(p_smem, col_major.row,
                                                  col_major.chunk + warp_m * (kKeys / kWarpsM / 8));
  const LaneAddress<kScoreChunks> ds_lane(ds_smem, warp_row + row_major.row, row_major.chunk);

  fill_table(0, load_word(0));
  fill_table(1, load_word(1));
  __syncthreads();
  start_q(0);
  start_d_o(0);

  Gradient dk, dv;
  clear(dk), clear(dv);
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const uint32_t stage = i % kStages;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // Q and dO of tile i are visible to all; all are done with tile i - 1
    start_q(i + 1);
    const uint32_t word = load_word(i + 2);
    {
      Scores s, dp;
      multiply_transposed<Element, kDSteps>(s, q_lane, stage * kRowTileBytes, k_lane, 0, 0);
      multiply_transposed<Element, kDSteps>(dp, q_lane, kStages * kRowTileBytes, k_lane, 0,
                                            kKvTileBytes);
      const uint32_t logs = statistics + stage * (2 * kStatisticsBytes);
      const auto differentiate_by = [&](auto pairs, auto masked) {
        differentiate_tile<decltype(pairs)::value, decltype(masked)::value>(
            s, dp, fwd.scores, logs, tables + stage * kTableBytes, warp_row, warp_key, lane);
      };
      bool large = false;  // whether a query is beyond `kFusedLimit`
#pragma unroll
      for (int r = lane; r < kRows; r += kWarpSize)
        large |= is_beyond_fused(__uint_as_float(ptx::load_shared(logs + 4 * r)));
      uint32_t some = 0;
#pragma unroll
      for (int w = 0; w < kTableWarps; ++w) some |= partly[stage][w];
      if (fwd.scores.scale_over_cap > 0.f)
        differentiate_by(PairsAre<Pairs::kCapped>{}, std::true_type{});
      else if (__any_sync(~0u, large))
        differentiate_by(PairsAre<Pairs::kLarge>{}, std::true_type{});
      else if (some)
        differentiate_by(PairsAre<Pairs::kPlain>{}, std::true_type{});
      else
        differentiate_by(PairsAre<Pairs::kPlain>{}, std::false_type{});
      store_scores(s, p_smem, warp_row, warp_key / 8, lane);
      store_scores(dp, ds_smem, warp_row, warp_key / 8, lane);
    }
    __syncthreads();  // p and ds are visible to all; nobody reads the table of tile i any more
    fill_table(i + 2, word);
    accumulate_transposed(dv, transposed_lane, 0, columns_lane,
                          2 * kKvTileBytes + kStages * kRowTileBytes);
    __syncthreads();  // all have read dO of tile i, which is refilled
    start_d_o(i + 1);
    accumulate_transposed(dk, transposed_lane, kScoreBytes, columns_lane,
                          2 * kKvTileBytes + stage * kRowTileBytes);
    float dq[kRowTiles][kDTiles][4];
    clear(dq);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t fragment[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(fragment[m], ds_lane.at(m * 16, step));
      accumulate_step<Element>(dq, fragment, columns_lane, step * 16, 0, 0);
    }
    const Work& again = Work::shared();
    const int64_t first_row =
        (int64_t{again.head_kv} * ((1 << bin_width_log2(p)) / kKeys) + again.tile) *
            entries_of_set(p) * p.group +
        again.first_row + i * kRows;
    store_dq_part(dq, p.dq_parts + first_row * fwd.head_dim_qk,
                  p.dq_factors + first_row * kWarpsN + warp_n, kWarpsN, warp_row,
                  again.rows - i * kRows, warp_column, fwd.head_dim_qk, lane);
  }
  ptx::cp_async_wait_group<0>();

  // A part of a bin with several items is left as it is. Otherwise earlier passes are added, and
  // later ones will be, or the result is rounded.
  const Work& again = Work::shared();
  const int warp_key_row = warp_m * (kKeys / kWarpsM);
  const int bin_tiles = (1 << bin_width_log2(p)) / kKeys;
  constexpr int kTile = kKeys * Config::head_dim;
  const bool is_part = again.part >= 0;
  const int64_t place = is_part ? int64_t{again.head_kv} * p.max_parts + again.part
                                : int64_t{again.head_kv} * p.bins + again.bin;
  float* const sums =
      (is_part ? p.key_parts : p.key_sums) + (place * bin_tiles + again.tile) * 2 * kTile;
  const auto store = [&](Gradient& gradient, float* sums, float factor, void* tensor, int64_t batch,
                         int64_t seq, int64_t head, int columns) {
    if (!is_part && !p.first_pass)
      each_pair(gradient, sums, Config::head_dim, warp_key_row, warp_column, lane,
                [](float2& sum, float& x, float& y) { x += sum.x, y += sum.y; });
    if (is_part || !p.last_pass) {
      each_pair(gradient, sums, Config::head_dim, warp_key_row, warp_column, lane,
                [](float2& sum, float& x, float& y) { sum = {x, y}; });
      return;
    }
    Element* const out = static_cast<Element*>(tensor) +
                         (packed ? again.sequence.keys.begin * seq : again.sequence.batch * batch) +
                         again.head_kv * head;
    store_rows<Element>(gradient, factor, out, seq, again.first_key + warp_key_row,
                        again.sequence.keys.length, warp_column, columns, lane);
  };
  store(dk, sums, fwd.scores.scale, bwd.dk, bwd.dk_stride_batch, bwd.dk_stride_seq,
        bwd.dk_stride_head, fwd.head_dim_qk);
  store(dv, sums + kTile, 1.f, bwd.dv, bwd.dv_stride_batch, bwd.dv_stride_seq, bwd.dv_stride_head,
        fwd.head_dim_v);
}

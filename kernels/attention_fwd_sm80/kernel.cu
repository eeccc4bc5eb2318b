// Attention forward for sm_80 and newer, dense or under a block mask: cp.async rings for K and V,
// ldmatrix, mma.sync, online softmax.
//
// One CTA computes block_q queries of one head. Each warp owns block_q / warps of them and walks
// all their key tiles, so scores, probabilities and outputs stay in its registers and only K and V
// are shared. Follows FlashAttention-2 (Dao, 2023).
#include <type_traits>

#include "blockflash/attention/scores.cuh"
#include "blockflash/attention/terms.cuh"
#include "blockflash/attention/visit.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/ptx/cp_async.cuh"
#include "sharers.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace blockflash {
namespace {

using QueryWork = Work<Config::block_q>;
using KeyVisit = Visit<Config::block_q, Config::block_kv>;
using Params = ParamsFor<blockflash_attention_fwd_params, blockflash_attention_fwd_terms_params>;

static_assert(!kHasTerms || (64 % Config::block_q == 0 && 64 % Config::block_kv == 0),
              "a tile of scores is inside 64 × 64 bits");

struct Keys {
  const Element *k, *v;  // the first key of the sequence and its value
  KeyRange all;          // keys that all queries of the tile see
};

// A NaN or infinity in V reaches every row of an MMA, also those whose probability for its key is
// 0. In a masked tile such values are therefore added here to the rows that do attend to them, and
// then removed from the tile. Rare, so small code. With score terms `pairs` are the visible ones.
__device__ __forceinline__ void add_visible_nonfinite(Output& o, const unsigned char* v_tile,
                                                      const AttentionMask& mask, int first_row,
                                                      int first_key, int first_chunk, int lane,
                                                      const PairBits* pairs = nullptr) {
#pragma unroll 1
  for (int key = 0; key < Config::block_kv; ++key) {
    bool visible[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kHasTerms) {
          const PairBits of_key = __shfl_sync(~0u, pairs[m], (lane & ~3) + key % 8 / 2);
          visible[m][half] = is_visible(of_key, key / 8, 2 * half + key % 2);
          continue;
        }
        const KeyRange keys = mask.keys_of(first_row + m * 16 + accumulator_row(lane, 2 * half));
        visible[m][half] = first_key + key >= keys.begin && first_key + key < keys.end;
      }
#pragma unroll
    for (int d = 0; d < kDTiles; ++d) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(
          v_tile + TileLayout::offset(key, first_chunk + chunk_of(d)) +
          accumulator_column(lane, 0) * 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint16_t bits = static_cast<uint16_t>(pair >> (16 * i));
        const float value =
            is_nonfinite<Element>(bits) ? ElementTraits<Element>::to_float(bits) : 0.f;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            o[m][d][2 * half + i] += visible[m][half] ? value : 0.f;
      }
    }
  }
}

// o / denominator to global memory, 16 bytes per lane, and the log-sum-exp.
__device__ __forceinline__ void store_output(Output& o, OnlineSoftmax<kMTiles>& softmax,
                                             const Sharers& sharers,
                                             const blockflash_attention_fwd_params& p,
                                             const QueryWork& work, int lane) {
  Element* const o_head = static_cast<Element*>(p.o) +
                          work.batch * p.o_stride_batch * (p.cu_seqlens_q == nullptr) +
                          work.head * p.o_stride_head;
  const int first_row = work.q_begin + sharers.rows * kRowsPerWarp;
  sharers.sum(softmax.sum);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + accumulator_row(lane, 2 * half);
      float reference = softmax.reference[m][half];
      float denominator = quad_sum(softmax.sum[m][half]);
      float scale = 1.f;
      if (p.scores.sink != nullptr)
        scale = join_sink(reference, denominator, Log2Units::sink(p.scores, work.head));
      // An empty row: the sum is exactly 0, and so are the accumulators. NaN is not equal to 0 and
      // passes through.
      scale = denominator == 0.f ? 0.f : scale / denominator;
      if (p.lse != nullptr && sharers.part == 0 && (lane & 3) == 0 && row < work.seqlen_q)
        p.lse[work.batch * p.lse_stride_batch + work.head * p.lse_stride_head + work.q_offset +
              row] = fmaf(ptx::lg2_approx(denominator), kLn2, reference * kLn2);
      Element* const o_row = o_head + (work.q_offset + row) * p.o_stride_seq;
#pragma unroll
      for (int d = 0; d < kDTiles; d += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          piece[i] = ElementTraits<Element>::pack(o[m][d + i][2 * half] * scale,
                                                  o[m][d + i][2 * half + 1] * scale);
        quad_transpose(piece, lane);
        const int column = (chunk_of(d) + sharers.part * 4 + (lane & 3)) * 8;
        if (row < work.seqlen_q && column < p.head_dim_v)
          *reinterpret_cast<uint4*>(o_row + column) =
              make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash::Params params) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];
  const blockflash_attention_fwd_params& p = without_terms(params);

  const bool dense = is_dense(p), packed = p.cu_seqlens_q != nullptr;
  const KeyVisit found = dense ? KeyVisit::dense(p) : KeyVisit::agreed(p);
  const QueryWork& queries = found.work;
  if (queries.q_begin >= queries.seqlen_q) return;
  const Keys found_keys = {
      static_cast<const Element*>(p.k) +
          (packed ? queries.kv_offset * p.k_stride_seq : queries.batch * p.k_stride_batch) +
          queries.head_kv * p.k_stride_head,
      static_cast<const Element*>(p.v) +
          (packed ? queries.kv_offset * p.v_stride_seq : queries.batch * p.v_stride_batch) +
          queries.head_kv * p.v_stride_head,
      found.mask(p).keys_of_all(queries.q_begin, found.q_last())};
  const Element* const q =
      static_cast<const Element*>(p.q) +
      (packed ? queries.q_offset * p.q_stride_seq : queries.batch * p.q_stride_batch) +
      queries.head * p.q_stride_head + queries.q_begin * p.q_stride_seq;

  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t k_smem = q_smem + kQTileBytes, v_smem = k_smem + kKvTileBytes;
  const KvCopy kv_copy(threadIdx.x);
  // The i-th tile in the order of a visit: its first row, how many rows exist, and whether it does.
  // Wide tiles read that from shared memory, so before the barrier that the copy is behind: the
  // words come while others arrive there.
  struct Tile {
    const Element* from;
    int rows;
    bool exists;
  };
  const auto tile_of = [&](const KeyVisit& visit, const Element* src, int64_t stride, int i,
                           int first_key) {
    return Tile{src + first_key * stride, visit.work.seqlen_kv - first_key, i < visit.tiles};
  };
  // Every call commits one group, also past the end.
  const auto copy_tile = [&](const Tile& tile, int64_t stride, int columns, uint32_t to) {
    if (tile.exists) kv_copy.start(to, tile.from, stride, tile.rows, columns);
    ptx::cp_async_commit_group();
  };
  const auto start_tile = [&](const KeyVisit& visit, const Element* src, int64_t stride,
                              int columns, uint32_t to, int i, int first_key) {
    copy_tile(tile_of(visit, src, stride, i, first_key), stride, columns, to);
  };
  int first_key = found.first_key_of(0);
  QCopy(threadIdx.x)
      .start(q_smem, q, p.q_stride_seq, queries.seqlen_q - queries.q_begin, p.head_dim_qk);
  start_tile(found, found_keys.k, p.k_stride_seq, p.head_dim_qk, k_smem, 0, first_key);
  if (kWide || kTwoStages)
    start_tile(found, found_keys.v, p.v_stride_seq, p.head_dim_v, v_smem, 0, first_key);

  // Wide tiles leave no registers for what follows; the epilogue reads it again, too.
  __shared__ Keys shared_keys;
  if (threadIdx.x == 0) {
    if (dense) KeyVisit::shared() = found;
    shared_keys = found_keys;
  }
  __syncthreads();
  std::conditional_t<kWide, const KeyVisit&, const KeyVisit> visit =
      kWide ? KeyVisit::shared() : found;
  std::conditional_t<kWide, const Keys&, const Keys> keys = kWide ? shared_keys : found_keys;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const Sharers sharers(v_smem + kKvTileBytes + (Config::stages - 1) * kStageBytes, warp, lane);
  const auto first_row = [&] { return visit.work.q_begin + sharers.rows * kRowsPerWarp; };
  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const LaneAddress<kChunks> q_lane(q_smem, sharers.rows * kRowsPerWarp + row_major.row,
                                    row_major.chunk);
  const LaneAddress<kChunks> k_lane(k_smem, sharers.part * kKvPerWarp + col_major.row,
                                    col_major.chunk);
  const LaneAddress<kChunks> v_lane(v_smem, row_major.row, sharers.part * 4 + row_major.chunk);

  // The bits of the i-th tile.
  const auto bits_of = [&](int i) {
    int bits = -1;
    if constexpr (kHasTerms)
      with_terms(params, [&](const auto& all) {
        if (i < visit.tiles)
          bits = bits_of_tile(all.terms.block_bits, all.terms.bit_tiles, p.block_mask, visit.list,
                              visit.last - i, visit.work.q_begin, Config::block_kv);
      });
    return bits;
  };
  int bits = bits_of(0);

  QFragments q_rmem;
  Output o = {};
  Scores s;
  OnlineSoftmax<kMTiles> softmax;

#pragma unroll 1
  for (int i = 0; i < visit.tiles; ++i) {
    const uint32_t stage = kTwoStages ? i % 2 * kStageBytes : 0, next_stage = kStageBytes - stage;
    unsigned char* v_tile;
    bool masked, has_nonfinite;
    int next_key, next_bits;
    Tile next;                // of K
    PairBits pairs[kMTiles];  // visible ones
    if constexpr (kHasTerms)
      with_terms(params, [&](const auto& all) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
          pairs[m] = load_bits(all.terms.bits, bits, first_row() + m * 16, first_key, lane);
      });
    const auto next_k = [&] { return tile_of(visit, keys.k, p.k_stride_seq, i + 1, next_key); };
    // One kind of barrier whether a tile is masked or not: under a block mask that changes
    // meanwhile, threads need not agree.
    const auto meet = [&] {
      if constexpr (kWide) next_key = visit.first_key_of(i + 1), next = next_k();
      masked = first_key < keys.all.begin || first_key + Config::block_kv > keys.all.end;
      if constexpr (kHasTerms) masked |= bits >= 0, next_bits = bits_of(i + 1);
      ptx::cp_async_wait_group<0>();
      v_tile = smem + kQTileBytes + kKvTileBytes + stage;
      has_nonfinite = __syncthreads_or(masked && kv_copy.template has_nonfinite<Element>(v_tile));
      if constexpr (!kWide) next_key = visit.first_key_of(i + 1), next = next_k();
    };
    if constexpr (kTwoStages) {
      meet();  // K and V tile i are visible to all; all have read tiles i - 1, which are replaced
      copy_tile(next, p.k_stride_seq, p.head_dim_qk, k_smem + next_stage);
      start_tile(visit, keys.v, p.v_stride_seq, p.head_dim_v, v_smem + next_stage, i + 1, next_key);
    } else {
      const auto this_v = [&] { return tile_of(visit, keys.v, p.v_stride_seq, i, first_key); };
      Tile v;
      if constexpr (kWide) v = this_v();
      // In wide tiles the group of V tile 0, or an empty one, is behind that of K tile i.
      ptx::cp_async_wait_group<kWide>();
      __syncthreads();  // K tile i is visible to all; all have read V tile i - 1, which is replaced
      if constexpr (!kWide) v = this_v();
      if (!kWide || i > 0) copy_tile(v, p.v_stride_seq, p.head_dim_v, v_smem);
    }

    if constexpr (kQInRegisters)
      if (i == 0)
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
          for (int d = 0; d < kDSteps; ++d) ptx::ldmatrix_x4(q_rmem[m][d], q_lane.at(m * 16, d));
    compute_scores(s, q_rmem, q_lane, moved(k_lane, stage));

    if constexpr (!kTwoStages) {
      meet();  // V tile i is visible to all; all have read K tile i, which is replaced
      copy_tile(next, p.k_stride_seq, p.head_dim_qk, k_smem);
      if (kWide) ptx::cp_async_commit_group();
    }

    cap_scores(s, p.scores);
    if constexpr (kHasTerms)
      with_terms(params, [&](const auto& all) {
        if (adds(all.terms))
          add_terms(s, all.terms, factor_before_terms(p.scores), visit.work.batch, visit.work.head,
                    TileAxes<false>{first_row(), first_key + sharers.part * kKvPerWarp,
                                    visit.work.seqlen_q, visit.work.seqlen_kv},
                    lane);
        if (!masked) return;
        restrict_keys(pairs, visit.mask(p), first_row(), first_key, lane);
        PairBits own[kMTiles];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) own[m] = pairs[m] >> sharers.part * kKvTiles * 2;
        hide(s, own, -CUDART_INF_F);
      });
    if (!kHasTerms && masked)
      apply_mask(s, visit.mask(p), first_row(), first_key + sharers.part * kKvPerWarp, lane);
    softmax.update(s, o, p.scores, sharers);
    if (has_nonfinite) {
      if constexpr (kHasTerms)
        add_visible_nonfinite(o, v_tile, visit.mask(p), first_row(), first_key, sharers.part * 4,
                              lane, pairs);
      else
        add_visible_nonfinite(o, v_tile, visit.mask(p), first_row(), first_key, sharers.part * 4,
                              lane);
      __syncthreads();  // all have read the tile before it is changed
      kv_copy.template clear_nonfinite<Element>(v_tile);
      __syncthreads();
    }
    sharers.multiply(o, s, moved(v_lane, stage));
    first_key = next_key, bits = next_bits;
  }
  ptx::cp_async_wait_group<0>();
  store_output(o, softmax, sharers, p, KeyVisit::shared().work, lane);
}

// Attention forward for sm_80 and newer, dense or under a block mask: cp.async rings for K and V,
// ldmatrix, mma.sync, online softmax.
//
// One CTA computes block_q queries of one head. Each warp owns block_q / warps of them and walks
// all their key tiles, so scores, probabilities and outputs stay in its registers and only K and V
// are shared. Follows FlashAttention-2 (Dao, 2023).
#include <type_traits>

#include "blockflash/attention/soft_cap.cuh"
#include "blockflash/attention/visit.cuh"
#include "blockflash/config/attention.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/mma/swizzle.cuh"
#include "blockflash/mma/tile_copy.cuh"
#include "blockflash/params/attention_fwd.h"
#include "blockflash/ptx/cp_async.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mma.cuh"
#include "softmax.cuh"

namespace blockflash {
namespace {

using Config = AttentionPortableConfig;
using Element = Config::Element;
using QueryWork = Work<Config::block_q>;
using KeyVisit = Visit<Config::block_q, Config::block_kv>;

constexpr int kChunks = Config::head_dim / 8;  // 16-byte chunks of a row of Q, K or V
constexpr int kRowsPerWarp = Config::block_q / Config::warps;
constexpr int kMTiles = kRowsPerWarp / 16;       // MMA tiles of a warp along queries,
constexpr int kKvTiles = Config::block_kv / 8;   // along keys,
constexpr int kDTiles = Config::head_dim / 8;    // and along the head dimension
constexpr int kDSteps = Config::head_dim / 16;   // MMA steps of Q·Kᵀ
constexpr int kKvSteps = Config::block_kv / 16;  // MMA steps of P·V
constexpr int kQTileBytes = Config::block_q * Config::head_dim * 2;
constexpr int kKvTileBytes = Config::block_kv * Config::head_dim * 2;
// Q stays in registers where it fits beside the accumulators; otherwise every key tile reads it
// from shared memory again.
constexpr bool kQInRegisters = kMTiles * (kDSteps * 4 + kDTiles * 4 + kKvTiles * 4) <= 168;
// Wide tiles fill the registers and take many copies: what a CTA agrees on stays in shared memory,
// and whole key tiles are copied from one address per thread.
constexpr bool kWide = Config::head_dim >= 128;

static_assert(kRowsPerWarp % 16 == 0, "a warp computes whole MMA tiles");
static_assert(kDTiles % 4 == 0, "the epilogue stores four MMA tiles at a time");
static_assert(Config::smem_bytes == kQTileBytes + 2 * Config::stages * kKvTileBytes,
              "manifest and kernel disagree on smem");

using QCopy = TileCopy<Config::block_q, kChunks, Config::threads>;
using KvCopy = TileCopy<Config::block_kv, kChunks, Config::threads>;
using TileLayout = Swizzle<kChunks>;

using Scores = float[kMTiles][kKvTiles][4];
using Output = float[kMTiles][kDTiles][4];
using QFragments = uint32_t[kMTiles][kDSteps][4];

// s = Q·Kᵀ for the rows of this warp.
__device__ __forceinline__ void compute_scores(Scores& s, const QFragments& q_rmem,
                                               const LaneAddress<kChunks>& q_lane,
                                               const LaneAddress<kChunks>& k_lane,
                                               uint32_t k_stage) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0.f;
#pragma unroll
  for (int d = 0; d < kDSteps; ++d) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_rmem[m][d][i];
      } else {
        ptx::ldmatrix_x4(a[m], q_lane.at(m * 16, d));
      }
    }
#pragma unroll
    for (int n = 0; n < kKvTiles; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k_lane.at(n * 8, d) + k_stage);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(s[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += P·V. Rounded to 16 bits, the score accumulators have the layout of an A operand.
__device__ __forceinline__ void accumulate_output(Output& o, const Scores& p,
                                                  const LaneAddress<kChunks>& v_lane,
                                                  uint32_t v_stage) {
  using Traits = ElementTraits<Element>;
#pragma unroll
  for (int k = 0; k < kKvSteps; ++k) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &p[m][2 * k + i / 2][i % 2 * 2];
        a[m][i] = Traits::pack(pair[0], pair[1]);
      }
#pragma unroll
    for (int d = 0; d < kDTiles; d += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, v_lane.at(k * 16, d / 2) + v_stage);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ptx::mma_m16n8k16<Element>(o[m][d], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(o[m][d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

__device__ __forceinline__ void apply_mask(Scores& s, const AttentionMask& mask, int first_row,
                                           int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = mask.keys_of(first_row + m * 16 + accumulator_row(lane, 2 * half));
#pragma unroll
      for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int key = first_key + n * 8 + accumulator_column(lane, i);
          if (key < keys.begin || key >= keys.end) s[m][n][i] = -CUDART_INF_F;
        }
    }
}

// A NaN or infinity in V reaches every row of an MMA, also those whose probability for its key is
// 0. In a masked tile such values are therefore added here to the rows that do attend to them, and
// then removed from the tile. Rare, so small code.
__device__ __forceinline__ void add_visible_nonfinite(Output& o, const unsigned char* v_tile,
                                                      const AttentionMask& mask, int first_row,
                                                      int first_key, int lane) {
#pragma unroll 1
  for (int key = 0; key < Config::block_kv; ++key) {
    bool visible[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange keys = mask.keys_of(first_row + m * 16 + accumulator_row(lane, 2 * half));
        visible[m][half] = first_key + key >= keys.begin && first_key + key < keys.end;
      }
#pragma unroll
    for (int d = 0; d < kDTiles; ++d) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(v_tile + TileLayout::offset(key, d) +
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
                                             const blockflash_attention_fwd_params& p,
                                             const QueryWork& work, int first_row, int lane) {
  constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
  Element* const o_head = static_cast<Element*>(p.o) +
                          work.batch * p.o_stride_batch * (p.cu_seqlens_q == nullptr) +
                          work.head * p.o_stride_head;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + accumulator_row(lane, 2 * half);
      float reference = softmax.reference[m][half];
      float denominator = quad_sum(softmax.sum[m][half]);
      float scale = 1.f;
      if (p.sink != nullptr) {
        const float sink = p.sink[work.head] * kLog2e;
        const float moved = fmaxf(reference, sink);
        scale = ptx::ex2_approx(reference - softmax.finite(moved));
        denominator = denominator * scale + ptx::ex2_approx(sink - softmax.finite(moved));
        reference = moved;
      }
      // An empty row: the sum is exactly 0, and so are the accumulators. NaN is not equal to 0 and
      // passes through.
      scale = denominator == 0.f ? 0.f : scale / denominator;
      if (p.lse != nullptr && (lane & 3) == 0 && row < work.seqlen_q)
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
        const int column = (d + (lane & 3)) * 8;
        if (row < work.seqlen_q && column < p.head_dim)
          *reinterpret_cast<uint4*>(o_row + column) =
              make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
    }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_fwd_params p) {
  using namespace blockflash;
  extern __shared__ __align__(128) unsigned char smem[];

  std::conditional_t<kWide, const KeyVisit&, const KeyVisit> visit = KeyVisit::agreed(p);
  const QueryWork& work = visit.work;
  if (work.q_begin >= work.seqlen_q) return;
  const int& tiles = visit.tiles;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto first_row = [&] { return work.q_begin + warp * kRowsPerWarp; };
  const bool packed = p.cu_seqlens_q != nullptr;
  const Element* const q =
      static_cast<const Element*>(p.q) +
      (packed ? work.q_offset * p.q_stride_seq : work.batch * p.q_stride_batch) +
      work.head * p.q_stride_head + work.q_begin * p.q_stride_seq;
  struct Keys {
    const Element *k, *v;  // the first key of the sequence and its value
    KeyRange all;          // keys that all queries of the tile see
  };
  const Keys own = {static_cast<const Element*>(p.k) +
                        (packed ? work.kv_offset * p.k_stride_seq : work.batch * p.k_stride_batch) +
                        work.head_kv * p.k_stride_head,
                    static_cast<const Element*>(p.v) +
                        (packed ? work.kv_offset * p.v_stride_seq : work.batch * p.v_stride_batch) +
                        work.head_kv * p.v_stride_head,
                    visit.mask(p).keys_of_all(work.q_begin, visit.q_last())};
  __shared__ Keys shared;
  if constexpr (kWide) {
    if (threadIdx.x == 0) shared = own;
    __syncthreads();
  }
  const Keys& keys = kWide ? shared : own;

  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t k_smem = q_smem + kQTileBytes;
  const uint32_t v_smem = k_smem + Config::stages * kKvTileBytes;
  const QCopy q_copy(threadIdx.x);
  const KvCopy kv_copy(threadIdx.x);

  // The first key of the i-th tile in the order of visit.
  const auto first_key_of = [&](int i) {
    return i < tiles ? visit.list.tile_at(visit.last - i) * Config::block_kv : 0;
  };
  // The i-th tile goes to stage i % stages of its ring. Every call commits one group, also past the
  // end.
  const auto start_tile = [&](const Element* src, int64_t stride, uint32_t ring, int i,
                              int first_key) {
    const uint32_t to = ring + i % Config::stages * kKvTileBytes;
    const Element* const from = src + first_key * stride;
    const int rows = work.seqlen_kv - first_key;
    if (i < tiles) {
      if constexpr (kWide)
        kv_copy.stream(to, from, stride, rows, p.head_dim);
      else
        kv_copy.start(to, from, stride, rows, p.head_dim);
    }
    ptx::cp_async_commit_group();
  };

  q_copy.start(q_smem, q, p.q_stride_seq, work.seqlen_q - work.q_begin, p.head_dim);
  int first_key[Config::stages];  // of the tiles i to i + stages - 1
#pragma unroll
  for (int i = 0; i < Config::stages; ++i) {
    first_key[i] = first_key_of(i);
    start_tile(keys.k, p.k_stride_seq, k_smem, i, first_key[i]);
    if (i + 1 < Config::stages) start_tile(keys.v, p.v_stride_seq, v_smem, i, first_key[i]);
  }

  const LaneCoords row_major = lane_row_major(lane), col_major = lane_col_major(lane);
  const LaneAddress<kChunks> q_lane(q_smem, warp * kRowsPerWarp + row_major.row, row_major.chunk);
  const LaneAddress<kChunks> k_lane(k_smem, col_major.row, col_major.chunk);
  const LaneAddress<kChunks> v_lane(v_smem, row_major.row, row_major.chunk);

  constexpr float kLog2e = 1.4426950408889634f;
  const float scale_over_cap = p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f;
  const float scale_log2 = p.softcap > 0.f ? kLog2e : kLog2e * p.softmax_scale;

  QFragments q_rmem;
  Output o = {};
  Scores s;
  OnlineSoftmax<kMTiles> softmax;

  // 2·stages - 1 groups precede iteration 0 and every iteration commits two, so at both waits below
  // the group that is needed is the oldest of the 2·stages - 1 youngest.
  constexpr int kPending = 2 * Config::stages - 2;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const uint32_t stage = i % Config::stages * kKvTileBytes;

    ptx::cp_async_wait_group<kPending>();
    __syncthreads();  // K tile i is visible to all; all have read V tile i - 1, whose stage is
                      // refilled next
    start_tile(keys.v, p.v_stride_seq, v_smem, i + Config::stages - 1,
               first_key[Config::stages - 1]);

    if constexpr (kQInRegisters)
      if (i == 0)
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
          for (int d = 0; d < kDSteps; ++d) ptx::ldmatrix_x4(q_rmem[m][d], q_lane.at(m * 16, d));
    compute_scores(s, q_rmem, q_lane, k_lane, stage);

    const bool masked =
        first_key[0] < keys.all.begin || first_key[0] + Config::block_kv > keys.all.end;
    ptx::cp_async_wait_group<kPending>();
    unsigned char* const v_tile = smem + kQTileBytes + Config::stages * kKvTileBytes + stage;
    // V tile i is visible to all; all have read K tile i, whose stage is refilled next. One kind of
    // barrier in both cases: under a block mask that changes meanwhile, threads need not agree that
    // a tile is masked.
    const bool poisoned =
        __syncthreads_or(masked && kv_copy.template has_nonfinite<Element>(v_tile));
    const int next_key = first_key_of(i + Config::stages);
    start_tile(keys.k, p.k_stride_seq, k_smem, i + Config::stages, next_key);

    if (p.softcap > 0.f) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kKvTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] = soft_cap(s[m][n][e], p.softcap, scale_over_cap);
    }
    if (masked) apply_mask(s, visit.mask(p), first_row(), first_key[0], lane);
    softmax.update(s, o, scale_log2);
    if (poisoned) {
      add_visible_nonfinite(o, v_tile, visit.mask(p), first_row(), first_key[0], lane);
      __syncthreads();  // all have read the tile before it is changed
      kv_copy.template clear_nonfinite<Element>(v_tile);
      __syncthreads();
    }
    accumulate_output(o, s, v_lane, stage);
#pragma unroll
    for (int ahead = 0; ahead + 1 < Config::stages; ++ahead)
      first_key[ahead] = first_key[ahead + 1];
    first_key[Config::stages - 1] = next_key;
  }
  ptx::cp_async_wait_group<0>();
  // Read once more rather than kept: registers are short in the main loop.
  const QueryWork& again = KeyVisit::shared().work;
  store_output(o, softmax, p, again, again.q_begin + warp * kRowsPerWarp, lane);
}

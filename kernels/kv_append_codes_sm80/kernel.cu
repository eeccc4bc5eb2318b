// Appends keys and values to a cache of 8-bit codes, and rotates keys and queries by their
// positions.
//
// A row is one head of one token of new keys or of queries. Up to 32 lanes of a warp have a row,
// and take turns with its pieces of 8 elements.
#include "blockflash/config/kv_append_codes.cuh"
#include "blockflash/decode/encode.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/decode/rotary.cuh"
#include "blockflash/decode/tokens.cuh"
#include "blockflash/params/kv_append_codes.h"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

using Config = KvAppendCodesConfig;
using Params = blockflash_kv_append_codes_params;

constexpr int kPiece = 8;  // elements of 16 bytes

// The lanes of a row, and one of them. All lanes of a warp have equally many neighbours.
struct Lanes {
  int count, lane;  // a power of two

  static __device__ __forceinline__ Lanes of(int columns) {
    const int pieces = columns / kPiece;
    const int count = pieces > kWarpSize / 2 ? kWarpSize : 1 << (32 - __clz(pieces - 1));
    return {count, static_cast<int>(threadIdx.x) & (count - 1)};
  }
  template <class Function>
  __device__ __forceinline__ void each_piece(int columns, Function function) const {
    for (int column = lane * kPiece; column < columns; column += count * kPiece) function(column);
  }
  // All lanes of the warp call this.
  __device__ __forceinline__ float greatest(float x) const {
    for (int apart = count / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
  }
};

// Where a new key or value is and goes to; without columns if it is dropped.
struct Row {
  const void* from;
  uint8_t* to;
  float* scale;  // null: 1
  int columns;
  int64_t position;
};

template <class Element>
__device__ __forceinline__ void load_piece(const blockflash_rotary* rotary, const Row& row,
                                           int column, float (&x)[kPiece]) {
  const Element* const from = static_cast<const Element*>(row.from);
  const uint4 piece = *reinterpret_cast<const uint4*>(from + column);
  const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    x[i] = ElementTraits<Element>::to_float(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
  if (rotary == nullptr || rotary->cos == nullptr) return;
  const int64_t position = min(max(row.position, int64_t{0}), int64_t{rotary->positions - 1});
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (column + i >= rotary->dim) break;
    x[i] = turned_element(*rotary, from, column + i, position);
  }
}

// All lanes of a warp call this, also those without a row.
template <class Element>
__device__ __forceinline__ void store_row(const Row& row, const blockflash_rotary* rotary,
                                          bool chooses, int dtype, const Lanes& lanes) {
  float x[kPiece], scale = 1.f;
  if (chooses) {
    float most = 0.f;
    lanes.each_piece(row.columns, [&](int column) {
      load_piece<Element>(rotary, row, column, x);
#pragma unroll
      // NaN does not count.
      for (int i = 0; i < kPiece; ++i) most = fmaxf(most, fabsf(x[i]));
    });
    scale = __fdiv_rn(lanes.greatest(most), greatest_code(dtype));
    if (scale == 0.f) scale = 1.f;
    if (row.columns > 0 && lanes.lane == 0) *row.scale = scale;
  } else if (row.columns > 0 && row.scale != nullptr) {
    scale = *row.scale;
  }
  lanes.each_piece(row.columns, [&](int column) {
    load_piece<Element>(rotary, row, column, x);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      words[i / 4] |= code_of(__fdiv_rn(x[i], scale), dtype) << i % 4 * 8;
    *reinterpret_cast<uint2*>(row.to + column) = make_uint2(words[0], words[1]);
  });
}

template <class Element>
__device__ __forceinline__ void append(const Params& codes, int64_t number_of_row, int new_rows,
                                       const Lanes& lanes) {
  const blockflash_kv_append_params& p = codes.append;
  Row k = {}, v = {};
  const auto find = [&](int row) {
    const int number = row / p.num_heads_kv, head = row - number * p.num_heads_kv;
    const Token token = Token::of(p.cu_seqlens_new, number, p.batch, p.seqlen_new, p.total_new);
    if (!token.exists()) return;
    const blockflash_kv_cache& cache = p.cache;
    const int64_t position = token.position(cache);
    if (position < 0 || position >= cache.capacity) return;
    const int key = static_cast<int>(position);
    const int page_column = key / cache.page_size;
    const int64_t slot = key - page_column * cache.page_size;
    const int64_t page = page_of_column(cache, token.sequence, page_column);
    const auto scale_at = [&](const float* scales, int64_t of_sequence, int64_t of_page,
                              int64_t of_slot, int64_t of_head) -> float* {
      if (scales == nullptr) return nullptr;
      return const_cast<float*>(scales) + token.sequence * of_sequence + page * of_page +
             slot * of_slot + head * of_head;
    };
    const blockflash_cache_scales& s = codes.scales;
    k.from = static_cast<const Element*>(p.k_new) + token.batch * p.k_new_stride_batch +
             token.row * p.k_new_stride_seq + head * p.k_new_stride_head;
    v.from = static_cast<const Element*>(p.v_new) + token.batch * p.v_new_stride_batch +
             token.row * p.v_new_stride_seq + head * p.v_new_stride_head;
    k.to = static_cast<uint8_t*>(const_cast<void*>(cache.k)) + page * cache.k_stride_page +
           slot * cache.k_stride_slot + head * cache.k_stride_head;
    v.to = static_cast<uint8_t*>(const_cast<void*>(cache.v)) + page * cache.v_stride_page +
           slot * cache.v_stride_slot + head * cache.v_stride_head;
    k.scale = scale_at(s.k, s.k_stride_sequence, s.k_stride_page, s.k_stride_slot, s.k_stride_head);
    v.scale = scale_at(s.v, s.v_stride_sequence, s.v_stride_page, s.v_stride_slot, s.v_stride_head);
    k.position = v.position = position;
    k.columns = p.head_dim_qk, v.columns = p.head_dim_v;
  };
  if (number_of_row < new_rows) find(static_cast<int>(number_of_row));
  store_row<Element>(k, &p.rotary_new, codes.chooses_k != 0, codes.cache_dtype, lanes);
  store_row<Element>(v, nullptr, codes.chooses_v != 0, codes.cache_dtype, lanes);
}

template <class Element>
__device__ __forceinline__ void turn_query(const blockflash_kv_append_params& p, int row,
                                           const Lanes& lanes) {
  const int number = row / p.num_heads_q, head = row - number * p.num_heads_q;
  const Token token = Token::of(p.cu_seqlens_q, number, p.batch, p.seqlen_q, p.total_q);
  if (!token.exists()) return;
  const Element* const from = static_cast<const Element*>(p.q) + token.batch * p.q_stride_batch +
                              token.row * p.q_stride_seq + head * p.q_stride_head;
  Element* const to = static_cast<Element*>(p.q_turned) + token.batch * p.q_turned_stride_batch +
                      token.row * p.q_turned_stride_seq + head * p.q_turned_stride_head;
  const int64_t position = token.position(p.cache);
  lanes.each_piece(p.head_dim_qk, [&](int column) {
    *reinterpret_cast<uint4*>(to + column) = rotated(p.rotary_q, from, column, position);
  });
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_kv_append_codes_params codes) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  // Attention waits for all of this kernel itself.
  ptx::launch_dependents();
  const blockflash_kv_append_params& p = codes.append;
  const Lanes lanes = Lanes::of(max(p.head_dim_qk, p.head_dim_v));
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * Config::threads + threadIdx.x;
  const int64_t row = thread / lanes.count;
  const int new_rows = p.k_new == nullptr ? 0
                                          : rows_of(p.cu_seqlens_new, p.batch, p.seqlen_new,
                                                    p.total_new, p.num_heads_kv);
  const int query_rows =
      p.q == nullptr ? 0 : rows_of(p.cu_seqlens_q, p.batch, p.seqlen_q, p.total_q, p.num_heads_q);
  if (codes.new_dtype == BLOCKFLASH_DTYPE_F16)
    append<__half>(codes, row, new_rows, lanes);
  else
    append<__nv_bfloat16>(codes, row, new_rows, lanes);
  if (row < new_rows || row - new_rows >= query_rows) return;
  if (codes.q_dtype == BLOCKFLASH_DTYPE_F16)
    turn_query<__half>(p, static_cast<int>(row - new_rows), lanes);
  else
    turn_query<__nv_bfloat16>(p, static_cast<int>(row - new_rows), lanes);
}

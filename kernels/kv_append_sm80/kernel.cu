// Appends keys and values to a cache, and rotates them and the queries (rotary embedding).
//
// A row is one head of one token of k, v or q. A thread writes 8 elements of a row, and reads their
// partners as well where the pairs of the rotation lie half a row apart.
#include "blockflash/attention/packed_rows.cuh"
#include "blockflash/config.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/mma/element.cuh"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

using Config = KvAppendConfig;
using Element = Config::Element;
using Params = blockflash_kv_append_params;

constexpr int kPiece = 8;  // elements of 16 bytes

// A token, packed or not: its sequence, its place in the sequence, and the sequence's tokens.
struct Token {
  int sequence, index, count;
  int64_t batch, row;  // factors of the strides

  static __device__ __forceinline__ Token of(const int32_t* cu_seqlens, int token, int batch,
                                             int seqlen, int total) {
    if (cu_seqlens == nullptr) {
      const int sequence = token / seqlen, index = token - sequence * seqlen;
      return {sequence, index, seqlen, sequence, index};
    }
    // The last sequence that begins at or before the token. Offsets that do not ascend lead to some
    // sequence, which then does not hold the token.
    int first = 0, last = batch - 1;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (cu_seqlens[middle] <= token)
        first = middle;
      else
        last = middle - 1;
    }
    const PackedRows rows = PackedRows::of(cu_seqlens, first, total, seqlen);
    return {first, token - rows.begin, rows.length, 0, token};
  }
  __device__ __forceinline__ bool exists() const { return index >= 0 && index < count; }
};

__device__ __forceinline__ uint4 load_piece(const Element* row, int column) {
  return *reinterpret_cast<const uint4*>(row + column);
}

__device__ __forceinline__ float element_of(const uint4& piece, int i) {
  return ElementTraits<Element>::to_float(reinterpret_cast<const uint16_t*>(&piece)[i]);
}

// Eight elements of a row, rotated by the angles of a position.
__device__ __forceinline__ uint4 rotated(const Params& p, const Element* row, int column,
                                         int position) {
  const uint4 piece = load_piece(row, column);
  if (p.cos == nullptr || column >= p.rotary_dim) return piece;
  const int64_t angles = min(max(position, 0), p.positions - 1);
  const int half = p.rotary_dim / 2;
  const auto cos = [&](int i) {
    return load_element(p.cos, angles * p.cos_stride + i, p.rotary_dtype);
  };
  const auto sin = [&](int i) {
    return load_element(p.sin, angles * p.sin_stride + i, p.rotary_dtype);
  };
  float x[kPiece];
  if (p.rotary_order == BLOCKFLASH_ROTARY_INTERLEAVED) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 2) {
      const float a = element_of(piece, i), b = element_of(piece, i + 1);
      const float c = cos((column + i) / 2), s = sin((column + i) / 2);
      x[i] = a * c - b * s, x[i + 1] = b * c + a * s;
    }
  } else {
    const bool second = column >= half;
    const uint4 partner = load_piece(row, second ? column - half : column + half);
    const int first_angle = second ? column - half : column;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float a = element_of(piece, i), b = element_of(partner, i);
      const float c = cos(first_angle + i), s = sin(first_angle + i);
      x[i] = second ? a * c + b * s : a * c - b * s;
    }
  }
  using Traits = ElementTraits<Element>;
  return make_uint4(Traits::pack(x[0], x[1]), Traits::pack(x[2], x[3]), Traits::pack(x[4], x[5]),
                    Traits::pack(x[6], x[7]));
}

__device__ __forceinline__ void store_piece(Element* row, int column, const uint4& piece) {
  *reinterpret_cast<uint4*>(row + column) = piece;
}

__device__ __forceinline__ void append(const Params& p, int token_row, int column) {
  const int token_number = token_row / p.num_heads_kv;
  const int head = token_row - token_number * p.num_heads_kv;
  const Token token = Token::of(p.cu_seqlens_new, token_number, p.batch, p.seqlen_new, p.total_new);
  if (!token.exists()) return;
  const blockflash_kv_cache& cache = p.cache;
  const int position = keys_of_sequence(cache, token.sequence) - token.count + token.index;
  if (position < 0) return;
  const int page_column = position / cache.page_size;
  const int64_t slot = position - page_column * cache.page_size;
  const int64_t page = page_of_column(cache, token.sequence, page_column);
  const auto from = [&](const void* x, int64_t batch, int64_t seq, int64_t of_head) {
    return static_cast<const Element*>(x) + token.batch * batch + token.row * seq + head * of_head;
  };
  Element* const k = static_cast<Element*>(const_cast<void*>(cache.k)) +
                     page * cache.k_stride_page + slot * cache.k_stride_slot +
                     head * cache.k_stride_head;
  Element* const v = static_cast<Element*>(const_cast<void*>(cache.v)) +
                     page * cache.v_stride_page + slot * cache.v_stride_slot +
                     head * cache.v_stride_head;
  const Element* const k_new =
      from(p.k_new, p.k_new_stride_batch, p.k_new_stride_seq, p.k_new_stride_head);
  const Element* const v_new =
      from(p.v_new, p.v_new_stride_batch, p.v_new_stride_seq, p.v_new_stride_head);
  store_piece(k, column, rotated(p, k_new, column, position));
  store_piece(v, column, load_piece(v_new, column));
}

__device__ __forceinline__ void rotate_query(const Params& p, int token_row, int column) {
  const int token_number = token_row / p.num_heads_q;
  const int head = token_row - token_number * p.num_heads_q;
  const Token token = Token::of(p.cu_seqlens_q, token_number, p.batch, p.seqlen_q, p.total_q);
  if (!token.exists()) return;
  const int position = keys_of_sequence(p.cache, token.sequence) - token.count + token.index;
  const Element* const q = static_cast<const Element*>(p.q) + token.batch * p.q_stride_batch +
                           token.row * p.q_stride_seq + head * p.q_stride_head;
  Element* const to = static_cast<Element*>(p.q_rotated) + token.batch * p.q_rotated_stride_batch +
                      token.row * p.q_rotated_stride_seq + head * p.q_rotated_stride_head;
  store_piece(to, column, rotated(p, q, column, position));
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_kv_append_params p) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  const int pieces = p.head_dim / kPiece;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * Config::threads + threadIdx.x;
  const int64_t row = thread / pieces;
  const int column = static_cast<int>(thread - row * pieces) * kPiece;
  const int64_t new_rows =
      p.k_new == nullptr ? 0
                         : static_cast<int64_t>(p.cu_seqlens_new == nullptr ? p.batch * p.seqlen_new
                                                                            : p.total_new) *
                               p.num_heads_kv;
  const int64_t query_rows =
      p.q == nullptr
          ? 0
          : static_cast<int64_t>(p.cu_seqlens_q == nullptr ? p.batch * p.seqlen_q : p.total_q) *
                p.num_heads_q;
  if (row < new_rows)
    append(p, static_cast<int>(row), column);
  else if (row < new_rows + query_rows)
    rotate_query(p, static_cast<int>(row - new_rows), column);
}

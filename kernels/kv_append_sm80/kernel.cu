// Appends keys and values to a cache, and rotates them and queries by their positions (rotary
// embedding).
//
// A row is one head of one token of new keys or of queries, and a thread writes 8 elements of it.
#include "blockflash/config/kv_append.cuh"
#include "blockflash/decode/pages.cuh"
#include "blockflash/decode/rotary.cuh"
#include "blockflash/decode/tokens.cuh"
#include "blockflash/params/kv_append.h"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

using Config = KvAppendConfig;
using Element = Config::Element;
using Params = blockflash_kv_append_params;

constexpr int kPiece = 8;  // elements of 16 bytes

__device__ __forceinline__ uint4 load_piece(const Element* row, int column) {
  return *reinterpret_cast<const uint4*>(row + column);
}

__device__ __forceinline__ void store_piece(Element* row, int column, const uint4& piece) {
  *reinterpret_cast<uint4*>(row + column) = piece;
}

__device__ __forceinline__ void append(const Params& p, int row, int column) {
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
  Element* const k = static_cast<Element*>(const_cast<void*>(cache.k)) +
                     page * cache.k_stride_page + slot * cache.k_stride_slot +
                     head * cache.k_stride_head;
  Element* const v = static_cast<Element*>(const_cast<void*>(cache.v)) +
                     page * cache.v_stride_page + slot * cache.v_stride_slot +
                     head * cache.v_stride_head;
  const Element* const k_new = static_cast<const Element*>(p.k_new) +
                               token.batch * p.k_new_stride_batch + token.row * p.k_new_stride_seq +
                               head * p.k_new_stride_head;
  const Element* const v_new = static_cast<const Element*>(p.v_new) +
                               token.batch * p.v_new_stride_batch + token.row * p.v_new_stride_seq +
                               head * p.v_new_stride_head;
  if (column < p.head_dim_qk)
    store_piece(k, column, rotated(p.rotary_new, k_new, column, position));
  if (column < p.head_dim_v) store_piece(v, column, load_piece(v_new, column));
}

__device__ __forceinline__ void turn_query(const Params& p, int row, int column) {
  const int number = row / p.num_heads_q, head = row - number * p.num_heads_q;
  const Token token = Token::of(p.cu_seqlens_q, number, p.batch, p.seqlen_q, p.total_q);
  if (!token.exists()) return;
  const Element* const from = static_cast<const Element*>(p.q) + token.batch * p.q_stride_batch +
                              token.row * p.q_stride_seq + head * p.q_stride_head;
  Element* const to = static_cast<Element*>(p.q_turned) + token.batch * p.q_turned_stride_batch +
                      token.row * p.q_turned_stride_seq + head * p.q_turned_stride_head;
  store_piece(to, column, rotated(p.rotary_q, from, column, token.position(p.cache)));
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_kv_append_params p) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  // Attention waits for all of this kernel itself.
  ptx::launch_dependents();
  const int pieces = max(p.head_dim_qk, p.head_dim_v) / kPiece;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * Config::threads + threadIdx.x;
  const int64_t row = thread / pieces;
  const int column = static_cast<int>(thread - row * pieces) * kPiece;
  const int new_rows = p.k_new == nullptr ? 0
                                          : rows_of(p.cu_seqlens_new, p.batch, p.seqlen_new,
                                                    p.total_new, p.num_heads_kv);
  const int query_rows =
      p.q == nullptr ? 0 : rows_of(p.cu_seqlens_q, p.batch, p.seqlen_q, p.total_q, p.num_heads_q);
  if (row < new_rows)
    append(p, static_cast<int>(row), column);
  else if (row - new_rows < query_rows && column < p.head_dim_qk)
    turn_query(p, static_cast<int>(row - new_rows), column);
}

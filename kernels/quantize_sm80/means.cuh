// The mean over the tokens of each sequence and head, in an order that the number of its tokens and
// its head dimension decide alone.
//
// Tokens are divided into chunks, and those of a chunk into classes: token by token in turns. Each
// thread adds up a class, and then classes are added in order; another launch does the same with
// chunks. Sums and counts of a chunk, which has eight tokens at least if it is not alone, wait in
// the codes of its first eight rows, which hold nothing yet.
#pragma once

#include "rows.cuh"

namespace blockflash {
namespace {

// Where the sum and the count of a column wait in the codes of a chunk: those of a piece in eight
// rows.
__device__ __forceinline__ uint2* waiting(const Params& p, const Tile& tile, int64_t first,
                                          int head, int column) {
  const int row = column % kPiece;
  return reinterpret_cast<uint2*>(codes_of_token(p, tile.sequence, first + row, head) + column -
                                  row);
}

__device__ __forceinline__ void store_mean(const Params& p, const Tile& tile, int head, int column,
                                           float sum, int count) {
  mean_of_head(p, tile.sequence, head)[column] = __fdiv_rn(sum, static_cast<float>(max(count, 1)));
}

__device__ __forceinline__ void sum_chunk(const Params& p, const Tile& tile, const Place& at) {
  __shared__ float sums[Config::threads * kOwn];
  __shared__ uint8_t counts[Config::threads * kOwn];
  static_assert(2 * BLOCKFLASH_QUANTIZE_CHUNK - 1 <= 255, "no count is greater");
  float sum[kOwn] = {};
  int count[kOwn] = {};
  each_row(p, tile, at, [&](const RawRow& row, bool exists) {
    if (!exists) return;
    float x[kOwn];
    row.widen(p.x_dtype, x);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool is_finite = fabsf(x[i]) < INFINITY;
      sum[i] += is_finite ? x[i] : 0.f;
      count[i] += is_finite;
    }
  });
  const int width = at.lanes * kOwn, numbers = at.heads * width;
  const int own = threadIdx.x / at.lanes * width;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int to = own + at.column(i / kPiece) + i % kPiece;
    sums[to] = sum[i], counts[to] = count[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int number = threadIdx.x; number < numbers; number += Config::threads) {
    const int before = number / width, head = at.first_head + before;
    const int column = number - before * width;
    if (head >= p.num_heads || column >= p.head_dim) continue;
    float sum = 0.f;
    int count = 0;
#pragma unroll 1
    for (int i = number; i < at.tokens * numbers; i += numbers) sum += sums[i], count += counts[i];
    if (tile.chunks == 1)
      store_mean(p, tile, head, column, sum, count);
    else
      *waiting(p, tile, tile.first, head, column) = make_uint2(__float_as_uint(sum), count);
  }
}

// A CTA has a head, and a thread has a column of each so many chunks.
__device__ __forceinline__ void sum_chunks(const Params& p, const Tile& tile, const Place& at) {
  if (tile.chunks == 1) return;  // is done
  __shared__ float sums[Config::threads];
  __shared__ int counts[Config::threads];
  const int width = at.lanes * kOwn, column = threadIdx.x % width;
  float sum = 0.f;
  int count = 0;
  if (column < p.head_dim) {
    const uint2* const first = waiting(p, tile, tile.first, at.first_head, column);
    const int64_t step = p.codes_stride_seq * BLOCKFLASH_QUANTIZE_CHUNK / int64_t{sizeof(uint2)};
#pragma unroll 8
    for (int i = threadIdx.x / width; i < tile.chunks; i += Config::threads / width) {
      const uint2 found = first[i * step];
      sum += __uint_as_float(found.x), count += found.y;
    }
  }
  sums[threadIdx.x] = sum, counts[threadIdx.x] = count;
  __syncthreads();
  if (threadIdx.x >= p.head_dim) return;
#pragma unroll 1
  for (int i = threadIdx.x + width; i < Config::threads; i += width)
    sum += sums[i], count += counts[i];
  store_mean(p, tile, at.first_head, column, sum, count);
}

}  // namespace
}  // namespace blockflash

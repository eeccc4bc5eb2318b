// Rows as they are in memory, and as they are divided by their scale.
#pragma once

#include "blockflash/mma/element.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

// What a thread has of a row: its pieces one after another.
struct RawRow {
  uint4 parts[2 * kPieces];  // of elements of 16 bits the first half

  __device__ __forceinline__ void widen(int dtype, float (&x)[kOwn]) const {
    uint32_t words[kOwn];
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      words[4 * i] = parts[i].x, words[4 * i + 1] = parts[i].y;
      words[4 * i + 2] = parts[i].z, words[4 * i + 3] = parts[i].w;
    }
    const auto half = [&](int i) { return static_cast<uint16_t>(words[i / 2] >> i % 2 * 16); };
    if (dtype == BLOCKFLASH_DTYPE_F32) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) x[i] = __uint_as_float(words[i]);
    } else if (dtype == BLOCKFLASH_DTYPE_F16) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) x[i] = ElementTraits<__half>::to_float(half(i));
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) x[i] = ElementTraits<__nv_bfloat16>::to_float(half(i));
    }
  }
};

// Calls a function for each row that the thread has of a tile, in the order of tokens, and says
// whether it exists; what does not is zeros. All threads call it equally often.
//
// 64 bytes are loaded ahead: two rows of elements of 16 bits, or one of others.
template <class Function>
__device__ __forceinline__ void each_row(const Params& p, const Tile& tile, const Place& at,
                                         Function function) {
  static_assert(kPieces == 2);
  const bool is_wide = p.x_dtype == BLOCKFLASH_DTYPE_F32;
  const int size = is_wide ? 4 : 2;
  const int64_t start = tile.sequence * p.x_stride_batch +
                        (tile.first + at.token) * p.x_stride_seq + at.head * p.x_stride_head +
                        at.column(0);
  const int64_t step = p.x_stride_seq * at.tokens * size;
  const int apart = at.lanes * kPiece * size;
  const unsigned char* next = static_cast<const unsigned char*>(p.x) + start * size;
  int left = tile.count - at.token;  // tokens, of which every `tokens`-th is to be loaded
  const auto load = [&](uint4& first, uint4& second, uint4* first_rest, uint4* second_rest) {
    const auto part = [&](int piece, int number) {
      const unsigned char* const from = next + piece * apart + number * int{sizeof(uint4)};
      return at.exists[piece] && left > 0 ? *reinterpret_cast<const uint4*>(from)
                                          : make_uint4(0, 0, 0, 0);
    };
    first = part(0, 0), second = part(1, 0);
    if (first_rest != nullptr) *first_rest = part(0, 1), *second_rest = part(1, 1);
    next += step, left -= at.tokens;
  };
  uint4 ahead[4];
  const auto load_ahead = [&] {
    if (is_wide)
      load(ahead[0], ahead[2], &ahead[1], &ahead[3]);
    else
      load(ahead[2], ahead[3], nullptr, nullptr);
  };
  if (!is_wide) load(ahead[0], ahead[1], nullptr, nullptr);
  load_ahead();
#pragma unroll 1
  for (int from = 0; from < tile.count; from += at.tokens) {
    const RawRow row = {ahead[0], ahead[1], ahead[2], ahead[3]};
    if (!is_wide) ahead[0] = ahead[2], ahead[1] = ahead[3];
    load_ahead();
    function(row, at.has_row && from + at.token < tile.count);
  }
}

// Multiplies the row that some lanes have with the orthonormal Hadamard matrix, in the order of the
// CPU. All lanes of a warp call this.
__device__ __forceinline__ void rotate(float (&x)[kOwn], const Place& at, int head_dim,
                                       float factor) {
  const auto turn = [&](int half) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i & half) continue;
      const float low = x[i], high = x[i + half];
      x[i] = low + high, x[i + half] = low - high;
    }
  };
#pragma unroll
  for (int half = 1; half < kPiece; half *= 2) turn(half);
#pragma unroll 1
  for (int apart = 1; apart < at.lanes; apart *= 2) {
    const bool is_high = at.lane & apart;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], apart);
      x[i] = is_high ? other - x[i] : x[i] + other;
    }
  }
  static_assert(kPieces == 2);
  if (head_dim > at.lanes * kPiece) turn(kPiece);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) x[i] = __fmul_rn(x[i], factor);
}

// The greatest magnitude of the row that some lanes have. NaN does not count. All lanes of a warp
// call this.
__device__ __forceinline__ float greatest_of(float x, int lanes) {
#pragma unroll 1
  for (int apart = lanes / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}

__device__ __forceinline__ float greatest_of(const float (&x)[kOwn]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) most = fmaxf(most, fabsf(x[i]));
  return most;
}

}  // namespace
}  // namespace blockflash

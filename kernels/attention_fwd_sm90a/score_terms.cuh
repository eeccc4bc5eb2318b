// Score terms in a consumer warpgroup of the Hopper attention kernel: what is added to scores, and
// the bits of partial blocks. Others load the bias into boxes of 64 × 64 elements in shared memory,
// and consumers read the bits from L2, since shared memory is full: a lane reads one word per 64 ×
// 64 scores while the tensor cores compute them.
#pragma once

#include <type_traits>

#include "blockflash/mma/element.cuh"
#include "blockflash/mma/fragment.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "layout.cuh"

namespace blockflash {

// NaN scanners of a CTA: one of them loads the bias if there is one.
__device__ __forceinline__ int scanners_of(const Params& params) {
  if constexpr (kAddsTerms)
    if (terms_of(params).terms.bias != nullptr) return kScanners - 1;
  return kScanners;
}

// The first bits of the key tile in a stage, or -1. Lane 0 reads the word and also releases the
// stage, which orders this before the next write.
__device__ __forceinline__ int announced_bits(uint32_t at) {
  uint32_t word = 0;
  if (threadIdx.x % 32 == 0) word = ptx::load_shared(at);
  return static_cast<int>(__shfl_sync(~0u, word, 0));
}

// The bits of 64 queries and a key tile, of which a lane has one word per 64 keys: a bit per key,
// of its first row in the lower half and of its second row in the upper half.
struct StepBits {
  static constexpr int kWords = (kBlockKv + 63) / 64;
  bool hide;  // whether there are any; the same in the whole warp
  uint32_t words[kWords];

  // Reads the bits that are announced at an address.
  static __device__ __forceinline__ StepBits load(const Params& params, uint32_t announced,
                                                  int warpgroup) {
    const blockflash_score_terms& terms = terms_of(params).terms;
    StepBits bits = {};
    if (!kHasBits || terms.block_bits == nullptr) return bits;
    int tile = announced_bits(announced);
    bits.hide = __any_sync(~0u, tile >= 0);
    if (!bits.hide) return bits;
    tile += warpgroup * kRowStep / 64 * (params.base.block_mask.block_kv / 64);
    const uint32_t* const at =
        terms.bits + static_cast<int64_t>(tile) * BLOCKFLASH_BIT_TILE_WORDS + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kWords; ++i) bits.words[i] = __ldcg(at + i * BLOCKFLASH_BIT_TILE_WORDS);
    return bits;
  }

  // One bit per key of a row of this lane, as from visible_keys.
  __device__ __forceinline__ uint32_t of_row(int half) const {
    if constexpr (kWords == 1) return half == 0 ? words[0] & 0xFFFF : words[0] >> 16;
    return __byte_perm(words[0], words[kWords - 1], half == 0 ? 0x5410 : 0x7632);
  }
};

// Whether bits of a row show a key of the tile, whose bit another lane of the row may hold.
__device__ __forceinline__ bool shows(uint32_t bits_of_row, int key) {
  const uint32_t from = bits_of_row >> (key / 8 * 2 + key % 2);
  return __shfl_sync(~0u, from, threadIdx.x % 32 / 4 * 4 + key % 8 / 2) & 1;
}

// The lower or upper element of a word. The bits of bf16 are the upper ones of f32, which the
// conversion of a single element would shift twice.
__device__ __forceinline__ float element_of(uint32_t word, int upper) {
  if constexpr (std::is_same_v<Config::Element, __nv_bfloat16>)
    return __uint_as_float(upper ? word & 0xFFFF0000 : word << 16);
  else
    return ElementTraits<Config::Element>::to_float(static_cast<uint16_t>(word >> 16 * upper));
}

// s = s·factor + bias for the 64 keys whose scores begin at `first`, from a box of a warpgroup.
__device__ __forceinline__ void add_bias(float (&s)[kBlockKv / 2], int first, float factor,
                                         uint32_t box) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const uint32_t at = box + row * 128 + (lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {  // of 16 keys
    uint32_t words[4];
    ptx::ldmatrix_x4(words, at ^ chunk * 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[first + chunk * 8 + i];
      x = fmaf(x, factor, element_of(words[i / 2], i % 2));
    }
  }
}

// ALiBi of a query tile and a key tile: the slope, and how far the lane's first row is behind its
// first key.
struct Alibi {
  float slope, distance;

  static __device__ __forceinline__ Alibi of(const Params& params, const QueryTile& tile,
                                             int warpgroup, int row, int first_key) {
    const blockflash_score_terms& terms = terms_of(params).terms;
    const int head = tile.head + warpgroup * kHeadStep;
    const int key = first_key + accumulator_column(threadIdx.x % 32, 0);
    return {terms.alibi[tile.batch * terms.alibi_stride_batch + head * terms.alibi_stride_head],
            static_cast<float>(tile.q_begin + row + tile.seqlen_kv - tile.seqlen_q - key)};
  }

  // s = s·factor - slope·|distance|. Of the second row, 8 behind the first one, the distances are
  // those of the first row to the keys 8 before.
  __device__ __forceinline__ void add(float (&s)[kBlockKv / 2], float factor) const {
    const auto of_key = [&](int key) { return -slope * fabsf(distance - static_cast<float>(key)); };
    float before[2] = {of_key(-8), of_key(-7)};
#pragma unroll
    for (int j = 0; j < kBlockKv / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float here = of_key(8 * j + e);
        s[4 * j + e] = fmaf(s[4 * j + e], factor, here);
        s[4 * j + 2 + e] = fmaf(s[4 * j + 2 + e], factor, before[e]);
        before[e] = here;
      }
  }
};

}  // namespace blockflash

// Rotary embeddings of rows of 16-bit elements.
#pragma once

#include <stdint.h>

#include "blockflash/mma/element.cuh"
#include "blockflash/params/kv_append.h"

namespace blockflash {

// Element `column` of a row, rotated together with its partner. Products and sums are rounded one
// by one, as on the CPU.
template <class Element>
__device__ __forceinline__ float turned_element(const blockflash_rotary& rotary, const Element* row,
                                                int column, int64_t position) {
  const int half = rotary.dim / 2;
  const bool interleaved = rotary.pairs == BLOCKFLASH_ROTARY_INTERLEAVED;
  const bool is_second = interleaved ? column % 2 == 1 : column >= half;
  const int apart = interleaved ? 1 : half;
  const int partner = is_second ? column - apart : column + apart;
  const int pair = interleaved ? column / 2 : is_second ? partner : column;
  const auto value = [&](int i) {
    return ElementTraits<Element>::to_float(reinterpret_cast<const uint16_t*>(row)[i]);
  };
  const float cos = load_element(rotary.cos, position * rotary.cos_stride + pair, rotary.dtype);
  const float sin = load_element(rotary.sin, position * rotary.sin_stride + pair, rotary.dtype);
  const float along = __fmul_rn(value(column), cos), across = __fmul_rn(value(partner), sin);
  return is_second ? __fadd_rn(across, along) : __fsub_rn(along, across);
}

// Eight elements of a row that are rotated by the angles of a position.
template <class Element>
__device__ __forceinline__ uint4 rotated(const blockflash_rotary& rotary, const Element* row,
                                         int column, int64_t position) {
  uint4 piece = *reinterpret_cast<const uint4*>(row + column);
  if (rotary.cos == nullptr) return piece;
  position = min(max(position, int64_t{0}), int64_t{rotary.positions - 1});
  uint32_t* const words[] = {&piece.x, &piece.y, &piece.z, &piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = column + i * 2;
    if (at >= rotary.dim) break;
    *words[i] = ElementTraits<Element>::pack(turned_element(rotary, row, at, position),
                                             turned_element(rotary, row, at + 1, position));
  }
  return piece;
}

}  // namespace blockflash

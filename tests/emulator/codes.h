// Codes of 8 bits, and the nearest one by search.
#pragma once

#include "problem.h"

namespace {

constexpr int kHalf = BLOCKFLASH_DTYPE_F16, kBrain = BLOCKFLASH_DTYPE_BF16;
constexpr int kE4m3 = BLOCKFLASH_DTYPE_E4M3, kE5m2 = BLOCKFLASH_DTYPE_E5M2,
              kI8 = BLOCKFLASH_DTYPE_I8;

double value_of(int dtype, int code) {
  if (dtype == kI8) return static_cast<int8_t>(code);
  const bool e4m3 = dtype == kE4m3;
  const int fraction = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int exponent = code >> fraction & (e4m3 ? 15 : 31), rest = code & (1 << fraction) - 1;
  if (e4m3 ? (code & 0x7f) == 0x7f : exponent == 31) return NAN;
  const double one = exponent > 0 ? 1 << fraction : 0;
  const double x = ldexp(one + rest, max(exponent, 1) - bias - fraction);
  return code & 0x80 ? -x : x;
}

double greatest(int dtype) { return dtype == kI8 ? 127 : dtype == kE4m3 ? 448 : 57344; }

// The nearest code by search, and of two the even one.
int nearest(int dtype, float x) {
  if (std::isnan(x)) return dtype == kI8 ? 0 : 0x7f;
  int best = -1;
  double least = INFINITY;
  const double most = greatest(dtype), bounded = max(-most, min<double>(x, most));
  for (int code = 0; code < 256; ++code) {
    const double y = value_of(dtype, code);
    if (std::isnan(y) || fabs(y) > most) continue;
    if (dtype != kI8 && std::signbit(y) != std::signbit(x)) continue;
    const double apart = fabs(y - bounded);
    if (apart < least || (apart == least && code % 2 == 0)) best = code, least = apart;
  }
  return best;
}

}  // namespace

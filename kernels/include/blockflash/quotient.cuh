// Integer division with few instructions.
#pragma once

#include "blockflash/ptx/math.cuh"

namespace blockflash {

// a / b for a >= 0, b > 0 and quotients below 2^20: far quicker than a division of integers, which
// would delay the first load of a kernel.
__device__ __forceinline__ int small_quotient(int a, int b) {
  int q = static_cast<int>(static_cast<float>(a) * ptx::rcp_approx(static_cast<float>(b)));
  // The factors are off by 2^-22 at most, the product by less than 1.
  const int rest = a - q * b;
  q += rest >= b;
  q -= rest < 0;
  return q;
}

}  // namespace blockflash

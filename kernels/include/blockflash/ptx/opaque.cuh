// Values of which the compiler knows nothing, and so no instruction.
#pragma once

#include <type_traits>

namespace blockflash::ptx {

// The same value. What is computed from it stays where it is needed: hoisted out of the loops
// around, it would take registers that the loops need.
template <class T>
__device__ __forceinline__ T opaque(T x) {
  if constexpr (std::is_same_v<T, float>)
    asm volatile("" : "+f"(x));
  else if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(x));
  else
    asm volatile("" : "+r"(x));
  return x;
}

}  // namespace blockflash::ptx

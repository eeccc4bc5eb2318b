// Where a sequence of a packed batch is in its tensor.
#pragma once

#include <stdint.h>

namespace blockflash {

// Rows [begin, begin + length) of a packed tensor.
struct PackedRows {
  int begin, length;

  // The offsets are data on the device that nobody has validated. Whatever they hold, the result
  // is inside the `total` rows of the tensor and is at most as long as the `longest` sequence,
  // for which the grid was made. A caller that needs both begin and length must take them from one
  // call, since the offsets may be overwritten between two calls.
  static __device__ __forceinline__ PackedRows of(const int32_t* cu_seqlens, int sequence,
                                                  int total, int longest) {
    const int begin = min(max(cu_seqlens[sequence], 0), total);
    const int end = min(max(cu_seqlens[sequence + 1], begin), total);
    return {begin, min(end - begin, longest)};
  }
};

}  // namespace blockflash

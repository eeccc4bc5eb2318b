// Where a sequence of a packed batch lies in its tensor.
#pragma once

#include <stdint.h>

namespace blockflash {

// Rows [begin, begin + length) of a packed tensor.
struct PackedRows {
  int begin, length;

  // The offsets are data on the device that nobody has validated. Whatever they hold, the result
  // lies inside the `total` rows of the tensor and is no longer than the `longest` sequence that
  // the grid was made for. A caller that needs the begin and the length must take both from one
  // call: the offsets may be overwritten between two.
  static __device__ __forceinline__ PackedRows of(const int32_t* cu_seqlens, int sequence,
                                                  int total, int longest) {
    const int begin = min(max(cu_seqlens[sequence], 0), total);
    const int end = min(max(cu_seqlens[sequence + 1], begin), total);
    return {begin, min(end - begin, longest)};
  }
};

}  // namespace blockflash

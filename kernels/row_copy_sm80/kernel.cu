// Copies rows of a few tensors by few CTAs, beside a kernel that has the other SMs.
#include "blockflash/config/row_copy.cuh"
#include "blockflash/params/row_copy.h"
#include "blockflash/ptx/global.cuh"
#include "blockflash/ptx/launch.cuh"

namespace blockflash {
namespace {

constexpr int kAtOnce = 4;  // pieces of a thread that are on their way together
constexpr int kPieceBytes = 16;

// The pieces of a copy that a thread moves: every `threads`th one of all rows, from `first` on.
__device__ __forceinline__ void copy_rows(const blockflash_row_copy& copy, int64_t first,
                                          int64_t threads) {
  const int32_t pieces = copy.pieces;
  const int64_t total = static_cast<int64_t>(copy.rows) * pieces;
  const int64_t step_rows = threads / pieces;
  const int32_t step_pieces = static_cast<int32_t>(threads - step_rows * pieces);
  int64_t row = first / pieces;
  int32_t piece = static_cast<int32_t>(first - row * pieces);
  const char* const from = static_cast<const char*>(copy.from);
  char* const to = static_cast<char*>(copy.to);
#pragma unroll 1
  for (int64_t at = first; at < total;) {
    uint4 moved[kAtOnce];
    char* places[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, at += threads) {
      places[i] = nullptr;
      if (at >= total) continue;
      const int64_t column = static_cast<int64_t>(piece) * kPieceBytes;
      moved[i] = __ldcs(reinterpret_cast<const uint4*>(from + row * copy.from_pitch + column));
      places[i] = to + row * copy.to_pitch + column;
      row += step_rows, piece += step_pieces;
      if (piece >= pieces) ++row, piece -= pieces;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (places[i] == nullptr) continue;
      ptx::store_16_bytes(places[i], {moved[i].x, moved[i].y, moved[i].z, moved[i].w});
    }
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_row_copy_params p) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  const int64_t threads = static_cast<int64_t>(gridDim.x) * RowCopyConfig::threads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * RowCopyConfig::threads + threadIdx.x;
  for (int i = 0; i < p.count; ++i) copy_rows(p.copies[i], first, threads);
}

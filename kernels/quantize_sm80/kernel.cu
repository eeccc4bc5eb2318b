// Turns rows of attention into codes of 8 bits and their scales: rows without their mean, rotated,
// divided by their scale and rounded.
//
// A call launches some of four steps, which all pass over tiles: some tokens of a sequence and some
// heads. A thread has pieces of the rows of one head, so that the mean and the scale of a head are
// loaded once.
#include "blockflash/ptx/launch.cuh"
#include "means.cuh"

namespace blockflash {
namespace {

// Zeros where the scales of many tokens will be, in CTAs that have nothing else to do.
__device__ __forceinline__ void clear_scales(const Params& p) {
  const int at = blockIdx.x * Config::threads + threadIdx.x;
  const int sequence = at / p.num_heads;
  if (sequence < p.batch) *scale_of_head(p, sequence, at - sequence * p.num_heads) = 0.f;
}

__device__ __forceinline__ float divided_by_greatest(const Params& p, float most) {
  return __fdiv_rn(most, greatest_code(p.codes_dtype));
}

// Finds the scales of a tile (step GREATEST), or writes its codes: one function, so that there is
// little machine code. A scale of 0 is found as such, and stands for 1.
__device__ __forceinline__ void pass_over(const Params& p, const Tile& tile, const Place& at) {
  __shared__ int found[Config::threads];  // scales of heads, or of all, as integers of equal order
  float* const of_head = scale_of_head(p, tile.sequence, at.head);
  Divisor divisor = {};
  float most = 0.f;
  const bool writes = p.step == BLOCKFLASH_QUANTIZE_CODES;
  const bool of_tokens = p.scale_of == BLOCKFLASH_QUANTIZE_TOKEN;
  const bool is_given = p.scale_of == BLOCKFLASH_QUANTIZE_GIVEN;
  if (writes && !of_tokens && at.has_row) {
    float scale = *of_head;
    if (scale == 0.f && !is_given) {
      scale = 1.f;
      // Who reads it sees 0 or 1, and takes both for 1.
      if (tile.chunk == 0 && at.token == 0 && at.lane == 0) *of_head = 1.f;
    }
    divisor = Divisor::of(scale);
  }
  if (!writes) {
    found[threadIdx.x] = 0;
    __syncthreads();
  }
  float mean[kOwn] = {};
  if (p.mean != nullptr) {
    const float* const of_row = mean_of_head(p, tile.sequence, at.head);
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      if (!at.exists[i / kPiece]) continue;
      const float4 four =
          *reinterpret_cast<const float4*>(of_row + at.column(i / kPiece) + i % kPiece);
      mean[i] = four.x, mean[i + 1] = four.y, mean[i + 2] = four.z, mean[i + 3] = four.w;
    }
  }
  // Where the next row goes to.
  const int64_t first = tile.first + at.token;
  uint8_t* codes = codes_of_token(p, tile.sequence, first, at.head) + at.column(0);
  float* scales = of_head + first * p.scale_stride_seq;
  const int64_t codes_step = p.codes_stride_seq * at.tokens;
  const int64_t scales_step = p.scale_stride_seq * at.tokens;

  each_row(p, tile, at, [&](const RawRow& row, bool exists) {
    float x[kOwn];
    row.widen(p.x_dtype, x);
    if (p.mean != nullptr) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) x[i] = __fsub_rn(x[i], mean[i]);
    }
    if (p.rotation != 0.f) rotate(x, at, p.head_dim, p.rotation);
    const float of_row = exists && (of_tokens || !writes) ? greatest_of(x) : 0.f;
    if (!writes) {
      most = fmaxf(most, of_row);
      return;
    }
    if (of_tokens) {
      float scale = divided_by_greatest(p, greatest_of(of_row, at.lanes));
      if (scale == 0.f) scale = 1.f;
      if (exists && at.lane == 0 && p.scale != nullptr) *scales = scale;
      scales += scales_step;
      divisor = Divisor::of(scale);
    }
    divisor.divide(x, !is_given);
    uint32_t words[kOwn / 4];
    encode(x, p.codes_dtype, words);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (exists && at.exists[i])
        *reinterpret_cast<uint2*>(codes + i * at.lanes * kPiece) =
            make_uint2(words[2 * i], words[2 * i + 1]);
    codes += codes_step;
  });

  if (writes) return;
  const bool is_one = p.scale_of == BLOCKFLASH_QUANTIZE_TENSOR;
  const int scale = __float_as_int(divided_by_greatest(p, greatest_of(most, at.lanes)));
  if (at.has_row && at.lane == 0) atomicMax(&found[is_one ? 0 : at.head - at.first_head], scale);
  __syncthreads();
  const int thread = threadIdx.x, head = at.first_head + thread;
  if (thread < (is_one ? 1 : at.heads) && head < p.num_heads)
    atomicMax(reinterpret_cast<int*>(scale_of_head(p, tile.sequence, head)), found[thread]);
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_quantize_params p) {
  using namespace blockflash;
  ptx::wait_for_predecessors();
  // What follows waits for all of this kernel itself.
  ptx::launch_dependents();
  const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
  if (p.scale_of == BLOCKFLASH_QUANTIZE_TENSOR && is_first) {
    if (p.step == BLOCKFLASH_QUANTIZE_MEANS) *p.scale = 0.f;
    if (p.step == BLOCKFLASH_QUANTIZE_CODES && *p.scale == 0.f) *p.scale = 1.f;
  }
  if (p.batch == 0 || p.num_heads == 0) return;
  const bool clears = p.step == BLOCKFLASH_QUANTIZE_MEANS && p.scale_of == BLOCKFLASH_QUANTIZE_HEAD;
  if (p.step == BLOCKFLASH_QUANTIZE_MEANS && p.mean == nullptr) {
    if (clears) clear_scales(p);
    return;
  }
  const bool sums = p.step == BLOCKFLASH_QUANTIZE_SUMS || p.step == BLOCKFLASH_QUANTIZE_MEANS;
  int slot = p.descending ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Place at = Place::of(p, slot);
  const Tile tile = shared_tile(p, slot, sums ? BLOCKFLASH_QUANTIZE_CHUNK : p.tokens, p.step);
  if (tile.count < 0) return;
  if (clears && at.has_row && at.token == 0 && at.lane == 0)
    *scale_of_head(p, tile.sequence, at.head) = 0.f;
  switch (p.step) {
    case BLOCKFLASH_QUANTIZE_SUMS:
      return sum_chunk(p, tile, at);
    case BLOCKFLASH_QUANTIZE_MEANS:
      return sum_chunks(p, tile, at);
    default:
      return pass_over(p, tile, at);
  }
}

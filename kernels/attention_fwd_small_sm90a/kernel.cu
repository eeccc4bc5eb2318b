// Attention forward for Hopper where the grid is small, so that one CTA's latency is the time of
// the launch: no TMA, no producer, no scheduler.
//
// A CTA computes 64 queries of one head. Its warpgroups divide the key tiles; each loads its own by
// cp.async, multiplies by WGMMA, and starts the next scores before the exponentials of the current
// ones. Then they add their partial results through shared memory.
#include "../attention_fwd_sm90a/softmax.cuh"
#include "blockflash/attention/scores.cuh"
#include "blockflash/ptx/barrier_vote.cuh"
#include "blockflash/ptx/launch.cuh"
#include "blockflash/ptx/ldmatrix.cuh"
#include "blockflash/ptx/mbarrier.cuh"
#include "blockflash/ptx/wgmma.cuh"
#include "output.cuh"
#include "tiles.cuh"

namespace blockflash {
namespace {

constexpr float kSlack = 8.f;

using Scores = float[kRows / 2];
using Output = float[kOutput];
using Probabilities = uint32_t[kRows / 4];
// Q is multiplied from registers where eight warps of an SM leave them free.
constexpr bool kQInRegisters = kWarpgroups == 2 && Config::min_blocks == 1;
using Queries = uint32_t[kQInRegisters ? kD / 4 : 1];

// Q of this warp as fragments of WGMMA.
__device__ __forceinline__ void load_queries(Queries& q, uint32_t q_smem) {
  if constexpr (!kQInRegisters) return;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int d = 0; d < kD / 16; ++d) {
    uint32_t fragment[4];
    ptx::ldmatrix_x4(fragment, q_smem + d / 4 * kPanelBytes + in_panel(row, d % 4 * 2 + lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) q[4 * d + i] = fragment[i];
  }
}

// s = Q·Kᵀ
__device__ __forceinline__ void start_scores(Scores& s, const Queries& q, uint32_t q_smem,
                                             uint32_t k_smem) {
  const uint64_t k = ptx::wgmma_descriptor(k_smem), q_tile = ptx::wgmma_descriptor(q_smem);
  using Product = ptx::Wgmma<kRows, Element>;
#pragma unroll
  for (int d = 0; d < kD / 16; ++d) {
    constexpr auto at = [](int d) { return (d / 4 * kPanelBytes + d % 4 * 32) >> 4; };
    if constexpr (kQInRegisters) {
      if (d == 0)
        Product::template rs<false, false>(s, q + 4 * d, k + at(d));
      else
        Product::template rs<true, false>(s, q + 4 * d, k + at(d));
    } else {
      if (d == 0)
        Product::template ss<false>(s, q_tile + at(d), k + at(d));
      else
        Product::template ss<true>(s, q_tile + at(d), k + at(d));
    }
  }
  ptx::wgmma_commit_group();
}

// o += P·V
__device__ __forceinline__ void start_output(Output& o, const Probabilities& p, uint32_t v_smem) {
  const uint64_t v = ptx::wgmma_descriptor_mn(v_smem, kPanelBytes, 1024);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k)
    ptx::Wgmma<kD, Element>::template rs<true, true>(o, p + 4 * k, v + (k * 16 * 128 >> 4));
  ptx::wgmma_commit_group();
}

__device__ __forceinline__ void apply_mask(Scores& s, const AttentionMask& mask, int first_row,
                                           int first_key) {
  const int lane = threadIdx.x % 32, first = first_key + accumulator_column(lane, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const KeyRange keys = mask.keys_of(first_row + accumulator_row(lane, 2 * half));
    mask_row(s, half, visible_keys(keys.begin - first, keys.end - first));
  }
}

// A NaN or infinity in V reaches every row of an MMA, also those whose probability for its key is
// 0. In a masked tile such values are therefore added here to the rows that do attend to them, and
// then removed from the tile. Rare, so small code.
__device__ __forceinline__ void add_visible_nonfinite(Output& o, const unsigned char* v_tile,
                                                      const AttentionMask& mask, int first_row,
                                                      int first_key) {
  const int lane = threadIdx.x % 32;
  const KeyRange keys[2] = {mask.keys_of(first_row + accumulator_row(lane, 0)),
                            mask.keys_of(first_row + accumulator_row(lane, 2))};
#pragma unroll 1
  for (int key = 0; key < kRows; ++key) {
    bool visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visible[half] = first_key + key >= keys[half].begin && first_key + key < keys[half].end;
#pragma unroll
    for (int d = 0; d < kD / 8; ++d) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(v_tile + d / 8 * kPanelBytes +
                                                               in_panel(key, d % 8) + lane % 4 * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint16_t bits = static_cast<uint16_t>(pair >> (16 * i));
        const float value = is_nonfinite<Element>(bits) ? Traits::to_float(bits) : 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) o[4 * d + 2 * half + i] += visible[half] ? value : 0.f;
      }
    }
  }
}

}  // namespace
}  // namespace blockflash

BLOCKFLASH_KERNEL(const __grid_constant__ blockflash_attention_fwd_params p) {
  using namespace blockflash;
  extern __shared__ __align__(1024) unsigned char smem[];

  const Work work = Work::of(p);
  const int head_kv = work.head / (p.num_heads_q / p.num_heads_kv);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  // Key tiles of this warpgroup: every kWarpgroups-th one, from the last to the first.
  const int tiles = max(work.tiles - warpgroup + kWarpgroups - 1, 0) / kWarpgroups;
  const int last = work.last - warpgroup;
  const auto first_key_of = [&](int i) { return (last - kWarpgroups * i) * kRows; };
  __shared__ Work kept;
  const auto first_row = [&] { return kept.q_begin + threadIdx.x / 32 % 4 * 16; };  // of this warp

  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const uint32_t rings = q_smem + kTileBytes, ring = rings + warpgroup * kRingBytes;
  const auto k_stage = [&](int i) { return ring + i % kStages * kTileBytes; };
  const auto v_stage = [&](int i) { return k_stage(i) + kStages * kTileBytes; };
  const TileChunks<128> chunks(threadIdx.x % 128);
  // This thread's part of the tiles that are asked for next.
  const Element* next_k = static_cast<const Element*>(p.k) + work.batch * p.k_stride_batch +
                          head_kv * p.k_stride_head +
                          (first_key_of(0) + chunks.row) * p.k_stride_seq;
  const Element* next_v = static_cast<const Element*>(p.v) + work.batch * p.v_stride_batch +
                          head_kv * p.v_stride_head +
                          (first_key_of(0) + chunks.row) * p.v_stride_seq;
  // Every call commits a group: K tile i and V tile i - 1, as far as they exist.
  const auto start_tiles = [&](int i) {
    if (i < tiles) {
      chunks.start(k_stage(i), next_k, p.k_stride_seq, p.seqlen_kv - first_key_of(i),
                   p.head_dim_qk);
      next_k -= kWarpgroups * kRows * p.k_stride_seq;
    }
    if (i >= 1 && i <= tiles) {
      chunks.start(v_stage(i - 1), next_v, p.v_stride_seq, p.seqlen_kv - first_key_of(i - 1),
                   p.head_dim_v);
      next_v -= kWarpgroups * kRows * p.v_stride_seq;
    }
    ptx::cp_async_commit_group();
  };

  const TileChunks<Config::threads> q_chunks(threadIdx.x);
  const Element* const q = static_cast<const Element*>(p.q) + work.batch * p.q_stride_batch +
                           work.head * p.q_stride_head +
                           (work.q_begin + q_chunks.row) * p.q_stride_seq;
  ptx::wait_for_predecessors_behind(reinterpret_cast<uint64_t>(q) ^
                                    reinterpret_cast<uint64_t>(next_k) ^
                                    reinterpret_cast<uint64_t>(next_v));
  q_chunks.start(q_smem, q, p.q_stride_seq, p.seqlen_q - work.q_begin, p.head_dim_qk);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) start_tiles(i);
  if (threadIdx.x == 0) kept = work;

  const blockflash_scores& of_scores = p.scores;
  Softmax softmax;
  softmax.reset();
  Scores s;
  Output o = {};
  Probabilities probabilities = {};
  Queries q_fragments;

  ptx::cp_async_wait_group<kStages - 1>();
  ptx::fence_proxy_async();
  __syncthreads();  // Q, the first K tile and the work are visible
  load_queries(q_fragments, q_smem);
  ptx::wgmma_pin(o), ptx::wgmma_pin(q_fragments);
  ptx::wgmma_fence();
  start_scores(s, q_fragments, q_smem, k_stage(0));
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(s);

#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    cap_scores(s, of_scores);
    const int first_key = first_key_of(i);
    const bool masked = first_key < kept.all.begin || first_key + kRows > kept.all.end;
    if (masked) apply_mask(s, kept.mask(p), first_row(), first_key);
    int top[2];
    softmax.largest(s, top);
    float rescale[2] = {1.f, 1.f};
    const bool grew = softmax.exceeds(top, kSlack, of_scores.inverse_scale_log2);
    if (grew) softmax.move(s, top, of_scores, rescale);
    // Logarithms of the probabilities. From here on the next scores may be written to s.
    float logs[kRows / 2];
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j)
      logs[j] = fmaf(s[j], of_scores.scale_log2, -softmax.reference[j / 2 % 2]);
    ptx::wgmma_pin(logs);

    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(o), ptx::wgmma_pin(probabilities);
    if (grew) {
#pragma unroll
      for (int j = 0; j < kOutput; ++j) o[j] *= rescale[j / 2 % 2];
    }
    ptx::cp_async_wait_group<kStages - 2>();
    // K tile i + 1 and V tile i are visible to all behind the barrier. All have read K tile i and
    // V tile i - 1, whose stages are refilled next.
    ptx::fence_proxy_async();
    unsigned char* const v_tile = smem + (v_stage(i) - q_smem);
    if (ptx::named_barrier_or(1 + warpgroup, 128, masked && chunks.has_nonfinite(v_tile))) {
      add_visible_nonfinite(o, v_tile, kept.mask(p), first_row(), first_key);
      ptx::named_barrier_sync(1 + warpgroup, 128);  // all have read the tile
      chunks.clear_nonfinite(v_tile);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(1 + warpgroup, 128);
    }
    // After the last tile the scores are discarded: a branch around a WGMMA would make the
    // assembler serialise all of them.
    ptx::wgmma_pin(o);
    ptx::wgmma_fence();
    start_scores(s, q_fragments, q_smem, k_stage(i + 1));

    float partial[2] = {0.f, 0.f};  // each tile is summed separately, so that long rows lose little
#pragma unroll
    for (int j = 0; j < kRows / 2; j += 2) {
      const float low = ptx::ex2_approx(logs[j]), high = ptx::ex2_approx(logs[j + 1]);
      partial[j / 2 % 2] += low + high;
      probabilities[j / 2] = Traits::pack(low, high);
    }
    softmax.exact[0] += partial[0], softmax.exact[1] += partial[1];
    ptx::wgmma_pin(probabilities), ptx::wgmma_pin(o);
    ptx::wgmma_fence();
    start_output(o, probabilities, v_stage(i));
    start_tiles(i + kStages);
    // The last tile was asked for. Dependent kernels that start earlier would share few SMs.
    if (i == max(tiles - kStages, 0)) ptx::launch_dependents();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(s);
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(o);
  float stored[kStored];
  exchange(o, stored, softmax, rings, warpgroup);
  store_output(stored, softmax, p, kept, warpgroup);
}
